"""Models of the embedded broker, the state machines that compare both, and linearizability.

Imports: ``rigs.broker``, ``models.store``, ``forges.messages``.
"""
