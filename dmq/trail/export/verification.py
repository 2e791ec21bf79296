"""Read-back of an Apache RocketMQ cluster: the topics to which messages were forwarded according to a trail.

It reads by offset, which changes nothing in the cluster. The result is written next to an audit, for the Spark job to
compare:

    <folder>/messages.parquet   a row for each message: its position and its id
    <folder>/queues.parquet     a row for each queue: the range that was read; or for an unreadable topic
    <folder>/cells.parquet      the last sequence of each cell before the read: later events are not compared

docs/reference/trail.md defines the columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from broker_adapter.contracts.errors import BrokerError
from broker_adapter.contracts.message import pack_id
from broker_adapter.remoting import Queue, RemotingClient, RemotingOptions, StoredMessage, UnreadableMessage
from dmq.trail.cells import cells_of
from dmq.trail.export.reading import read_events

CLOCKS_MS: Final = 600_000  # maximum difference between the clocks of daemons and brokers
_AT_BORDER = ("FORWARDED", "FORWARD_IN_DOUBT")
_BEFORE = ("QUEUED", "DELIVERED", "QUEUED_FOR_GROUP")  # a message is sent to the cluster after these
_READERS = 8
_NO_TIME = "no time was left"
_ROWS_PER_GROUP = 50_000


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in types.items()])


_MESSAGES = _schema(
    topic=pa.string(), broker=pa.string(), queue_id=pa.int32(), queue_offset=pa.int64(), message_id=pa.binary()
)
_QUEUES = _schema(
    topic=pa.string(),
    broker=pa.string(),
    queue_id=pa.int32(),
    from_offset=pa.int64(),
    to_offset=pa.int64(),
    end_offset=pa.int64(),
    since_ms=pa.int64(),
    why=pa.string(),
)
_CELLS = _schema(cell=pa.string(), sequence=pa.int64())


@dataclass(slots=True)
class QueueRead:
    """Range of a queue that was read, from ``from_offset`` to ``to_offset``; the queue ended at ``end_offset``."""

    topic: str
    queue: Queue | None = None  # ``None``: the topic could not be read
    from_offset: int = 0
    to_offset: int = 0
    end_offset: int = 0
    since_ms: int | None = None  # messages stored since then are at or after from_offset; ``None``: unknown
    why: str = ""  # reason why it was not read to its end


class ClusterReadBack(NamedTuple):
    """Result of a read-back."""

    queues: list[QueueRead]
    messages: int

    @property
    def unread(self) -> list[QueueRead]:
        """Queues and topics that were not read to their end."""
        return [each for each in self.queues if each.why]


class _Border(NamedTuple):
    """Forwarding state of a trail: topics with the earliest time of a message in them, and last sequences of cells."""

    topics: Mapping[str, int]
    cells: Mapping[str, int]


def border_of(trail: Path) -> _Border:
    """Return the forwarding state of a trail; raise ``ValueError`` for an unreadable trail."""
    cells = {each.cell: each.last_sequence for each in cells_of(trail)}
    first_ms: dict[str, int] = {}
    named: set[str] = set()
    for _, columns in read_events(trail, (*_AT_BORDER, *_BEFORE), ("kind", "topic", "at_ms")):
        for kind, topic, at_ms in zip(columns["kind"], columns["topic"], columns["at_ms"], strict=True):
            first_ms[topic] = min(first_ms.get(topic, at_ms), at_ms)
            if kind in _AT_BORDER:
                named.add(topic)
    return _Border({topic: first_ms[topic] for topic in sorted(named)}, cells)


def read_back(
    trail: Path,
    options: RemotingOptions,
    into: Path,
    *,
    timeout_s: float,
    show: Callable[[int], None] = lambda _: None,
) -> ClusterReadBack:
    """Read the forwarded topics of a trail from the cluster, for at most ``timeout_s``, and write them to a folder.

    Queues that could not be read, or not in time, are recorded with the reason. ``show`` is called with the number of
    messages so far. Raise ``ValueError`` for an unreadable trail.
    """
    border = border_of(trail)
    into.mkdir(parents=True, exist_ok=True)
    with _Messages(into / "messages.parquet", show) as messages:
        reads = asyncio.run(_read(options, border.topics, messages, timeout_s))
    queues = [
        {
            "topic": each.topic,
            "broker": each.queue.broker if each.queue is not None else None,
            "queue_id": each.queue.queue_id if each.queue is not None else None,
            "from_offset": each.from_offset,
            "to_offset": each.to_offset,
            "end_offset": each.end_offset,
            "since_ms": each.since_ms,
            "why": each.why or None,
        }
        for each in reads
    ]
    pq.write_table(pa.Table.from_pylist(queues, _QUEUES), into / "queues.parquet")
    cells = [{"cell": cell, "sequence": sequence} for cell, sequence in border.cells.items()]
    pq.write_table(pa.Table.from_pylist(cells, _CELLS), into / "cells.parquet")
    return ClusterReadBack(reads, messages.count)


async def _read(
    options: RemotingOptions, topics: Mapping[str, int], messages: _Messages, timeout_s: float
) -> list[QueueRead]:
    reads: list[QueueRead] = []
    async with RemotingClient(options) as client:
        try:
            async with asyncio.timeout(timeout_s):
                await _read_topics(client, topics, messages, reads)
        except TimeoutError:
            noted = {each.topic for each in reads}
            reads += [QueueRead(topic, why=_NO_TIME) for topic in topics if topic not in noted]
    return reads


async def _read_topics(
    client: RemotingClient, topics: Mapping[str, int], messages: _Messages, reads: list[QueueRead]
) -> None:
    """Read the queues of all topics, some concurrently. ``reads`` has the current result of each queue at any time."""
    places = asyncio.Semaphore(_READERS)

    async def read(found: QueueRead, first_ms: int) -> None:
        async with places:
            try:
                await _read_queue(client, found, first_ms, messages)
            except BrokerError as error:
                found.why = str(error)

    async with asyncio.TaskGroup() as tasks:
        for topic, first_ms in topics.items():
            try:
                queues = await client.queues(topic)
            except BrokerError as error:
                reads.append(QueueRead(topic, why=str(error)))
                continue
            found = [QueueRead(topic, queue, why=_NO_TIME) for queue in queues]
            reads += found or [QueueRead(topic, why="it has no queue that can be read")]
            for each in found:
                tasks.create_task(read(each, first_ms))


async def _read_queue(client: RemotingClient, read: QueueRead, first_ms: int, messages: _Messages) -> None:
    assert read.queue is not None
    begin, read.end_offset = await client.queue_range(read.queue)
    since_ms = first_ms - CLOCKS_MS
    at = max(begin, await client.offset_at(read.queue, since_ms)) if read.end_offset > begin else begin
    read.from_offset = read.to_offset = at
    if at > begin or begin == 0:
        read.since_ms = since_ms if at > begin else 0
    while read.to_offset < read.end_offset:
        pulled = await client.pull(read.queue, read.to_offset)
        is_whole = pulled.next_offset == read.to_offset + len(pulled.messages)
        if not is_whole:  # retention removed messages meanwhile: their ids are unknown
            read.from_offset, read.since_ms = pulled.next_offset, None
        if pulled.messages and read.since_ms is None:  # other messages of the same millisecond may be removed
            read.since_ms = pulled.messages[0 if is_whole else -1].stored_at_ms + 1
        for each in pulled.messages:
            messages.add(read.topic, read.queue, each)
        read.to_offset = pulled.next_offset
    read.why = ""


class _Messages:
    """File of messages, written as they arrive. It gets its name when it is closed without an error."""

    def __init__(self, path: Path, show: Callable[[int], None]) -> None:
        self.count = 0
        self._path = path
        self._show = show
        self._rows: list[dict[str, object]] = []
        self._part = path.with_name(f".{path.name}.part")
        self._writer: pq.ParquetWriter

    def __enter__(self) -> Self:
        self._writer = pq.ParquetWriter(self._part, _MESSAGES, compression="zstd")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        self._writer.close()
        if kind is None:
            self._part.replace(self._path)

    def add(self, topic: str, queue: Queue, found: StoredMessage | UnreadableMessage) -> None:
        """Add a row with the position and the id of a message."""
        message_id = pack_id(found.message_id) if isinstance(found, StoredMessage) else None
        self._rows.append(
            {
                "topic": topic,
                "broker": queue.broker,
                "queue_id": queue.queue_id,
                "queue_offset": found.queue_offset,
                "message_id": message_id,
            }
        )
        self.count += 1
        if len(self._rows) >= _ROWS_PER_GROUP:
            self._flush()
        self._show(self.count)

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, _MESSAGES))
        self._rows = []
