"""The classic protocol as bytes: frames, codes, properties, message ids, stored messages. Pure functions.

Imports: ``broker_adapter.contracts`` and below. Only ``broker_adapter.remoting`` uses it.
"""
