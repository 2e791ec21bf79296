"""Replication: the second copy of a store, in an object store.

Imports: ``dmq.store`` and below. Interface: objects, lease.
"""
