"""Process and event-loop support: background processes, time slices, logging, compiled modules.

Imports: ``dmq.errors`` and ``broker_adapter``. Interface: one function or class per module.
"""
