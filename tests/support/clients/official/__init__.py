"""Official RocketMQ clients, their builds, and the suites of tests that each of them must pass.

Imports: ``rigs.daemon``, ``clients.java``, ``clients.wire``.
"""
