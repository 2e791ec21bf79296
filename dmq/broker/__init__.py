"""Embedded broker: a full message broker on the store, inside the daemon's process, with no other process and no JVM.
"""

from __future__ import annotations
