"""The spool: a sink for the producer's hook, in RocksDB in this process, with the daemon's store and timeline."""
