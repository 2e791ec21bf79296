"""Storage engines behind one protocol: RocksDB, and one in memory for tests.

Imports: ``dmq.store.schema`` and below. Interface: the engine protocol, both engines, the end of the log.
"""
