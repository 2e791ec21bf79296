"""Brokers in this process, with a manual clock: embedded, in memory, fronted; their scheduler and exporter.

Imports: ``rigs.store``, ``models.store``, ``models.trail``.
"""
