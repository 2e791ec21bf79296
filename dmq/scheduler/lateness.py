"""How late messages were: a histogram with fixed buckets that one thread fills and others read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# Milliseconds, upper bounds. The clock counts whole milliseconds, so 0 means "in the very millisecond".
BOUNDS_MS = (0, 1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1_000, 2_000, 5_000, 10_000, 30_000,
             60_000, 300_000, 900_000, 3_600_000, 21_600_000, 86_400_000)  # fmt: skip


class LatenessHistogram:
    """Counts of ``handed over - delivery timestamp``. Early ones, which must not exist, are counted apart."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.total = 0
        self.sum_ms = 0
        self.max_ms = 0
        self.early = 0

    def add(self, latenesses_ms: Iterable[int]) -> None:
        """Count one lateness each."""
        counts = self.counts
        for lateness_ms in latenesses_ms:
            counts[bisect_left(BOUNDS_MS, lateness_ms)] += 1
            self.total += 1
            self.sum_ms += lateness_ms
            if lateness_ms > self.max_ms:
                self.max_ms = lateness_ms
            elif lateness_ms < 0:
                self.early += 1

    def quantile_ms(self, share: float) -> int:
        """Return the upper bound of the bucket that holds the given share; the maximum for the last bucket."""
        wanted = share * self.total
        seen = 0
        for bound_ms, count in zip(BOUNDS_MS, self.counts, strict=False):
            seen += count
            if seen >= wanted and seen:
                return min(bound_ms, self.max_ms)
        return self.max_ms
