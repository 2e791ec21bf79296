"""Salvage of a damaged store: all readable rows are written to a new store.

Imports: ``dmq.recovery.reading``, ``dmq.recovery.check`` and below. Interface: the salvage.
"""
