"""PURPOSE of dmq/rocketmq_server/calls."""
