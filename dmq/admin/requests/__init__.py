"""Admin requests: validation, and the mapping of values to the wire.

Imports: ``dmq.admin.admin_v1`` and below. Interface: validation, mapping, the source of clients.
"""
