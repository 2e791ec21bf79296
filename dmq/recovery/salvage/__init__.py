"""PURPOSE of dmq/recovery/salvage."""
