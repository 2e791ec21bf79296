"""Synchronous client of the admin service, for the command line and the hook.

Imports: requests and ``dmq.admin.admin_v1``. Interface: ``AdminClient`` and its channel.
"""
