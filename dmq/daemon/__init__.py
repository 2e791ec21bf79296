"""The daemon: wiring of the parts, one life from open to close, no logic of its own."""

from __future__ import annotations

from dmq.daemon.run import run as run
