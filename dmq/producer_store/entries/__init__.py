"""One directory of the producer store: entries, their changes, and reading due entries.

Imports: ``dmq.store``, ``dmq.trail`` and below. Interface: entries, the reader, the plan of a change.
"""
