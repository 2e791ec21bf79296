"""One call, independent of the transport: context, access, dispatch, and the message port.

Imports: sessions, codec, ``dmq.acl`` and below. Interface: call context, access table, dispatch.
"""
