"""For tests alone: a peer in memory, one on a socket, and a service. Nothing of the server imports it."""

from __future__ import annotations
