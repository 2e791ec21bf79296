"""The producer store (spool): a sink of the producer hook in RocksDB, with the daemon's store and timeline."""
