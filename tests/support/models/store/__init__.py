"""Checks of the rows of a store: lag, ledger, properties, outbox, and each batch of the writer.

Imports: ``rigs.store``.
"""
