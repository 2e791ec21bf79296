"""PURPOSE of dmq/broker/limits."""
