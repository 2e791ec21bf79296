"""Half messages, from acceptance to commit, rollback or the last check.

Imports: sending, topics and below. Interface: transactions and their checks.
"""
