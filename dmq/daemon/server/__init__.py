"""Serving clients: the transport with its sockets, front processes and web processes, and the files that it reads.

Imports: ``dmq.processes``, ``dmq.rocketmq_server``, ``dmq.admin`` and below. Interface: the transport and its limits,
the web processes, the certificates and access keys, the division of descriptors.
"""

from __future__ import annotations

from dmq.daemon.server.descriptors import descriptors_of
from dmq.daemon.server.files import WatchedFiles, certificate_files, certificates_of
from dmq.daemon.server.fronts import plain_served_to
from dmq.daemon.server.transport import ServerOptions, Transport, limits_of, transport_of
from dmq.daemon.server.web import require_web, start_web

__all__ = [
    "ServerOptions",
    "Transport",
    "WatchedFiles",
    "certificate_files",
    "certificates_of",
    "descriptors_of",
    "limits_of",
    "plain_served_to",
    "require_web",
    "start_web",
    "transport_of",
]
