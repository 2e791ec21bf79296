"""Primary and standby of one replication log, in this process or in two, and their object stores.

Imports: ``rigs.daemon``, ``rigs.commands``, ``rigs.faults``, ``clients.load``, ``models.runs``, ``models.store``.
"""
