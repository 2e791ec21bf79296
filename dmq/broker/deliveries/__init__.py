"""PURPOSE of dmq/broker/deliveries."""
