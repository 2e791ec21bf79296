"""Builds of property indexes: the rows of messages that were stored before the property was indexed.

The writer keeps an index up to date from its first message on. A build adds the rows of all earlier messages, in small
units, and then the built row of the property. Without that row a build starts again, after a kill and after damage:
the next opening of the store removes all rows of a damaged index.

A pass follows the index of pending messages, which a change of the delivery time does not reorder, then the queues. A
message that moves forward meanwhile gets its row from the move.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import structlog

from broker_adapter.contracts.errors import BrokerError, Overloaded
from dmq.broker.topics import BrokerPart, SharedParts, Topic
from dmq.errors import StoreError
from dmq.store import Store
from dmq.store.schema import keys
from dmq.store.schema.keys import Family, half_scope, pack_queue_key, waiting_range
from dmq.store.schema.messages.index import Receipt, decode_index
from dmq.store.schema.messages.properties import (
    BUILT,
    DAMAGED,
    properties_of_queued,
    properties_of_waiting,
    property_id,
    topic_of_queued,
    topic_of_waiting,
)
from dmq.store.writer.operations import IndexBuilt, IndexMessages, Put

ROWS_PER_UNIT_MAX, _BYTES_PER_UNIT = 64, 1024 * 1024
_PAUSE_S = 1.0  # while the store accepts no writes, or the disk is almost full
_BUILT_MAX = 1_000_000

log = structlog.get_logger("dmq.broker")


class _Changed(Exception):
    """The indexed properties of a topic changed during a build."""


class _Page(NamedTuple):
    """Keys of messages with a property, and the start of the next page; None at the end."""

    keys: list[bytes]
    at: bytes | None


class IndexBuilds(BrokerPart):
    """Builds of all indexes that are not complete, one topic after the other. It belongs to the event loop."""

    def __init__(self, shared: SharedParts) -> None:
        super().__init__(shared)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unbuilt: set[bytes] = set()  # ``property_id`` of each known incomplete index
        self._is_known = False  # whether ``_unbuilt`` was read
        self._obstacle = ""
        self._damage = ""
        self.messages = 0  # with new rows, since the daemon started

    def start(self) -> None:
        """Start the task that builds."""
        self._changed.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-index-builds")

    async def close(self) -> None:
        """Stop the task; the next start of the daemon continues."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def change(self, before: Topic, after: Topic) -> None:
        """Begin again: the indexed properties of a topic have changed. Call it when the change is submitted."""
        self._unbuilt.difference_update(property_id(before.topic_id, name) for name in before.index_properties)
        new = set(after.index_properties) - set(before.index_properties)
        self._unbuilt.update(property_id(after.topic_id, name) for name in new)
        self._is_known = False
        self._changed.set()

    def is_complete(self, topic: Topic, name: str) -> bool:
        """Return True if an index has all messages of its topic."""
        return self._is_known and property_id(topic.topic_id, name) not in self._unbuilt

    def problem(self) -> str:
        """Return why an index is damaged, or cannot be built now; empty if none is."""
        return self._damage or self._obstacle

    async def damaged(self, error: StoreError) -> None:
        """Note that a search met a damaged row: the next opening of the store removes all rows, which are built again.

        They are not removed now, since RocksDB would read the damaged block once more, and could end all writes.
        """
        if not self._damage:
            self._damage = (
                f"the index of user properties is damaged: restart the daemon, which builds it again: {error}"
            )
            log.error("property_index_damaged", error=str(error))
            await self._commits.commit([Put(Family.PROPERTY, DAMAGED, b"")])

    # -- builds -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            try:
                await self.build()
            except Exception as error:  # any error: a task that ended silently would look like a running one
                is_bug = not isinstance(error, BrokerError | StoreError)
                self._obstacle = f"the index of user properties cannot be built now: {error}"
                log.error("index_build_failed", error=str(error), exc_info=is_bug)  # noqa: TRY400
                if self._store.failure is not None:
                    return
                await asyncio.sleep(_PAUSE_S)
                self._changed.set()

    async def build(self) -> None:
        """Build all indexes that are not complete; durable on return."""
        while True:
            self._changed.clear()
            await self._commits.flush()  # a change of the indexed properties, or the removal of damaged rows
            built = await self._reader.run(_built)
            if self._changed.is_set():
                continue
            indexed = {
                property_id(topic.topic_id, name): (topic, name)
                for topic in self._names.topics.values()
                for name in topic.index_properties
            }
            self._unbuilt = indexed.keys() - built
            self._is_known = True
            if not self._unbuilt:
                self._obstacle = ""
                return
            topic = indexed[min(self._unbuilt)][0]
            names = [name for of, (found, name) in indexed.items() if found is topic and of in self._unbuilt]
            with suppress(_Changed):
                await self._build(topic, names)

    async def _build(self, topic: Topic, names: Sequence[str]) -> None:
        log.info("index_build_started", topic=topic.name, properties=names)
        before = self.messages
        async for unit in self._units(topic, names):
            await self._submit(unit)
            self.messages += len(unit.keys)
        await self._submit(IndexBuilt(topic.topic_id, names))
        log.info("index_built", topic=topic.name, properties=names, messages=self.messages - before)

    async def _submit(self, op: IndexMessages | IndexBuilt) -> None:
        """Commit one unit once the store accepts it. Raise ``_Changed`` if the build must begin again."""
        while not (done := self._submitted(op)):  # noqa: ASYNC110 - free space has no event
            await asyncio.sleep(_PAUSE_S)
        await self._commits.committed(done)

    def _submitted(self, op: IndexMessages | IndexBuilt) -> asyncio.Future[list[Receipt]] | None:
        if self._changed.is_set():
            raise _Changed
        obstacle = "the disk is almost full" if self._store.is_disk_low() else ""
        try:
            done = self._commits.submit([op], is_urgent=False) if not obstacle else None
        except Overloaded as error:
            done, obstacle = None, str(error)
        self._obstacle = f"the index of user properties cannot be built now: {obstacle}" if obstacle else ""
        return done

    async def _units(self, topic: Topic, names: Sequence[str]) -> AsyncIterator[IndexMessages]:
        """Yield the messages of a topic that have one of the properties: pending ones, then those in queues."""
        known, wanted = self._names, frozenset(names)
        lanes = [(key[0], lane) for key, lane in known.lanes.items() if key[1] == topic.topic_id]
        derived = [each for name, each in known.topics.items() if known.is_derived(name)]
        for scope in (topic.topic_id, half_scope(topic.topic_id), *(group_id for group_id, _ in lanes)):
            pending = _Pages(topic.topic_id, wanted, Family.INDEX, *waiting_range(scope))
            async for unit in self._pages(pending):
                yield unit
        for each in (topic, *(lane for _, lane in lanes), *derived):
            start, stop = pack_queue_key(each.topic_id, 0, 0), pack_queue_key(each.topic_id + 1, 0, 0)
            async for unit in self._pages(_Pages(topic.topic_id, wanted, Family.QUEUE, start, stop)):
                yield unit

    async def _pages(self, pages: _Pages) -> AsyncIterator[IndexMessages]:
        at: bytes | None = pages.start
        while at is not None:
            found, at = await self._reader.run(partial(pages.read, at=at))
            if found:
                yield IndexMessages(pages.family, found)


