"""PURPOSE of dmq/rocketmq_server/rpc."""
