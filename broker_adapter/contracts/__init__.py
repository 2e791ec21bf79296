"""The contracts of brokers: message model, names, limits, errors, and the protocols they fit.

Imports: runtime. Interface: one subject per module.
"""