class _Pages(NamedTuple):
    """Range of messages to search for those of a topic with one of the properties."""

    topic_id: int
    names: frozenset[str]
    family: Family
    start: bytes
    stop: bytes

    def read(self, store: Store, at: bytes) -> _Page:
        """Return the next page."""
        rows = store.scan(self.family, at, self.stop, limit=ROWS_PER_UNIT_MAX, bytes_max=_BYTES_PER_UNIT)
        found: list[bytes] = []
        size = 0
        for key, value in rows.rows:
            if self.family is Family.QUEUE:
                is_own = topic_of_queued(keys.unpack_queue_key(key)[0], value) == self.topic_id
                is_wanted = is_own and self._has(properties_of_queued(value))
            else:
                is_wanted, read_bytes = self._is_pending(store, value)
                size += read_bytes
            found += [key] if is_wanted else []
            if size >= _BYTES_PER_UNIT:
                return _Page(found, key + b"\0")
        return _Page(found, None if rows.is_complete else rows.rows[-1][0] + b"\0")

    def _is_pending(self, store: Store, index_row: bytes) -> tuple[bool, int]:
        """Return whether a pending message is wanted, and its size. One that moves in between is taken as wanted."""
        receipt = decode_index(index_row)
        record, half_body = store.get_many(Family.TIMELINE, [receipt.key, keys.half_body_key(receipt.sequence)])
        if record is None:
            return True, 0
        is_wanted = topic_of_waiting(record) == self.topic_id and self._has(properties_of_waiting(record, half_body))
        return is_wanted, len(record) + len(half_body or b"")

    def _has(self, properties: Mapping[str, str]) -> bool:
        return not self.names.isdisjoint(properties)


def _built(store: Store) -> set[bytes]:
    """Return the ``property_id`` of each built index."""
    rows = store.scan(Family.PROPERTY, BUILT, bytes((BUILT[0] + 1,)), limit=_BUILT_MAX).rows
    return {key[1:] for key, _ in rows}
