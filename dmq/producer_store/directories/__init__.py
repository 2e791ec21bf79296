"""The folder of the hook's local store: one directory per process, adoption of dead ones, inspection.

Imports: ``dmq.producer_store.entries`` and below. Interface: the root folder, adoption, copies, figures.
"""
