"""PURPOSE of dmq/config."""
