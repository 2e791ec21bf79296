"""PURPOSE of dmq/cli/objects."""
