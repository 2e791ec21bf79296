"""PURPOSE of dmq/admin/api."""
