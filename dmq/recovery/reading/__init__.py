"""Reading a store that may be damaged: rows, names, offsets, and the report of losses.

Imports: ``dmq.store`` and below. Interface: row decoding, damage reader, offset map, loss report.
"""
