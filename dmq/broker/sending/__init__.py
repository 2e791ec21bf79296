"""PURPOSE of dmq/broker/sending."""
