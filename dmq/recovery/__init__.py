"""Recovery of the store of a stopped daemon: check, salvage, and periodic backups and snapshots of a running one."""
