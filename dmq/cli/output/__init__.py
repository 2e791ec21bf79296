"""PURPOSE of dmq/cli/output."""
