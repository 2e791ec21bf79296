"""The admin service about due times."""

from __future__ import annotations

import pytest
from support.rigs.commands.live_cell import LiveCell

from broker_adapter.contracts.errors import Refused
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages.due import histogram
from dmq.store.schema.accounting.counts import BUCKET_MS, DueCount

HOUR_MS = 60 * BUCKET_MS
NOW_MS = 1_000 * HOUR_MS + 1_234


def test_each_entry_is_in_one_term_of_the_histogram() -> None:
    """The edges: a minute that has ended, the current one, the last of the hour, the first and last of the day."""
    start_ms = NOW_MS // BUCKET_MS * BUCKET_MS
    ends = [start_ms - HOUR_MS, start_ms, start_ms + BUCKET_MS, start_ms + HOUR_MS, start_ms + HOUR_MS + BUCKET_MS]
    counts = [DueCount(end_ms, 10**place) for place, end_ms in enumerate([*ends, start_ms + 24 * HOUR_MS])]
    found = histogram(counts, NOW_MS, 7_111_111)
    assert found.overdue == 11
    assert [each.count for each in found.minutes] == [100, *[0] * 58, 1_000]
    assert [each.count for each in found.hours] == [1_100, 10_000, *[0] * 21, 100_000]
    assert found.later == 7_000_000
    assert (found.minutes[0].until_ms, found.hours[-1].until_ms) == (ends[2], start_ms + 24 * HOUR_MS)


def test_the_histogram_counts_messages_and_retries(live: LiveCell) -> None:
    """Of all topics and groups as many as are pending; of a topic its own messages."""
    everything, orders = (live.ask(wire.GetDueHistogramRequest(topic=topic)) for topic in ("", "orders"))
    pending = sum(live.rig.store.pending().values())
    assert everything.overdue + sum(each.count for each in everything.hours) + everything.later == pending > 1
    assert orders.overdue + sum(each.count for each in orders.hours) + orders.later == 1
    with pytest.raises(Refused, match="not found"):
        live.ask(wire.GetDueHistogramRequest(topic="nothing"))
