"""Token buckets: what a period brings gathers, at most for one period. Pure; time is monotonic.

A single call is served as soon as a whole period's worth is there, however much it takes: the rest is owed, and the
next call waits for it.
"""

from __future__ import annotations

from typing import NamedTuple


class TokenBucket(NamedTuple):
    """How much there is to spend at ``at_s``; below zero: owed."""

    left: float
    at_s: float


def refilled(bucket: TokenBucket | None, limit: int, now_s: float, period_s: float = 1.0) -> TokenBucket:
    """Return what is there now, of ``limit`` in a period; ``None`` is who spent nothing yet."""
    if bucket is None:
        return TokenBucket(float(limit), now_s)
    return TokenBucket(min(float(limit), bucket.left + (now_s - bucket.at_s) * limit / period_s), now_s)


def spent(bucket: TokenBucket, limit: int, count: int) -> TokenBucket | None:
    """Return what is left after ``count``; ``None`` if there is too little. ``bucket`` is as of now."""
    return bucket._replace(left=bucket.left - count) if bucket.left >= min(count, limit) else None


def wait_s(bucket: TokenBucket, limit: int, count: int, period_s: float = 1.0) -> float:
    """Return after how long ``count`` could be spent. ``bucket`` is as of now."""
    return max(0.0, (min(count, limit) - bucket.left) * period_s / limit)
