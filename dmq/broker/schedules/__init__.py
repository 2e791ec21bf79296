"""PURPOSE of dmq/broker/schedules."""
