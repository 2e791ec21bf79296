"""PURPOSE of dmq/admin/client."""
