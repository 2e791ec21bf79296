"""PURPOSE of dmq/trail/export."""
