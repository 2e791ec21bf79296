"""PURPOSE of dmq/broker/handles."""
