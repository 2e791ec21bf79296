"""Configuration: the daemon's settings, named contexts of the command line, units of values.

Imports: ``dmq.errors`` and ``broker_adapter``. Interface: ``settings``, ``contexts`` and ``units``.
"""
