"""Whose a cancellation is: of the task that meets it, or of something that it waited for."""

from __future__ import annotations

import asyncio


def is_cancelled_here() -> bool:
    """Say whether the task that runs here was asked to end; else a ``CancelledError`` is of something it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
