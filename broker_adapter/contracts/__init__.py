"""PURPOSE of broker_adapter/contracts."""
