"""Front processes: the two ends of a link, in this process or in two.

Imports: ``rigs.broker``, ``clients.wire``.
"""
