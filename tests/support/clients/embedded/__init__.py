"""Consumers and operators of a broker in this process.

Imports: ``rigs.broker``, ``models.store``.
"""
