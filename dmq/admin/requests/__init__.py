"""Admin requests and responses: validation, values, and their mapping to the wire.

Imports: ``dmq.admin.admin_v1`` and below. Interface: validation, status values, mapping.
"""
