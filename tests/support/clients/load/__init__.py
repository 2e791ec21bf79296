"""Load for daemons that are killed, and the ledger of the answers that its clients received.

Imports: ``rigs.daemon``, ``rigs.faults``, ``clients.wire``, ``models.broker``.
"""
