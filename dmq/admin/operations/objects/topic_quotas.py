"""Quotas of topics and their current use."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest

from dmq.admin import admin_v1 as wire
from dmq.broker import EmbeddedBroker
from dmq.broker.topics import Topic
from dmq.store import Store
from dmq.store.schema.keys import half_scope

_SHOWN_MAX = 10


def with_halves(figures: Mapping[int, int], topic: Topic) -> int:
    """Return the figure of a topic including its half messages."""
    return figures.get(topic.topic_id, 0) + figures.get(half_scope(topic.topic_id), 0)


def quotas_of(
    broker: EmbeddedBroker, topic: Topic, pending: Mapping[int, int], sizes: Mapping[int, int]
) -> list[wire.Quota]:
    """Return the quotas that limit a topic. ``pending`` and ``sizes`` are the counts and bytes of the store, by
    scope.
    """
    limits = broker.quotas.of(topic)
    if not any(limits):
        return []
    used = with_halves(pending, topic), with_halves(sizes, topic), broker.quotas.used_rate(topic)
    found = zip(limits._fields, used, limits, topic.quotas, strict=True)
    return [
        wire.Quota(kind="topic", name=topic.name, quota=quota, used=there, limit=limit, is_set=own is not None)
        for quota, there, limit, own in found
        if limit
    ]


def fullest(store: Store, broker: EmbeddedBroker, pending: Mapping[int, int]) -> list[wire.Quota]:
    """Return the quotas of topics with the highest use, fullest first. Safe in any thread."""
    names = broker.names
    topics = list((names.topics.copy() if any(broker.quotas.defaults) else names.limited.copy()).values())
    sizes = store.pending_bytes() if topics else {}
    rows = [row for topic in topics for row in quotas_of(broker, topic, pending, sizes)]
    return nlargest(_SHOWN_MAX, rows, key=lambda row: row.used / row.limit)


def refusals(broker: EmbeddedBroker) -> list[wire.QuotaRefusals]:
    """Return the number of messages refused by each quota of topics."""
    return [wire.QuotaRefusals(quota=quota, messages=count) for quota, count in broker.quotas.refused.items() if count]
