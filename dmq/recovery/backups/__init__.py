"""PURPOSE of dmq/recovery/backups."""
