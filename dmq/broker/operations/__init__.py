"""PURPOSE of dmq/broker/operations."""
