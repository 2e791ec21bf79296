"""PURPOSE of dmq/recovery/check."""
