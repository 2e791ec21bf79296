"""PURPOSE of dmq/rocketmq_server/codec."""
