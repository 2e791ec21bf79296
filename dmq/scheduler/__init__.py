"""The scheduler: takes what is due off the timeline and hands it to its queue, in time and never early."""

from __future__ import annotations
