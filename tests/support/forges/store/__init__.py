"""Stores and spools with known content: a row of each kind, a cell with every feature, and damage.

Imports: ``rigs.broker``, ``rigs.store``, ``clients.embedded``, ``forges.messages``.
"""
