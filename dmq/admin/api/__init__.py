"""The admin service ``rockdmq.admin.v1`` and its transports: dispatch, access, one method per RPC.

Imports: operations, requests and below. Interface: the service, its access table, both transports.
"""
