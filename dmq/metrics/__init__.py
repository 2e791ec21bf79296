"""PURPOSE of dmq/metrics."""
