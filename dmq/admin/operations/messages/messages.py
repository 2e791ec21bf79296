"""RPCs of ``AdminService`` about messages: the state of one, and pages of those of a topic.

Forwards, the queues come first, by time of storage, then held messages and the timeline, by due time. Backwards, the
whole order is reversed. A page reads a bounded number of rows. It reads a few at a time in the broker's reading thread,
so that reads of consumers run in between. The token is the start of the next page: an offset in each queue, or a place
on the timeline. Forwards, a message that becomes held between two pages has been passed before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.errors import Refused, Rule, topic_unknown
from broker_adapter.contracts.message import pack_id, unpack_id
from broker_adapter.contracts.own_keys import check_own_key
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages.property_search import rows_of
from dmq.admin.requests import mapping, validate
from dmq.admin.requests.message_query import check_filter, resolve
from dmq.broker import EmbeddedBroker
from dmq.broker.failures import next_of
from dmq.broker.io import Place, messages_from
from dmq.broker.operations import GroupState, Where, is_due, is_meant
from dmq.broker.topics import Topic
from dmq.errors import StoreCorrupt
from dmq.states import MessageState
from dmq.store import Store
from dmq.store.schema.accounting.counts import BUCKET_MS
from dmq.store.schema.keys import (
    Family,
    held_key,
    held_mark,
    held_range,
    is_held_key,
    pack_queue_key,
    timeline_key,
    timeline_mark,
)
from dmq.store.schema.messages.index import EntryState, Receipt, redriven_id
from dmq.store.schema.messages.record import (
    DELAYED_KINDS,
    WAITING_HEADER_BYTES,
    QueuedMessage,
    body_payload,
    decode_queued,
    decode_waiting,
    encode_queued,
)

_Request = wire.ListMessagesRequest
_Listed = wire.ListedMessage
_TOKEN_CHARS_MAX = 32 * 1024  # it contains an offset for each queue
ROWS_PER_CALL_MAX = 2_000
_ROWS_PER_STEP = 128
_TRIES_MAX = 16  # an entry that moves between two reads is searched again
_BYTES_PER_STEP = 1024 * 1024
_END = timeline_mark(2**63, 0)  # of the timeline; held messages are stored after it
_ENDED = {
    EntryState.WITHDRAWN: MessageState.RECALLED,
    EntryState.REPLACED: MessageState.REPLACED,
    EntryState.ABSORBED: MessageState.ABSORBED,
}


class FoundMessage(NamedTuple):
    """State of a message. ``payload`` is the stored wire message, None if it is not available."""

    state: MessageState
    deliver_at_ms: int = 0
    stored_at_ms: int = 0
    queue_id: int = -1
    queue_offset: int = -1
    payload: bytes | None = None
    is_held: bool = False
    ended_at_ms: int = 0  # when it was recalled or replaced


_UNKNOWN = FoundMessage(MessageState.UNKNOWN)


class _Step(NamedTuple):
    """Result of one read of the timeline, and the start of the next read; None at the end."""

    found: list[_Listed]
    looked: int
    at: int | None


class _Row(NamedTuple):
    """Row of a queue; ``shown`` is None if the filter excludes it."""

    offset: int
    stored_at_ms: int
    shown: wire.ListedMessage | None


@dataclass(slots=True)
class _Cursor:
    """Position of a page in one queue. ``at`` is the next offset; backwards, the offset after the next."""

    place: Place
    range: QueueRange
    at: int
    rows: list[_Row] = field(default_factory=list)  # read and not used yet, the next one last

    def is_done(self, *, backwards: bool) -> bool:
        return self.at <= self.range.begin if backwards else self.at >= self.range.end


class MessageCalls:
    """RPCs of messages. A call reads a bounded number of rows. Raise ``Refused`` for invalid input."""

    def __init__(self, store: Store, broker: EmbeddedBroker) -> None:
        self._store = store
        self._broker = broker

    async def get_message(self, request: wire.GetMessageRequest) -> wire.GetMessageResponse:
        """Return the state of a message, and its content if available."""
        topic, message_id = check_topic(request.topic), request.message_id
        if request.own_key and not message_id:
            message_id = await self._under(topic, check_own_key(request.own_key))
            if not message_id:
                return wire.GetMessageResponse(topic=topic, state="UNKNOWN", queue_id=-1, queue_offset=-1)
        found = await self.find(topic, validate.check_message_id(message_id))
        return mapping.filled(
            wire.GetMessageResponse,
            found,
            topic=topic,
            message_id=message_id,
            state=found.state.name,
            content=_content(found.payload, with_body=request.with_body),
            groups=[
                mapping.filled(wire.GroupState, each, failure=mapping.wire_reason(each.failure))
                for each in await self.group_states(topic, message_id, found)
            ],
        )

    async def list_messages(self, request: wire.ListMessagesRequest) -> wire.ListMessagesResponse:
        """List a page of the messages of a topic."""
        limit, token = validate.check_limit(request.limit), validate.check_token(request.token, _TOKEN_CHARS_MAX)
        check_topic(request.topic)
        request = resolve(request, self._store.clock.now_ms())
        check_filter(request)
        topic = self._broker.names.topics.get(request.topic)
        if topic is None:
            raise topic_unknown(request.topic)
        if request.only_held:
            request.state = wire.WAITING
        if request.message_id:
            return wire.ListMessagesResponse(messages=await self._named(topic, request))
        if request.property:
            return await self._by_property(topic, request, token, limit)
        order = (wire.WAITING, wire.QUEUED) if request.newest_first else (wire.QUEUED, wire.WAITING)
        parts = [each for each in order if request.state in {0, each}]
        backwards = "-" if request.newest_first else ""
        heads = {each: f"{backwards}{'q' if each == wire.QUEUED else 'w'}" for each in parts}
        part, place = parts[0], ""
        if token:
            head, _, place = token.partition(":")
            if head not in heads.values():
                raise Refused(Rule.REQUEST, "the page token belongs to another list", value=token[:80])
            part = next(each for each in parts if heads[each] == head)
        list_part = self._waiting if part == wire.WAITING else self._ready
        found, following = await list_part(topic, request, place, limit)
        next_token = f"{heads[part]}:{following}" if following else ""
        if not following and part != parts[-1]:  # the other part starts on the next page
            next_token = f"{heads[parts[-1]]}:"
        return wire.ListMessagesResponse(messages=found, next_token=next_token)

    async def _by_property(self, topic: Topic, wanted: _Request, token: str, limit: int) -> wire.ListMessagesResponse:
        """Return a page of the pending and queued messages with a value of an indexed property."""
        name, _, value = wanted.property.partition("=")
        if wanted.newest_first:
            raise Refused(Rule.REQUEST, "messages with a property are listed in the order of their index, not by time")
        rows, following = await rows_of(self._broker, topic, name, value, token, limit)
        found = [
            listed(each.state, each.message, each.queue_id, each.queue_offset, is_held=each.is_held)
            for each in rows
            if each.state in ({wanted.state} if wanted.state else {wire.WAITING, wire.QUEUED})
            and not each.is_half
            and (each.is_held or not wanted.only_held)
            and is_due(wanted, each.message.deliver_at_ms or each.message.stored_at_ms)
            and is_meant(wanted, each.message)
        ]
        return wire.ListMessagesResponse(messages=found, next_token=following)

    async def _named(self, topic: Topic, wanted: _Request) -> Sequence[_Listed]:
        """Return the message with the requested id, if it is pending or in a queue and matches."""
        found = await self.find(topic.name, validate.check_message_id(wanted.message_id))
        if found.payload is None or found.state not in {MessageState.WAITING, MessageState.QUEUED}:
            return ()
        content = mapping.content_if_readable(found.payload, with_body=False) or wire.Content()
        message = QueuedMessage(
            attempts_before=0,
            stored_at_ms=found.stored_at_ms,
            deliver_at_ms=found.deliver_at_ms,
            message_id=pack_id(wanted.message_id),
            tag=content.tag,
            message_group=content.message_group,
            payload=found.payload,
            history=None,
        )
        due_ms = found.deliver_at_ms or found.stored_at_ms
        state = wire.WAITING if found.state is MessageState.WAITING else wire.QUEUED
        if wanted.state not in {0, state} or not is_due(wanted, due_ms) or not is_meant(wanted, message):
            return ()
        if wanted.only_held and not found.is_held:
            return ()
        return (listed(state, message, found.queue_id, found.queue_offset, is_held=found.is_held),)

    async def _under(self, topic: str, own_key: str) -> str:
        """Return the id of the message that is pending under an own key of a topic; empty if there is none."""
        if topic not in self._broker.names.topics:
            return ""
        (found,) = await self._broker.delayed.under(topic, [own_key])
        return unpack_id(found.message_id) if found is not None else ""

    async def find(self, topic: str, message_id: str) -> FoundMessage:
        """Return the state of a message."""
        return await asyncio.to_thread(self._message, topic, message_id)

    async def group_states(self, topic_name: str, message_id: str, found: FoundMessage) -> list[GroupState]:
        """Return the state of a message for each group, by name, if it was found in a queue or expired from one."""
        topic = self._broker.names.topics.get(topic_name)
        if topic is None or found.state not in {MessageState.QUEUED, MessageState.EXPIRED}:
            return []
        where = Where(
            topic,
            pack_id(message_id),
            found.queue_id,
            found.queue_offset,
            is_there=found.state is MessageState.QUEUED,
            is_redriven=found.queue_id < 0,
        )
        return await self._broker.operator.group_states.of(where)

    def _message(self, topic_name: str, message_id: str) -> FoundMessage:
        topic = self._broker.names.topics.get(topic_name)
        if topic is None:
            return _UNKNOWN
        for _ in range(_TRIES_MAX):
            found = self._store.find(topic.topic_id, pack_id(message_id), with_withdrawn=True)
            if found is None:
                return self._redriven(topic, message_id)
            if found.state in _ENDED:
                return FoundMessage(state=_ENDED[found.state], ended_at_ms=found.at_ms)
            if found.state is not EntryState.WAITING:
                return self._queued(topic, found)
            (value,) = self._store.get_many(Family.TIMELINE, [found.key])
            if value is not None:
                entry = decode_waiting(value)
                return FoundMessage(
                    state=MessageState.WAITING,
                    deliver_at_ms=entry.deliver_at_ms,
                    stored_at_ms=entry.accepted_at_ms,
                    payload=body_payload(value[WAITING_HEADER_BYTES:]),
                    is_held=is_held_key(found.key),
                )
        raise StoreCorrupt(f"message {message_id!r} of topic {topic_name!r} is pending, but not on the timeline")

    def _queued(self, topic: Topic, found: Receipt) -> FoundMessage:
        key = pack_queue_key(topic.topic_id, found.queue_id, found.queue_offset)
        (value,) = self._store.get_many(Family.QUEUE, [key])
        record = decode_queued(value) if value is not None else None
        return FoundMessage(
            state=MessageState.QUEUED if record is not None else MessageState.EXPIRED,
            deliver_at_ms=record.deliver_at_ms if record is not None else 0,
            stored_at_ms=found.at_ms,
            queue_id=found.queue_id,
            queue_offset=found.queue_offset,
            payload=record.payload if record is not None else None,
        )

    def _redriven(self, topic: Topic, message_id: str) -> FoundMessage:
        """Return the state of a message that was redriven to one group."""
        entry_id = redriven_id(pack_id(message_id), topic.topic_id)
        lanes = [(of[0], lane) for of, lane in list(self._broker.names.lanes.items()) if of[1] == topic.topic_id]
        for group_id, lane in lanes:
            found = self._store.find(group_id, entry_id)
            if found is None:
                continue
            (value,) = self._store.get_many(Family.QUEUE, [pack_queue_key(lane.topic_id, 0, found.queue_offset)])
            return FoundMessage(
                state=MessageState.QUEUED,
                stored_at_ms=found.at_ms,
                queue_offset=found.queue_offset,
                payload=decode_queued(value).payload if value is not None else None,
            )
        return _UNKNOWN

    # -- the timeline -------------------------------------------------------------------------------------------------

    async def _waiting(self, topic: Topic, wanted: _Request, place: str, limit: int) -> tuple[list[_Listed], str]:
        look = self._later_first if wanted.newest_first else self._next_first
        held = _held_marks(topic.topic_id)
        first = _END if wanted.newest_first and not wanted.only_held else held[wanted.newest_first]
        at: int | None = _mark_of(place, topic.topic_id) if place else first
        found: list[_Listed] = []
        looked = 0
        while at is not None and looked < ROWS_PER_CALL_MAX and len(found) < limit:
            start, left = at, limit - len(found)
            step = await self._broker.reader.run(
                lambda store: look(store, topic.topic_id, wanted, start, left)  # noqa: B023 - called before the next
            )
            found += step.found
            looked += max(step.looked, 1)
            at = step.at
        return found, f"{at:x}" if at is not None else ""

    def _next_first(self, store: Store, topic_id: int, wanted: _Request, at: int, limit: int) -> _Step:
        if at > _END:
            low, end = _held(store, topic_id, wanted)
            return self._scan(
                store, topic_id, wanted, timeline_key(max(at, low)), end, limit, None if wanted.only_held else 0
            )
        start = max(at, store.marks.low(), timeline_mark(wanted.due_after_ms, 0))
        key = next_of(store, topic_id, timeline_key(start))
        stop = min(timeline_mark(self._key_ms_max(wanted.due_before_ms), 0), _END)
        return self._scan(store, topic_id, wanted, key, timeline_key(stop), limit, following=None)

    def _scan(  # noqa: PLR0917 - a range and a filter
        self,
        store: Store,
        topic_id: int,
        wanted: _Request,
        start: bytes,
        stop: bytes,
        limit: int,
        following: int | None,
    ) -> _Step:
        if start >= stop:
            return _Step([], 0, following)
        rows = store.scan(Family.TIMELINE, start, stop, limit=_ROWS_PER_STEP, bytes_max=_BYTES_PER_STEP)
        found: list[_Listed] = []
        for looked, (row, value) in enumerate(rows.rows):
            if len(found) == limit:
                return _Step(found, looked, int.from_bytes(row, "big"))
            found += _waiting_shown(topic_id, wanted, row, value)
        if rows.is_complete:
            return _Step(found, len(rows.rows), following)
        return _Step(found, len(rows.rows), int.from_bytes(rows.rows[-1][0], "big") + 1)

    def _later_first(self, store: Store, topic_id: int, wanted: _Request, at: int, limit: int) -> _Step:
        """Like ``_next_first``, but below ``at``: one seek per row, because nothing reads backwards."""
        following: int | None = None
        if at > _END:
            first, end = _held(store, topic_id, wanted)
            low, at = timeline_key(first), min(at, int.from_bytes(end, "big"))
        else:
            following = _held_marks(topic_id)[1]
            low = timeline_key(max(store.marks.low(), timeline_mark(wanted.due_after_ms, 0)))
            at = min(at, timeline_mark(self._key_ms_max(wanted.due_before_ms), 0))
            at = self._jump_back(store, topic_id, at)
        found: list[_Listed] = []
        size = 0
        for looked in range(_ROWS_PER_STEP):
            if len(found) == limit or size >= _BYTES_PER_STEP:
                return _Step(found, looked, at)
            row = store.last(Family.TIMELINE, low, timeline_key(at)) if timeline_key(at) > low else None
            if row is None:
                return _Step(found, looked, following)
            at = int.from_bytes(row[0], "big")
            size += len(row[1])
            found += _waiting_shown(topic_id, wanted, *row)
        return _Step(found, _ROWS_PER_STEP, at)

    def _key_ms_max(self, due_before_ms: int) -> int:
        """Return the key time below which all entries due before ``due_before_ms`` are stored; overdue ones have a
        later key.
        """
        return max(due_before_ms, self._store.clock.now_ms() + BUCKET_MS) if due_before_ms else 2**63

    def _jump_back(self, store: Store, topic_id: int, at: int) -> int:
        """Like ``_jump``, but backwards."""
        near_ms = self._store.clock.now_ms() + BUCKET_MS
        at_ms = min(at >> 64, 2**53)
        if at_ms <= near_ms:
            return at
        return min(at, timeline_mark(max(store.last_due_ms(topic_id, at_ms), near_ms), 0))

    # -- the queues ---------------------------------------------------------------------------------------------------

    async def _ready(self, topic: Topic, wanted: _Request, place: str, limit: int) -> tuple[list[_Listed], str]:
        cursors = await self._cursors(topic, place, backwards=wanted.newest_first)
        sign = -1 if wanted.newest_first else 1
        rows_each = max(1, _ROWS_PER_STEP // len(cursors))
        heads: list[tuple[int, int]] = []
        for queue_id, cursor in enumerate(cursors):
            await self._fill(cursor, wanted, rows_each)
            if cursor.rows:
                heads.append((sign * cursor.rows[-1].stored_at_ms, queue_id))
        heapify(heads)
        found: list[_Listed] = []
        looked = 0
        while heads and looked < ROWS_PER_CALL_MAX and len(found) < limit:
            _, queue_id = heappop(heads)
            cursor = cursors[queue_id]
            row = cursor.rows.pop()
            cursor.at = row.offset if wanted.newest_first else row.offset + 1
            looked += 1
            if row.shown is not None:
                found.append(row.shown)
            await self._fill(cursor, wanted, rows_each)
            if cursor.rows:
                heappush(heads, (sign * cursor.rows[-1].stored_at_ms, queue_id))
        return found, ".".join(f"{each.at:x}" for each in cursors) if heads else ""

    async def _cursors(self, topic: Topic, place: str, *, backwards: bool) -> list[_Cursor]:
        ranges = [await self._broker.pulls.queue_range(topic.name, each) for each in range(topic.queues)]
        at = [_number(text) for text in place.split(".")] if place else []
        if len(at) > len(ranges):
            raise Refused(Rule.REQUEST, "the page token belongs to another topic", value=place[:80])
        # Queues added since the token was issued are read from their beginning.
        at += [each.end if backwards else each.begin for each in ranges[len(at) :]]
        return [
            _Cursor(Place(topic.topic_id, queue_id), each, min(max(offset, each.begin), each.end))
            for queue_id, (each, offset) in enumerate(zip(ranges, at, strict=True))
        ]

    async def _fill(self, cursor: _Cursor, wanted: _Request, rows_max: int) -> None:
        if not cursor.rows and not cursor.is_done(backwards=wanted.newest_first):
            cursor.rows = await self._broker.reader.run(lambda store: _look(store, cursor, wanted, rows_max))


def _held(store: Store, topic_id: int, wanted: _Request) -> tuple[int, bytes]:
    """Return the range of held messages of a topic that the filter may match; empty (start equals end) if there are
    none.
    """
    end = _held_marks(topic_id)[1]
    (count,) = store.get_many(Family.META, [held_key(topic_id)])
    first = held_mark(topic_id, timeline_mark(wanted.due_after_ms, 0)) if count is not None else end
    return first, timeline_key(end)


def _held_marks(topic_id: int) -> tuple[int, int]:
    """Return the marks at the start and the end of the held messages of a topic."""
    start, stop = held_range(topic_id)
    return int.from_bytes(start, "big"), int.from_bytes(stop[: len(start)], "big")


def _look(store: Store, cursor: _Cursor, wanted: _Request, rows_max: int) -> list[_Row]:
    """Return the next rows of a queue, in reverse order so that the first is last. Message bodies are released here."""
    at, place = cursor.at, cursor.place
    if not wanted.newest_first:
        rows = messages_from(store, place, at, cursor.range.end, limit=rows_max, bytes_max=_BYTES_PER_STEP)
        return [_row(place, wanted, *each) for each in reversed(rows)]
    while True:
        first = max(cursor.range.begin, at - rows_max)
        rows = messages_from(store, place, first, at, limit=rows_max, bytes_max=_BYTES_PER_STEP)
        if not rows or rows[-1][0] == at - 1 or rows_max == 1:
            return [_row(place, wanted, *each) for each in rows]
        rows_max //= 2  # the messages are large: the read ended before the newest one


def _row(place: Place, wanted: _Request, offset: int, message: QueuedMessage) -> _Row:
    due_ms = message.deliver_at_ms or message.stored_at_ms
    shown = None
    if is_due(wanted, due_ms) and is_meant(wanted, message):
        shown = listed(wire.QUEUED, message, place.queue_id, offset)
    return _Row(offset, message.stored_at_ms, shown)


def _waiting_shown(topic_id: int, wanted: _Request, key: bytes, value: bytes) -> Sequence[_Listed]:
    entry = decode_waiting(value)
    if entry.scope != topic_id or entry.kind not in DELAYED_KINDS or not is_due(wanted, entry.deliver_at_ms):
        return ()
    if wanted.only_held and not is_held_key(key):
        return ()
    body = value[WAITING_HEADER_BYTES:]
    message = decode_queued(encode_queued(0, entry.accepted_at_ms, entry.deliver_at_ms, body))
    if not is_meant(wanted, message):
        return ()
    return (listed(wire.WAITING, message, is_held=is_held_key(key)),)


def listed(
    state: wire.MessageState, message: QueuedMessage, queue_id: int = -1, offset: int = -1, *, is_held: bool = False
) -> _Listed:
    """Return a message as it is listed."""
    content = mapping.content_if_readable(message.payload, with_body=False)
    return mapping.filled(
        _Listed,
        message,
        state=state,
        message_id=unpack_id(message.message_id),
        queue_id=queue_id,
        queue_offset=offset,
        content=content,
        is_held=is_held,
    )


def _content(payload: bytes | None, *, with_body: bool) -> wire.Content | None:
    if payload is None:
        return None
    try:
        return mapping.wire_content(payload, with_body=with_body)
    except DecodeError as error:
        raise StoreCorrupt("the stored message cannot be read") from error


def _mark_of(text: str, topic_id: int) -> int:
    mark = _number(text)
    first, end = _held_marks(topic_id)
    if mark > _END and not first <= mark <= end:
        raise Refused(Rule.REQUEST, "the page token is damaged", value=text[:80])
    return mark


def _number(text: str) -> int:
    if not text or len(text) > 32 or not set(text) <= set("0123456789abcdef"):
        raise Refused(Rule.REQUEST, "the page token is damaged", value=text[:80])
    return int(text, 16)


assert {state.name: state.value for state in MessageState}.items() <= dict(wire.MessageState.items()).items()
