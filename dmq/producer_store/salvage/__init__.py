"""PURPOSE of dmq/producer_store/salvage."""
