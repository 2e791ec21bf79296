"""Test support only: a peer in memory, one on a socket, and a service. The server does not import it."""

from __future__ import annotations
