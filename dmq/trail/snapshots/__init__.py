"""PURPOSE of dmq/trail/snapshots."""
