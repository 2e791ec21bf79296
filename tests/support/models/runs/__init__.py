"""Checks of a whole run of a daemon: answers of clients, the trail, and traces.

Imports: ``rigs.rocketmq``, ``rigs.daemon``, ``clients.load``, ``models.store``, ``models.trail``.
"""
