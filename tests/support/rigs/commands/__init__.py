"""Commands of ``dmq``: in this process, as forks of a warm process, and at a terminal.

Imports: ``rigs.broker``, ``forges.wire``.
"""
