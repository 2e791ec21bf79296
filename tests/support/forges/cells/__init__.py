"""Forged cells: daemons and spools simulated, with the true fate of each message.

Imports: ``forges.trail``.
"""
