"""Salvage of a damaged store: readable entries are replayed as operations into a new store, other rows are copied.

The daemon's store keeps sequences and offsets where it can, the producer store gives new ones. Imports:
``dmq.recovery.reading``, ``dmq.recovery.check`` and below. Interface: both salvages.
"""
