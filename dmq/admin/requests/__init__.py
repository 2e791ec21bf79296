"""PURPOSE of dmq/admin/requests."""
