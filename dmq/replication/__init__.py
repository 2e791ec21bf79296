"""Replication: the second copy of a store, in an object store.

The replication log has every batch of the writer in numbered segments. A base is a checkpoint of the database. A base
and the segments after it restore the store at any time of the log.

Imports: ``dmq.store`` and below. Interface: objects, lease, the log of a running store, bases, restore and check.
"""
