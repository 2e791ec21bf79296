"""PURPOSE of dmq/cli/trail."""
