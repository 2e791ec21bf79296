"""PURPOSE of dmq/producer_store/entries."""
