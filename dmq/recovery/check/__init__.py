"""Checks of a store: every row is read and related rows are compared.

Imports: ``dmq.recovery.reading`` and below. Interface: the check, the ledger comparison, backup verification.
"""
