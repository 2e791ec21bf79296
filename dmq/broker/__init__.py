"""The embedded broker: a full broker in this process, on the store. No other process, no JVM."""

from __future__ import annotations
