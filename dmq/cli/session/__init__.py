"""PURPOSE of dmq/cli/session."""
