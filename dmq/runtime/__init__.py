"""PURPOSE of dmq/runtime."""
