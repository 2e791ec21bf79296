"""PURPOSE of dmq/store/files."""
