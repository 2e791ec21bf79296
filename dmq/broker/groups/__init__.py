"""PURPOSE of dmq/broker/groups."""
