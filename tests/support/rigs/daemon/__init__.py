"""A daemon in a process of its own, with its fronts, access keys, certificates, HTTP API and console.

Imports: ``rigs.commands``, ``clients.wire``.
"""
