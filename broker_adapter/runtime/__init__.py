"""Runtime support without dependencies: clock, cancellation, optional packages, logging.

Imports: the standard library. Interface: one function or class per module.
"""
