"""PURPOSE of dmq/cli/messages."""
