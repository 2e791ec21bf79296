"""RPC ``FindMessages``: pages of the messages with a value of an indexed user property.

A page follows the rows of the value: pending messages by scope and sequence, then those in queues by offset. A pending
message that is delivered between two pages moves forward in this order and is not missed. A retry that fails again
between two pages may be missed. The token is the start of the next page.
"""

from __future__ import annotations

from typing import NamedTuple

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule, topic_unknown
from broker_adapter.contracts.limits import PROPERTIES_BYTES_MAX
from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import mapping, validate
from dmq.broker import EmbeddedBroker
from dmq.broker.groups import GroupQueue, progress
from dmq.broker.io import Place
from dmq.broker.topics import Names, Topic
from dmq.errors import StoreCorrupt
from dmq.store import Store
from dmq.store.schema.keys import Family, half_body_key, half_scope, is_held_key, pack_index_prefix, pack_queue_key
from dmq.store.schema.messages.index import decode_index, ids_of
from dmq.store.schema.messages.properties import PendingPlace, QueuePlace, decode_property, user_properties, value_range
from dmq.store.schema.messages.record import (
    EntryKind,
    QueuedMessage,
    decode_half_body,
    decode_queued,
    decode_waiting,
    encode_queued,
)
from dmq.store.schema.topics.group import decode_outcome, outcome_key

ROWS_PER_CALL_MAX = 2_000
_ROWS_PER_STEP, _BYTES_PER_STEP = 64, 1024 * 1024
_TRIES_MAX = 16  # an entry that moves between two reads is searched again
_TOKEN_CHARS_MAX = 64


class FoundRow(NamedTuple):
    """Message at one place. ``at_ms`` is the due time of a pending one, else the time since when it is there."""

    state: wire.MessageState
    message: QueuedMessage
    at_ms: int
    group: str = ""
    queue_id: int = -1
    queue_offset: int = -1
    is_held: bool = False
    is_half: bool = False
    outcome: str = ""


class _Step(NamedTuple):
    """Result of one read, and the start of the next one; None at the end."""

    found: list[FoundRow]
    looked: int
    at: bytes | None


class IndexDamaged(StoreCorrupt):
    """A row of a property cannot be read, or makes no sense."""


