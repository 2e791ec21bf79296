"""PURPOSE of broker_adapter/queue_client."""
