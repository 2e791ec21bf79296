"""PURPOSE of dmq/broker/pulling."""
