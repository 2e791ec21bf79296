"""PURPOSE of dmq/broker/filters."""
