"""The admin service ``rockdmq.admin.v1`` and its transports: access and dispatch.

Imports: operations, requests and below. Interface: the service, its access table, both transports.
"""
