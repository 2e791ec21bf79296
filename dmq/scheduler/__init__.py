"""The scheduler: moves due entries from the timeline to their queues, on time and never early."""

from __future__ import annotations

from dmq.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
