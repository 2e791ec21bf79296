"""The store of a producer: spools, the hook, and sinks.

Imports: ``rigs.daemon``, ``rigs.broker``, ``rigs.store``.
"""
