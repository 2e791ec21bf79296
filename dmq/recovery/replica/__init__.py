"""Bases of a running store: made, verified and pruned at intervals, by processes of their own.

Imports: ``dmq.replication``, ``dmq.recovery.check``. Interface: ``BaseKeeper``, ``make_base``.
"""
