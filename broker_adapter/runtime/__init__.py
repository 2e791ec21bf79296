"""PURPOSE of broker_adapter/runtime."""
