"""Cluster that the daemon of a demo forwards to, if there is one; the caller of the demo starts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker_adapter.contracts.message import unpack_id
from dmq.trail.events import EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Running cluster. Its topic accepts normal messages; ``kill`` and ``start`` kill and start one of its brokers."""

    endpoints: tuple[str, ...]
    topic: str
    group: str
    kill: Callable[[], None]
    start: Callable[[], None]  # returns once it serves again


def in_doubt(trail: Path) -> Mapping[str, int]:
    """Return for each message the number of sends to the cluster without an answer, from the trail of a stopped
    daemon.
    """
    import pyarrow.parquet as pq

    found: Counter[str] = Counter()
    for file in (trail / "events").rglob("*.parquet"):
        events = pq.read_table(file, columns=["kind", "message_id"], partitioning=None).to_pylist()
        doubtful = EventKind.FORWARD_IN_DOUBT.name
        found.update(unpack_id(each["message_id"]) for each in events if each["kind"] == doubtful)
    return found
