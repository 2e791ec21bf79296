"""The broker's access to the store: units of operations to the writer, reads on one thread, the tail cache.

Imports: ``dmq.store`` and below. Interface: commits, the reader, the queue log, the tail cache.
"""
