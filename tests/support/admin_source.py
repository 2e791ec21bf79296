"""An admin source with fixed answers, for the service, the transport and the command line alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from broker_adapter.message import Message
from broker_adapter.wire.mapping import encode
from dmq.admin import source

NOW = 1_700_000_000_000
MESSAGE_ID = "01" + "AB" * 16

MESSAGE = Message(
    topic="orders",
    message_id=MESSAGE_ID,
    body=b"caf\xc3\xa9 \x1b[31mred",
    tag="new",
    keys=("k1", "k2"),
    properties={"b": "2", "a": "1"},
    message_group="g",
    deliver_at_ms=NOW + 60_000,
    born_at_ms=NOW - 1,
    born_host="here",
)

STATUS = source.CellStatus(
    version="1.2.3",
    cell_id="cell-1",
    broker_name="rock-dmq",
    pid=77,
    state=source.CellState.SERVING,
    started_at_ms=NOW - 3_725_000,
    now_ms=NOW,
    listen="127.0.0.1:8081",
    metrics_listen="127.0.0.1:9464",
    data="somewhere/data",
    durability="disk",
    timeline=source.Timeline(pending=1_000_000, overdue=2, next_due_at_ms=NOW + 5000),
    lateness=source.Lateness(count=9, p50_ms=0.8, p99_ms=3.25, max_ms=1200.0),
    totals=source.Totals(accepted=10, delivered=9, acked=8, expired=1),
    commits=source.Commits(batches=5, ops=50, written_bytes=4096, commit_p99_ms=2.5, sync_p50_ms=0.9, sync_p99_ms=2.25),
    disk=source.Disk(free_bytes=2**30, low_water_bytes=2**25),
    outbox=source.Outbox(rows=12, held_bytes=2048, held_bytes_max=2**30),
    recovery=source.Recovery(was_clean=False, cut_bytes=17, open_ms=42.0),
)

TOPICS = (
    source.TopicStatus(
        name="orders", queues=8, stored=9, pending=1_000_000, due=(source.DueBucket(until_ms=NOW, count=2),)
    ),
    source.TopicStatus(name="%DLQ%group", queues=1, stored=1),
)


@dataclass
class FixedSource:
    """Knows one waiting message; ``failure`` is raised instead of every answer."""

    cell: source.CellStatus = STATUS
    failure: Exception | None = None
    found: dict[tuple[str, str], source.MessageStatus] = field(
        default_factory=lambda: {
            ("orders", MESSAGE_ID): source.MessageStatus(
                state=source.MessageState.WAITING,
                deliver_at_ms=NOW + 60_000,
                stored_at_ms=NOW,
                payload=encode(MESSAGE).payload,
            )
        }
    )

    async def status(self) -> source.CellStatus:
        """As ``AdminSource.status``."""
        self._fail()
        return self.cell

    async def topics(self) -> Sequence[source.TopicStatus]:
        """As ``AdminSource.topics``."""
        self._fail()
        return TOPICS

    async def message(self, topic: str, message_id: str) -> source.MessageStatus:
        """As ``AdminSource.message``."""
        self._fail()
        return self.found.get((topic, message_id), source.MessageStatus(state=source.MessageState.UNKNOWN))

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure
