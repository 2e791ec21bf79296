"""Requests of the classic protocol and their answers: fields, bodies and values of the message model. Pure functions.

Imports: ``protocol``, ``broker_adapter.contracts`` and below. Only ``broker_adapter.remoting`` uses it.
"""
