"""The two transports of the public protocol, and TLS certificates.

Imports: all other packages of the server, ``dmq.http2``. Interface: both servers, their methods, certificates.
"""
