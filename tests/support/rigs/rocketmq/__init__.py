"""Apache RocketMQ: real clusters, a daemon in front of one, brokers in real time, and stand-ins.

Imports: ``rigs.daemon``, ``rigs.broker``, ``clients.java``, ``clients.official``, ``models.store``, ``models.trail``.
"""
