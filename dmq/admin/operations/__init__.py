"""PURPOSE of dmq/admin/operations."""
