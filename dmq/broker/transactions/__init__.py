"""PURPOSE of dmq/broker/transactions."""
