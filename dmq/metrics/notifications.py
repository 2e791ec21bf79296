"""Metrics of notifications, by their kind: dead letters, or overdue messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class NotificationTotals(Protocol):
    """Counters of the notifications of one kind."""

    @property
    def sent(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def suppressed(self) -> int: ...


class NotificationCounts(Collector):
    """Notifications that were delivered, attempts that failed, and dead letters without a notification of their own."""

    def __init__(self) -> None:
        self._read: Callable[[], Mapping[str, NotificationTotals]] = dict

    def follow(self, read: Callable[[], Mapping[str, NotificationTotals]]) -> None:
        """Export these counts by kind; ``read`` is called from any thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the counts for a registry."""
        found = self._read()
        for name, text in _FAMILIES.items():
            family = CounterMetricFamily(f"dmq_notifications_{name}", text, labels=("kind",))
            for kind, totals in found.items():
                family.add_metric((kind,), getattr(totals, name))
            yield family


_FAMILIES = {
    "sent": "Notifications that their receiver confirmed.",
    "failed": "Failed attempts to deliver a notification.",
    "suppressed": "Dead letters that are only a part of a notification's count.",
}
