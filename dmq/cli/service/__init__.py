"""PURPOSE of dmq/cli/service."""
