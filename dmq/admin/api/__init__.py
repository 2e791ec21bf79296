"""The admin service ``rockdmq.admin.v1`` and its transports: access, dispatch, masks of contents.

Imports: operations, requests and below. Interface: the service, its access table, both transports.
"""
