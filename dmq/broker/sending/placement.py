"""Placement of messages: ops that accept a message, and ops that hand over a due one. Pure except for a counter."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Envelope, MessageType, pack_id
from broker_adapter.contracts.topics import queue_of_message_group
from dmq.broker.topics import Names, Topic
from dmq.errors import StoreCorrupt
from dmq.store.schema.messages.index import failed_id
from dmq.store.schema.messages.own_keys import own_key_row
from dmq.store.schema.messages.record import (
    HALF_KINDS,
    WAITING_HEADER_BYTES,
    EntryKind,
    OwnKey,
    body_facts,
    decode_history,
    decode_waiting,
    encode_body,
    encode_queued,
    encode_waiting,
    history_bytes,
    split_own_key,
)
from dmq.store.writer.operations import Append, HandOver, IfKnown, Schedule, UnderKey
from dmq.trail.events import LANE, NO_QUEUE, EventKind, encode_event

# Plain integers: an enum lookup for every message costs more than encoding the event.
SCHEDULED, QUEUED, DELIVERED = int(EventKind.SCHEDULED), int(EventKind.QUEUED), int(EventKind.DELIVERED)
RETRIED, RETRY = int(EventKind.RETRIED), int(EntryKind.RETRY)
DELAYED, DELAYED_FOR = int(EntryKind.DELAYED), int(EntryKind.DELAYED_FOR)
_UNGROUPED = HALF_KINDS | {RETRY}
_ANSWER = IfKnown.ANSWER  # a repeated send gets its first answer; the other ops of its unit are independent


class Placement:
    """Queue choice, unless the sender chose: always the same queue for a message group, round robin for others."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.slowed = names.slowed
        self._turns: dict[int, int] = {}

    def accept(self, topic: Topic, envelope: Envelope, now_ms: int) -> Schedule | Append:
        """Return the op that accepts ``envelope``: an append to its queue if it is due, else a timeline entry."""
        message_id, message_group = pack_id(envelope.message_id), envelope.message_group
        body = body_of(envelope, message_id)
        return self.put(
            topic,
            message_id,
            message_group,
            body,
            envelope.deliver_at_ms,
            now_ms,
            is_relative=envelope.is_relative,
            queue_id=envelope.queue_id,
        )

    def put(
        self,
        topic: Topic,
        message_id: bytes,
        message_group: str,
        body: bytes,
        deliver_at_ms: int,
        now_ms: int,
        *,
        is_relative: bool = False,
        queue_id: int = -1,
    ) -> Schedule | Append:
        """As ``accept``, for an encoded body, which includes its own key."""
        scope = topic.topic_id
        own_key, bare = split_own_key(body)
        under = _under(scope, own_key, message_id) if own_key is not None else None
        # A due delayed message of a message group also uses the timeline. It must not overtake an earlier one of the
        # group that is due and not yet handed over.
        if deliver_at_ms > now_ms or (deliver_at_ms and message_group):
            return Schedule(
                scope,
                message_id,
                deliver_at_ms,
                encode_waiting(
                    DELAYED_FOR if is_relative else DELAYED, queue_id + 1, scope, scope, deliver_at_ms, now_ms, body
                ),
                encode_event(SCHEDULED, scope, 0, NO_QUEUE, 0, deliver_at_ms, message_id),
                False,
                _ANSWER,
                b"",
                under,
            )
        if queue_id < 0:
            queue_id = self.choose(topic, message_group)
        return Append(
            scope,
            message_id,
            scope,
            queue_id,
            encode_queued(0, now_ms, deliver_at_ms, bare),
            encode_event(QUEUED, scope, 0, queue_id, 0, deliver_at_ms, message_id),
            _ANSWER,
            under,
        )

    def hand_over(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[HandOver]:
        """Return the ops that move due entries to their queues, in the order of ``rows``."""
        topics = self.names.topics_by_id
        made: list[HandOver] = []
        for key, value in rows:
            kind, retry_count, topic_id, scope, deliver_at_ms, _accepted_at_ms = decode_waiting(value)
            topic = topics.get(topic_id)
            if topic is None:
                raise StoreCorrupt(f"pending message of the unknown topic {topic_id}")
            body = value[WAITING_HEADER_BYTES:]
            if kind == RETRY:
                made.append(_retry(key, retry_count, topic_id, scope, deliver_at_ms, body, now_ms))
                continue
            message_id, message_group = body_facts(body)
            queue_id = retry_count - 1  # a delayed send stores its queue id + 1 here
            if queue_id < 0:
                queue_id = self.choose(topic, message_group.decode() if message_group else "")
            own_row = b""
            if not body[0]:
                own_key, body = split_own_key(body)
                own_row = own_key_row(topic_id, own_key.key) if own_key is not None else b""
            record = encode_queued(0, now_ms, deliver_at_ms, body)
            event = encode_event(DELIVERED, topic_id, 0, queue_id, 0, deliver_at_ms, message_id)
            place = topic_id, queue_id, record
            made.append(HandOver(key, scope, message_id, deliver_at_ms, *place, event, len(value), False, own_row))
        return made

    def choose(self, topic: Topic, message_group: str) -> int:
        """Return a queue for a message without a queue chosen by its sender."""
        if message_group:
            return queue_of_message_group(message_group, topic.queues)
        turn = self._turns.get(topic.topic_id, 0)
        self._turns[topic.topic_id] = turn + 1
        return turn % topic.queues


def body_of(envelope: Envelope, message_id: bytes) -> bytes:
    """Return the encoded body of an accepted message; ``message_id`` is its packed id."""
    own_key = OwnKey(envelope.own_key.encode(), envelope.keeps_first) if envelope.own_key else None
    tag, message_group = envelope.tag.encode(), envelope.message_group.encode()
    return encode_body(message_id, tag, message_group, envelope.payload, envelope.not_after_ms, own_key)


def _under(topic_id: int, own_key: OwnKey, message_id: bytes) -> UnderKey:
    def event(due_ms: int, other_id: bytes) -> bytes:
        if own_key.keeps_first:
            return encode_event(EventKind.ABSORBED, topic_id, 0, NO_QUEUE, 0, due_ms, message_id)
        return encode_event(EventKind.REPLACED, topic_id, 0, NO_QUEUE, 0, due_ms, other_id)

    return UnderKey(own_key_row(topic_id, own_key.key), own_key.keeps_first, event)


def wrong_type(topic: Topic, message_type: MessageType) -> Refused:
    """Return the refusal of a message with a type that its topic does not allow."""
    assert topic.message_type is not None
    expected, actual = topic.message_type.name, message_type.name
    why = (
        f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {actual}: "
        f"topic {topic.name!r} accepts {expected} messages only"
    )
    return Refused(Rule.MESSAGE_TYPE, why, value=message_type.name)


def _retry(  # noqa: PLR0917 - the fields of an entry
    key: bytes, failed: int, lane_id: int, group_id: int, due_ms: int, body: bytes, now_ms: int
) -> HandOver:
    """Return the op that makes a group's copy of a message visible to it again."""
    history = decode_history(body, 0)
    message_id, _ = body_facts(body[history_bytes(body, 0) :])
    record = encode_queued(failed, now_ms, 0, body, has_history=True)
    event = encode_event(RETRIED, history.topic_id, group_id, LANE, failed + 1, due_ms, message_id)
    size = WAITING_HEADER_BYTES + len(body)
    return HandOver(key, group_id, failed_id(message_id, history, failed), due_ms, lane_id, 0, record, event, size)


def message_group_of(value: bytes) -> bytes:
    """Return the message group of a timeline entry.

    Half messages have none. Retries have none either, because grouped messages are retried in place.
    """
    if decode_waiting(value).kind in _UNGROUPED:
        return b""
    return body_facts(value[WAITING_HEADER_BYTES:])[1]
