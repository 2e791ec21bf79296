"""Between wire messages and broker values: validation, delivery times, error codes. Pure functions.

Imports: ``dmq.broker.filters`` and ``broker_adapter``. Interface: validate, map, count elements, find the delivery
time.
"""
