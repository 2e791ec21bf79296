"""Token buckets with the capacity of one period. Pure; time is monotonic.

A request larger than the capacity is served once the bucket is full. The bucket then has a debt, which the next request
waits for.
"""

from __future__ import annotations

from typing import NamedTuple


class TokenBucket(NamedTuple):
    """Tokens at ``at_s``; negative: debt."""

    left: float
    at_s: float


def refilled(bucket: TokenBucket | None, limit: int, now_s: float, period_s: float = 1.0) -> TokenBucket:
    """Return the bucket refilled up to ``now_s``, with ``limit`` tokens a period; ``None`` is a bucket never used."""
    if bucket is None:
        return TokenBucket(float(limit), now_s)
    return TokenBucket(min(float(limit), bucket.left + (now_s - bucket.at_s) * limit / period_s), now_s)


def spent(bucket: TokenBucket, limit: int, count: int) -> TokenBucket | None:
    """Return the bucket after ``count`` tokens, or None if it has too few. ``bucket`` must be refilled."""
    return bucket._replace(left=bucket.left - count) if bucket.left >= min(count, limit) else None


def wait_s(bucket: TokenBucket, limit: int, count: int, period_s: float = 1.0) -> float:
    """Return the seconds until ``count`` tokens can be spent. ``bucket`` must be refilled."""
    return max(0.0, (min(count, limit) - bucket.left) * period_s / limit)