class PropertyCalls:
    """RPC of the search by user property. Raise ``Refused`` for invalid input."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    async def find_messages(self, request: wire.FindMessagesRequest) -> wire.FindMessagesResponse:
        """Return a page of the messages with a value of an indexed property."""
        limit, token = validate.check_limit(request.limit), validate.check_token(request.token, _TOKEN_CHARS_MAX)
        topic = self._broker.names.topics.get(check_topic(request.topic))
        if topic is None:
            raise topic_unknown(request.topic)
        found, following = await rows_of(self._broker, topic, request.property, request.value, token, limit)
        return wire.FindMessagesResponse(
            messages=[_shown(each) for each in found],
            next_token=following,
            is_building=not self._broker.index_builds.is_complete(topic, request.property),
        )


async def rows_of(
    broker: EmbeddedBroker, topic: Topic, name: str, value: str, token: str, limit: int
) -> tuple[list[FoundRow], str]:
    """Return a page of the messages with a value of an indexed property, and the token of the next page."""
    topic.check_indexed(name)
    if len(value.encode()) > PROPERTIES_BYTES_MAX:
        raise Refused(Rule.REQUEST, "the value is too long", limit=f"{PROPERTIES_BYTES_MAX} bytes")
    first, stop = value_range(topic.topic_id, name, value)
    at: bytes | None = first + _place_of(token)
    found: list[FoundRow] = []
    looked = 0
    page = _Page(topic, broker.names, (name, value), stop)
    while at is not None and looked < ROWS_PER_CALL_MAX and len(found) < limit:
        start, left = at, min(_ROWS_PER_STEP, limit - len(found))
        try:
            step = await broker.reader.run(lambda store: page.look(store, start, left))  # noqa: B023 - called here
        except BrokerUnavailable as error:
            if isinstance(error.__cause__, IndexDamaged):
                await broker.index_builds.damaged(error.__cause__)
            raise
        found += step.found
        looked += max(step.looked, 1)
        at = step.at
    return found, at[len(first) :].hex() if at is not None else ""


def _shown(found: FoundRow) -> wire.FoundMessage:
    content = mapping.content_if_readable(found.message.payload, with_body=False)
    message_id = unpack_id(found.message.message_id)
    return mapping.filled(wire.FoundMessage, found, message_id=message_id, content=content)


class _Page:
    """One page of one value."""

    def __init__(self, topic: Topic, names: Names, wanted: tuple[str, str], stop: bytes) -> None:
        self._topic = topic
        self._wanted = wanted
        self._names = names
        self._stop = stop
        self._groups = {lane.topic_id: of[0] for of, lane in names.lanes.items() if of[1] == topic.topic_id}
        self._progress: dict[int, GroupQueue | None] = {}  # of groups on their retry lanes, by lane

    def look(self, store: Store, at: bytes, limit: int) -> _Step:
        """Read up to ``limit`` rows from ``at`` on."""
        try:
            rows = store.scan(Family.PROPERTY, at, self._stop, limit=limit)
            places = [decode_property(key, value).place for key, value in rows.rows]
        except StoreCorrupt as error:
            raise IndexDamaged(str(error)) from error
        name, wanted = self._wanted
        found: list[FoundRow] = []
        size = 0
        for looked, ((key, value), place) in enumerate(zip(rows.rows, places, strict=True), 1):
            stored = _waiting(store, place, value) if isinstance(place, PendingPlace) else _queued(store, place)
            if stored is None:  # it moved or was removed in the meantime; a moved one has a later row
                continue
            size += len(stored.value)
            row = (
                self._pending(stored, place.scope)
                if isinstance(place, PendingPlace)
                else self._in_queue(store, stored.value, place)
            )
            if row is not None and user_properties(row.message.payload).get(name) == wanted:
                found.append(row)
            if size >= _BYTES_PER_STEP and looked < len(rows.rows):
                return _Step(found, looked, key + b"\0")
        return _Step(found, len(rows.rows), None if rows.is_complete else rows.rows[-1][0] + b"\0")

    def _pending(self, stored: _Stored, scope: int) -> FoundRow:
        entry = decode_waiting(stored.value)
        body = stored.half_body or stored.value[ids_of(entry, stored.value)[2] :]
        is_retry = entry.kind == EntryKind.RETRY
        return FoundRow(
            wire.RETRYING if is_retry else wire.WAITING,
            decode_queued(encode_queued(0, entry.accepted_at_ms, entry.deliver_at_ms, body)),
            entry.deliver_at_ms,
            group=self._names.groups_by_id[scope].name if is_retry else "",
            is_held=is_held_key(stored.key),
            is_half=scope == half_scope(self._topic.topic_id),
        )

    def _in_queue(self, store: Store, value: bytes, place: QueuePlace) -> FoundRow | None:
        message = decode_queued(value)
        found = FoundRow(wire.QUEUED, message, message.stored_at_ms)
        if place.topic_id == self._topic.topic_id:
            return found._replace(queue_id=place.queue_id, queue_offset=place.queue_offset)
        if (group_id := self._groups.get(place.topic_id)) is not None:
            if self._is_finished(store, group_id, place):
                return None
            return found._replace(state=wire.READY, group=self._names.groups_by_id[group_id].name)
        letters = self._names.topics_by_id.get(place.topic_id)
        if letters is None or not letters.name.startswith(DEAD_LETTER_PREFIX):
            return None  # of a lane that was removed in the meantime
        (outcome,) = store.get_many(Family.GROUP, [outcome_key(place.topic_id, place.queue_offset)])
        return found._replace(
            state=wire.DEAD,
            group=letters.name.removeprefix(DEAD_LETTER_PREFIX),
            queue_id=place.queue_id,
            queue_offset=place.queue_offset,
            outcome=decode_outcome(outcome).what if outcome is not None else "",
        )

    def _is_finished(self, store: Store, group_id: int, place: QueuePlace) -> bool:
        """Return True if a group has finished a retry in its lane. The progress is read once for a page."""
        if place.topic_id not in self._progress:
            self._progress[place.topic_id] = progress(store, group_id, Place(place.topic_id, place.queue_id))
        known = self._progress[place.topic_id]
        return known is not None and known.is_finished(place.queue_offset)


class _Stored(NamedTuple):
    """Row of a message. ``half_body`` is the separate body of a half message."""

    key: bytes
    value: bytes
    half_body: bytes = b""


def _waiting(store: Store, place: PendingPlace, index_id: bytes) -> _Stored | None:
    for _ in range(_TRIES_MAX):
        (row,) = store.get_many(Family.INDEX, [pack_index_prefix(0, place.scope) + index_id])
        receipt = decode_index(row) if row is not None else None
        if receipt is None or receipt.sequence != place.sequence:
            return None
        value, half_body = store.get_many(Family.TIMELINE, [receipt.key, half_body_key(place.sequence)])
        if value is not None:
            return _Stored(receipt.key, value, decode_half_body(half_body) if half_body else b"")
    raise StoreCorrupt("a pending message is in the index, but not on the timeline")


def _queued(store: Store, place: QueuePlace) -> _Stored | None:
    key = pack_queue_key(*place)
    (value,) = store.get_many(Family.QUEUE, [key])
    return _Stored(key, value) if value is not None else None


def _place_of(token: str) -> bytes:
    try:
        return bytes.fromhex(token)
    except ValueError:
        raise Refused(Rule.REQUEST, "the page token is damaged", value=token) from None
