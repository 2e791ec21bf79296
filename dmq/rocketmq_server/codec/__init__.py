"""Conversion between wire messages and broker values: validation, delivery times, error codes. Pure functions.

Imports: ``dmq.broker.filters`` and ``broker_adapter``. Interface: validation, mapping, element counts, delivery times.
"""
