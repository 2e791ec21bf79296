"""The folder of the producer store: one directory per process, adoption of orphans, copies.

Imports: ``dmq.producer_store.entries`` and below. Interface: the root folder, adoption, copies, bounds.
"""
