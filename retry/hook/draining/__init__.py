"""Kept messages: the threads that repeat them, one repetition, and the close of a hook.

Imports: sending and below. Interface: the drain, its attempts, the close and its result.
"""

from __future__ import annotations

from retry.hook.draining.attempts import Attempts
from retry.hook.draining.closing import Closed, close, stop_beginning
from retry.hook.draining.drain import Drain

__all__ = ["Attempts", "Closed", "Drain", "close", "stop_beginning"]
