"""PURPOSE of dmq/rocketmq_server/sessions."""
