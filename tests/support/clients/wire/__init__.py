"""The public protocol without an official client: over a connection, as raw bytes, and without a transport.

Imports: ``rigs.broker``.
"""
