"""PURPOSE of dmq/broker/topics."""
