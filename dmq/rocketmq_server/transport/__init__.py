"""PURPOSE of dmq/rocketmq_server/transport."""
