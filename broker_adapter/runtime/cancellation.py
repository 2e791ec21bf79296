"""Origin of a cancellation: the current task, or an operation that it awaits."""

from __future__ import annotations

import asyncio


def is_cancelled_here() -> bool:
    """Return True if the current task is being cancelled; otherwise a ``CancelledError`` is of an awaited operation."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
