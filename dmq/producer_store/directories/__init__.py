"""PURPOSE of dmq/producer_store/directories."""
