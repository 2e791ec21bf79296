"""Rates that are spent: what a period brings gathers, at most for one period. Pure; time is monotonic.

A single call is served as soon as a whole period's worth is there, however much it takes: the rest is owed, and the
next call waits for it.
"""

from __future__ import annotations

from typing import NamedTuple


class Purse(NamedTuple):
    """How much there is to spend at ``at_s``; below zero: owed."""

    left: float
    at_s: float


def refilled(purse: Purse | None, limit: int, now_s: float, period_s: float = 1.0) -> Purse:
    """Return what is there now, of ``limit`` in a period; ``None`` is who spent nothing yet."""
    if purse is None:
        return Purse(float(limit), now_s)
    return Purse(min(float(limit), purse.left + (now_s - purse.at_s) * limit / period_s), now_s)


def spent(purse: Purse, limit: int, count: int) -> Purse | None:
    """Return what is left after ``count``; ``None`` if there is too little. ``purse`` is as of now."""
    return purse._replace(left=purse.left - count) if purse.left >= min(count, limit) else None


def wait_s(purse: Purse, limit: int, count: int, period_s: float = 1.0) -> float:
    """Return after how long ``count`` could be spent. ``purse`` is as of now."""
    return max(0.0, (min(count, limit) - purse.left) * period_s / limit)
