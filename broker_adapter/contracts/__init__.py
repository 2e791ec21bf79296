"""Contracts of brokers: message model, names, limits, errors, and protocols.

Imports: runtime. Interface: one subject per module.
"""
