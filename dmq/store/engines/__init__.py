"""PURPOSE of dmq/store/engines."""
