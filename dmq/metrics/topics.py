"""Metrics by topic: accepted, delivered and dead messages, and lateness.

The first topics of a run with such messages have series of their own, and all later ones share one. So no counter falls
during a run, and the number of series is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dmq.metrics.counting import OTHERS, Spread

LATENESS_TOPICS_MAX: Final = 100  # with a histogram of their own: it has 12 series
_LATENESS_BOUNDS_S: Final = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 60.0, 600.0)
_LABELS: Final = ("messaging_destination_name",)  # as of groups
_FAMILIES: Final = {
    "accepted": "Messages answered OK, durable, by topic.",
    "delivered": "Hand-outs to consumers, by topic.",
    "dead": "Messages that came to a dead-letter queue, by the topic of their consumers.",
}


class TopicFigures(Collector):
    """Counters by topic, which other parts keep, and the lateness of delayed messages and retries by topic."""

    def __init__(self, lateness_topics_max: int = LATENESS_TOPICS_MAX) -> None:
        self._reads: Mapping[str, Callable[[], Mapping[str, int]]] = {}
        self._lateness: dict[str, Spread] = {}
        self._lateness_topics_max = lateness_topics_max
        self._lock = threading.Lock()

    def follow(self, **reads: Callable[[], Mapping[str, int]]) -> None:
        """Export these counts by topic: ``accepted``, ``delivered``, ``dead``. They are read from any thread."""
        self._reads = reads

    def became_visible(self, lateness_ms: Sequence[int], topics: Sequence[str]) -> None:
        """Record the lateness of a batch of messages and their topics, in the same order."""
        pairs = sorted(zip(topics, lateness_ms, strict=True), key=itemgetter(0))
        for topic, found in groupby(pairs, key=itemgetter(0)):
            self._spread(topic).observe_batch([late_ms for _, late_ms in found], 0.001)

    def _spread(self, topic: str) -> Spread:
        with self._lock:
            known = self._lateness
            if topic not in known and len(known) >= self._lateness_topics_max:
                topic = OTHERS
            return known.setdefault(topic, Spread(_LATENESS_BOUNDS_S))

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for a registry."""
        for name, text in _FAMILIES.items():
            counters = CounterMetricFamily(f"dmq_topic_messages_{name}", text, labels=_LABELS)
            for topic, count in sorted(self._reads[name]().items() if name in self._reads else ()):
                counters.add_metric((topic,), count)
            yield counters
        text = "From the delivery timestamp until visible, by topic; of retries by retry topic."
        seconds = HistogramMetricFamily("dmq_topic_lateness_seconds", text, labels=_LABELS)
        with self._lock:
            spreads = sorted(self._lateness.items())
        for topic, spread in spreads:
            seconds.add_metric((topic,), *spread.buckets())
        yield seconds
