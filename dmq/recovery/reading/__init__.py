"""Reading a store that may be damaged: a copy, its rows around damage, names, offsets, and the report of losses.

Imports: ``dmq.producer_store``, ``dmq.store`` and below. Interface: ``Look``, ``SpoolLook``, row decoding, findings.
"""
