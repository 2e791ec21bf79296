"""Embedded broker: a full message broker on the store, inside the daemon's process and without a JVM."""

from __future__ import annotations
