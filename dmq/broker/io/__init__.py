"""PURPOSE of dmq/broker/io."""
