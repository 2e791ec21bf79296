"""PURPOSE of dmq/recovery/reading."""
