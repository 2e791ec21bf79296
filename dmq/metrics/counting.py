"""Cheap counters for events that are too frequent for a library's metrics, used in every process that serves calls.

A whole batch of messages or calls is counted under one lock: 0.1 us per value, while a library histogram needs 1-2 us.
``dmq.metrics.registry`` exports them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

CALL_BOUNDS_S: Final = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
TOPICS_MAX: Final = 1_000  # with a count of their own
OTHERS: Final = "(others)"  # no valid name of a topic
_CALLS_AT_ONCE: Final = 128  # counted in batches: one by one costs three times as much


class Spread:
    """Distribution of values over fixed upper bounds, safe in any thread. Unlike Prometheus' own it also answers
    quantiles.

    ``bounds`` ascend and are the inclusive upper ends of the buckets. One more bucket holds values above the last
    bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._max = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Add one value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value
            self._max = max(self._max, value)

    def observe_batch(self, values: Sequence[float], scale: float = 1.0) -> None:
        """Add many values at once, each times ``scale`` (0.001 for milliseconds into seconds)."""
        if not values:
            return
        bounds, find = self._bounds, bisect_left
        with self._lock:
            counts = self._counts
            for value in values:
                counts[find(bounds, value * scale)] += 1
            self._sum += sum(values) * scale
            self._max = max(self._max, max(values) * scale)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    @property
    def max(self) -> float:
        """Exact greatest value so far; 0 before the first."""
        return self._max

    def take(self) -> tuple[list[int], float, float]:
        """Return the counts of all buckets, the sum and the greatest value so far, and reset them."""
        with self._lock:
            taken = self._counts, self._sum, self._max
            self._counts, self._sum, self._max = [0] * (len(self._bounds) + 1), 0.0, 0.0
        return taken

    def add(self, counts: Sequence[int], total: float, most: float) -> None:
        """Add the result of ``take`` of another instance with the same bounds."""
        with self._lock:
            self._counts = [ours + theirs for ours, theirs in zip(self._counts, counts, strict=True)]
            self._sum += total
            self._max = max(self._max, most)

    def quantile(self, q: float) -> float:
        """Estimate the value of the quantile ``q``; 0 before the first value.

        It is interpolated linearly within a bucket, so its error is below the bucket's width. It never exceeds the
        maximum.
        """
        assert 0 <= q <= 1
        with self._lock:
            counts, most = self._counts[:], self._max
        rank = q * sum(counts)
        seen = 0
        for index, count in enumerate(counts):
            if count and seen + count >= rank:
                low = self._bounds[index - 1] if index else 0.0
                high = min(self._bounds[index], most) if index < len(self._bounds) else most
                return min(low + (high - low) * (rank - seen) / count, most)
            seen += count
        return 0.0

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative count of each upper bound, in Prometheus notation, and the sum of all values."""
        with self._lock:
            counts, total = self._counts[:], self._sum
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return buckets, total


class CallsTaken(NamedTuple):
    """Counts of one RPC: calls by code, and their durations in the form of ``Spread.take``."""

    rpc: str
    codes: dict[int, int]
    buckets: list[int]
    sum_s: float
    max_s: float


class CallCounts:
    """Calls by RPC and answer code, and their durations; an observer of a dispatcher."""

    def __init__(self) -> None:
        self._finished: deque[tuple[str, int, float]] = deque()  # finished and not counted yet
        self._counts: dict[tuple[str, int], int] = {}
        self._seconds: dict[str, Spread] = {}
        self._lock = threading.Lock()

    def call_done(self, rpc: str, code: int, seconds: float) -> None:
        """Count one finished call. ``rpc`` must be one of the service's method names, never a caller's text."""
        finished = self._finished
        finished.append((rpc, code, seconds))
        if len(finished) >= _CALLS_AT_ONCE:
            self._count()

    def take(self) -> list[CallsTaken]:
        """Return the counts for ``add`` of another instance, and reset them."""
        self._count()
        with self._lock:
            counts, self._counts = self._counts, {}
            seconds, self._seconds = self._seconds, {}
        return [
            CallsTaken(rpc, {code: count for (of, code), count in counts.items() if of == rpc}, *spread.take())
            for rpc, spread in seconds.items()
        ]

    def add(self, taken: CallsTaken) -> None:
        """Add the counts of another instance."""
        with self._lock:
            for code, count in taken.codes.items():
                self._counts[taken.rpc, code] = self._counts.get((taken.rpc, code), 0) + count
            self._spread(taken.rpc).add(taken.buckets, taken.sum_s, taken.max_s)

    def _spread(self, rpc: str) -> Spread:
        spread = self._seconds.get(rpc)
        if spread is None:
            spread = self._seconds[rpc] = Spread(CALL_BOUNDS_S)
        return spread

    def _count(self) -> None:
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        with self._lock:
            with suppress(IndexError):  # empty
                while True:
                    rpc, code, took_s = self._finished.popleft()
                    key = (rpc, code)
                    self._counts[key] = self._counts.get(key, 0) + 1
                    seconds[rpc].append(took_s)
            for rpc, values in seconds.items():
                self._spread(rpc).observe_batch(values)

    def counted(self) -> tuple[list[tuple[tuple[str, int], int]], list[tuple[str, Spread]]]:
        """Return the number of calls by RPC and code, and their durations by RPC, sorted."""
        self._count()
        with self._lock:
            return sorted(self._counts.items()), sorted(self._seconds.items())


class TopicCounts:
    """Counts of messages by topic. One thread adds; any thread may read.

    The first topics of a run have counts of their own, and all later ones one in common. So no count ever falls, as it
    would if the busiest topics had them.
    """

    def __init__(self, topics_max: int = TOPICS_MAX) -> None:
        self._counts: dict[str, int] = {}
        self._topics_max = topics_max

    def add(self, topic: str, count: int = 1) -> None:
        """Add messages of a topic."""
        counts = self._counts
        if topic not in counts and len(counts) >= self._topics_max:
            topic = OTHERS
        counts[topic] = counts.get(topic, 0) + count

    def read(self) -> dict[str, int]:
        """Return the count of each topic."""
        return self._counts.copy()

    @property
    def total(self) -> int:
        """Sum of all topics."""
        return sum(self._counts.copy().values())
