"""RPC of ``rockdmq.admin.v1.AdminService`` about due times: pending entries by minute and hour."""

from __future__ import annotations

import asyncio
from typing import Final

from broker_adapter.contracts.errors import BrokerUnavailable, topic_unknown
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.broker import EmbeddedBroker
from dmq.errors import StoreError
from dmq.store import Store
from dmq.store.schema.accounting.counts import BUCKET_MS, DueCount

SCOPES_MAX: Final = 1_000  # bounds the rows of one call: up to 25 for each topic or group with pending entries
_MINUTES: Final = 60
_HOURS: Final = 24
_COUNTS_MAX: Final = 20_000  # of one topic or group: two weeks of overdue minutes


class DueCalls:
    """RPC of due times. Raise ``Refused`` for an unknown topic, ``BrokerUnavailable`` for damage."""

    def __init__(self, store: Store, broker: EmbeddedBroker) -> None:
        self._store = store
        self._broker = broker

    async def get_due_histogram(self, request: wire.GetDueHistogramRequest) -> wire.GetDueHistogramResponse:
        """Return the pending entries of a topic, or of all topics and groups, by due time."""
        pending = {scope: count for scope, count in self._store.pending().items() if count > 0}
        if request.topic:
            known = self._broker.names.topics.get(check_topic(request.topic))
            if known is None:
                raise topic_unknown(request.topic)
            pending = {known.topic_id: pending.get(known.topic_id, 0)}
        try:
            return await asyncio.to_thread(self._histogram, pending)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error

    def _histogram(self, pending: dict[int, int]) -> wire.GetDueHistogramResponse:
        store = self._store
        now_ms = store.clock.now_ms()
        until_ms = now_ms // BUCKET_MS * BUCKET_MS + _HOURS * _MINUTES * BUCKET_MS
        scopes = sorted(pending, key=lambda scope: -pending[scope])[:SCOPES_MAX]
        counts = [each for scope in scopes for each in store.due_counts(scope, 0, until_ms, limit=_COUNTS_MAX)]
        counted = sum(pending[scope] for scope in scopes)
        return histogram(counts, now_ms, counted, uncounted=sum(pending.values()) - counted)


def histogram(counts: list[DueCount], now_ms: int, pending: int, *, uncounted: int = 0) -> wire.GetDueHistogramResponse:
    """Return the histogram of ``counts``, which cover the next 24 hours of ``pending`` entries."""
    start_ms = now_ms // BUCKET_MS * BUCKET_MS
    minutes, hours, overdue = [0] * _MINUTES, [0] * _HOURS, 0
    for each in counts:
        minute = (each.until_ms - start_ms) // BUCKET_MS - 1
        if minute < 0:
            overdue += each.count
        elif minute < _HOURS * _MINUTES:
            hours[minute // _MINUTES] += each.count
            if minute < _MINUTES:
                minutes[minute] += each.count
    return wire.GetDueHistogramResponse(
        now_ms=now_ms,
        overdue=overdue,
        minutes=_buckets(minutes, start_ms, BUCKET_MS),
        hours=_buckets(hours, start_ms, _MINUTES * BUCKET_MS),
        later=max(0, pending - overdue - sum(hours)),
        uncounted=uncounted,
    )


def _buckets(counts: list[int], start_ms: int, width_ms: int) -> list[wire.DueBucket]:
    return [
        wire.DueBucket(until_ms=start_ms + place * width_ms, count=count) for place, count in enumerate(counts, start=1)
    ]
