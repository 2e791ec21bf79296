"""Checks of a store: every row is read and related rows are compared.

One walk checks the rules that every store shares; the checks of the daemon's store and of the producer store add the
families of their own rows. Imports: ``dmq.recovery.reading`` and below. Interface: both checks, the ledger comparison,
backup verification.
"""
