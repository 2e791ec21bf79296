"""Messages in given states: dead, half, recurring, of message groups, with own keys, as classic brokers store them.

Imports: ``rigs.broker``, ``rigs.store``, ``clients.embedded``, ``models.store``.
"""
