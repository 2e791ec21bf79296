"""Storage engines with one protocol: RocksDB, and an in-memory engine for tests.

Imports: ``dmq.store.schema`` and below. Interface: the engine protocol, both engines, and the check of the WAL's end.
"""
