"""PURPOSE of dmq/broker/classic."""
