"""What the demo knows of the cluster behind the daemon, if there is one; whoever starts the demo started that too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker_adapter.contracts.message import unpack_id
from dmq.trail.events import EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A running cluster. Its topic takes normal messages; ``kill`` and ``start`` do that to a broker of it."""

    endpoints: tuple[str, ...]
    topic: str
    group: str
    kill: Callable[[], None]
    start: Callable[[], None]  # returns once it serves again


def in_doubt(trail: Path) -> Mapping[str, int]:
    """Return how often each message was sent to the cluster with no answer known, by the trail of a stopped daemon."""
    import pyarrow.parquet as pq

    found: Counter[str] = Counter()
    for file in (trail / "events").rglob("*.parquet"):
        events = pq.read_table(file, columns=["kind", "message_id"], partitioning=None).to_pylist()
        doubtful = EventKind.FORWARD_IN_DOUBT.name
        found.update(unpack_id(each["message_id"]) for each in events if each["kind"] == doubtful)
    return found
