"""PURPOSE of dmq/store/writer."""
