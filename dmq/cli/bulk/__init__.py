"""PURPOSE of dmq/cli/bulk."""
