"""The store's directory: lock, identity, free space, durable files, the steady clock.

Imports: schema. Interface: one class or function per module.
"""
