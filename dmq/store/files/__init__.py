"""The store's directory: lock, identity, free space, durable files, and the steady clock.

Imports: ``dmq.store.schema``. Interface: one class or function per module.
"""
