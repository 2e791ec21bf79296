"""PURPOSE of dmq/broker/delayed."""
