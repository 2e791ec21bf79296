"""PURPOSE of dmq/broker/failures."""
