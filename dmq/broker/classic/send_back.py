"""Messages sent back by pull consumers that divide queues: they are retried, or become dead letters.

    retry       a delayed send to ``%RETRY%<group>``, a topic with one queue that the group's consumers pull
    dead        a letter in ``%DLQ%<group>``, as for pop: the same queue, the same operator jobs

Either is one unit, so a crash leaves all of it or nothing. The original stays in its queue, and is finished when its
consumer commits a later offset. A consumer without an answer repeats the call. If a consumer dies before its commit,
the next reader of the queue sends the messages back again. Such a repetition writes nothing if a copy from the same
place is still pending, or if its letter has no outcome. A copy that was already visible is written again. So no message
is lost, and a message is duplicated only if its earlier copy was already visible.

The copy keeps the original message, its id and its topic; ``delivery_attempt`` is the number of the next delivery. The
store uses an id of its own for the copy, ``<message id>~<topic>.<queue>.<offset>.<number>``, because a message may be
sent back many times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

from google.protobuf.message import DecodeError

from broker_adapter.contracts.classic import MessageQueue, Outgoing, ReceivedMessage
from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.message import Envelope, pack_id
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import decode, encode
from dmq.broker.failures import FailedMessage, Failures, Outcomes
from dmq.broker.groups import ATTEMPT_MAX
from dmq.broker.handles import ReceiptHandles
from dmq.broker.sending import Sends
from dmq.broker.topics import BrokerPart, SharedParts, Topic
from dmq.store.schema.keys import WAITING_GENERATION, Family, pack_index_prefix, pack_queue_key
from dmq.store.schema.messages.failure_reason import encode_reason
from dmq.store.schema.messages.index import failed_id
from dmq.store.schema.messages.record import History, QueuedMessage, decode_queued
from dmq.trail.events import LANE
from retry.failure_reason import FailureReason, bounded
from retry.flow import ComeBack, SentBack
from retry.policy import MAX_ATTEMPTS_LIMIT, DeadLetter, Reason, RetryAt, RetryPolicy

_LEVEL_BEFORE = 2  # the first failure waits for level 3, each further one for the next: RocketMQ's rule
_EXHAUSTED = DeadLetter(Reason.EXHAUSTED)
_ID_BYTES_MAX = 160  # of a message id within the id of its copy; a longer one is replaced by its digest
_PLACE_BYTES = 16  # suffix of a letter's id in the index: topic, queue, offset, attempt


class _Place(NamedTuple):
    """Place of a failed message. ``origin`` is the topic to which it was sent."""

    origin: Topic
    topic: Topic
    queue_id: int
    queue_offset: int


class SentBackMessages(BrokerPart):
    """Stores sent-back messages, durable on return. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        outcomes: Outcomes,
        *,
        sends: Sends,
        failures: Failures,
        receipts: ReceiptHandles,
        levels_ms: Sequence[int],
    ) -> None:
        super().__init__(shared)
        self._sends = sends
        self._failures = failures
        self._receipts = receipts
        self._outcomes = outcomes
        self._levels_ms = tuple(levels_ms)
        # Calls for one place run one at a time, so that the second one finds the copy of the first one.
        self._under_way: dict[tuple[str, str, int, int], asyncio.Future[None]] = {}

    def level_ms(self, delay_level: int) -> int:
        """Return the delay of a delay level; levels after the last one are equal to the last one."""
        return self._levels_ms[min(delay_level, len(self._levels_ms)) - 1]

    async def send_back(
        self, group: str, received: ReceivedMessage, *, delay_level: int, attempts_max: int, reason: FailureReason
    ) -> None:
        """As ``ClassicBroker.send_back``. Raise ``Overloaded`` while the disk is almost full, with no change made."""
        turn = (group, received.queue.topic, received.queue.queue_id, received.queue_offset)
        while (before := self._under_way.get(turn)) is not None:
            await asyncio.wait((before,))
        done = self._under_way[turn] = asyncio.get_running_loop().create_future()
        try:
            await self._send_back(group, received, delay_level, attempts_max, reason)
        finally:
            del self._under_way[turn]
            done.set_result(None)

    async def _send_back(
        self, group: str, received: ReceivedMessage, level: int, attempts_max: int, failure: FailureReason
    ) -> None:
        retries = await self._catalog.retry_topic(group)
        topic = self._catalog.known_topic(received.queue.topic)
        origin = self._names.topics.get(received.message.topic, topic)
        place = _Place(origin, topic, received.queue.queue_id, received.queue_offset)
        payload = await self._payload(received, place)
        if self._store.is_disk_low():
            raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
        outcome = self._outcome(received, level, attempts_max)
        if isinstance(outcome, DeadLetter):
            await self._bury(group, received, place, payload, outcome, failure)
            return
        prefix = _copy_id(received.message.message_id, place)
        first = pack_index_prefix(WAITING_GENERATION, retries.topic_id) + pack_id(prefix)
        if (await self._reader.rows(Family.INDEX, first, first + b"\xff", limit=1)).rows:
            await self._commits.flush()  # the copy found may not be durable yet
            return
        await self._put(Envelope(retries.name, prefix, payload, received.message.tag, "", outcome.at_ms, True, 0))

    def _outcome(self, received: ReceivedMessage, level: int, attempts_max: int) -> RetryAt | DeadLetter:
        """Return the outcome under the client's own policy."""
        if received.unreadable and level >= 0:  # a retry cannot make it readable
            return _EXHAUSTED
        policy = RetryPolicy(max_attempts=min(max(attempts_max, 0) + 1, MAX_ATTEMPTS_LIMIT))
        attempt = received.attempts_failed + 1
        failure = SentBack(level or _LEVEL_BEFORE + attempt)
        outcome = self._outcomes.decide(policy, failure, attempt, self._clock.now_ms(), since_ms=0, not_after_ms=0)
        assert not isinstance(outcome, ComeBack), "only an expired lease comes back"
        return outcome

    async def put(self, group: str, outgoing: Outgoing, envelope: Envelope, reason: FailureReason) -> None:
        """Store a message that a consumer sends to its retry topic itself, or a letter after more than ``attempts_max``
        failures.

        RocketMQ's rule: this allows one failure more than a send-back.
        """
        attempts_max = outgoing.attempts_max
        if attempts_max is None or outgoing.attempts_failed <= attempts_max:
            message_id = _start_of_id(envelope.message_id)
            await self._put(envelope._replace(message_id=message_id, message_group="", own_key="", keeps_first=False))
            return
        queue = MessageQueue(envelope.topic, "", envelope.queue_id)
        retries = await self._catalog.retry_topic(group)
        received = ReceivedMessage(
            message=outgoing.message,
            queue=queue,
            queue_offset=0,
            stored_at_ms=self._clock.now_ms(),
            attempts_failed=outgoing.attempts_failed,
        )
        origin = self._names.topics.get(decode(envelope.payload).topic, retries)
        place = _Place(origin, retries, queue.queue_id, 0)
        await self._bury(group, received, place, envelope.payload, _EXHAUSTED, reason)

    async def _put(self, envelope: Envelope) -> None:
        """Send a copy to a retry topic; its id is extended by a new epoch, which makes it unique."""
        await self._sends.send([envelope._replace(message_id=f"{envelope.message_id}{self._receipts.next_epoch()}")])

    async def _payload(self, received: ReceivedMessage, place: _Place) -> bytes:
        """Return the original payload with the number of its next delivery.

        If retention removed the original, encode the received message instead.
        """
        key = pack_queue_key(place.topic.topic_id, place.queue_id, place.queue_offset)
        (value,) = await self._reader.values(Family.QUEUE, [key])
        payload = decode_queued(value).payload if value is not None else encode(received.message).payload
        with suppress(DecodeError):
            sent = wire.Message.FromString(payload)
            sent.system_properties.delivery_attempt = received.attempts_failed + 2  # attempts count from 1
            return sent.SerializeToString()
        return payload

    async def _bury(
        self,
        group_name: str,
        received: ReceivedMessage,
        place: _Place,
        payload: bytes,
        outcome: DeadLetter,
        failure: FailureReason,
    ) -> None:
        """Store a dead letter. The audit trail assigns the message to the group only now, because pulls leave no
        events.
        """
        group, topic_id = self._catalog.known_group(group_name), place.origin.topic_id
        attempt = min(received.attempts_failed + 1, ATTEMPT_MAX)
        now_ms, stored_ms = self._clock.now_ms(), received.stored_at_ms
        message_id = pack_id(received.message.message_id)
        first_ms = stored_ms if received.attempts_failed else now_ms
        where = topic_id, place.queue_id, place.queue_offset
        why = encode_reason(bounded(failure)) if self._failures.reasons.is_on else b""
        history = History(*where, stored_ms, first_ms, now_ms, 0, self._receipts.next_epoch(), why)
        suffix = failed_id(message_id, history, attempt)[-_PLACE_BYTES:]
        if any(letter.endswith(suffix) for letter in await self._failures.open_letters(group, message_id)):
            await self._commits.flush()
            return
        record = QueuedMessage(attempt, stored_ms, 0, message_id, received.message.tag, "", payload, history)
        failed = FailedMessage(group.group_id, topic_id, LANE, attempt, record, history)
        await self._commits.commit(self._outcomes.taken_over(failed, outcome, now_ms))


def _copy_id(message_id: str, place: _Place) -> str:
    """Return the common id prefix of all copies of a message made for one place."""
    return f"{_start_of_id(message_id)}{place.topic.topic_id}.{place.queue_id}.{place.queue_offset}."


def _start_of_id(message_id: str) -> str:
    if len(message_id.encode()) > _ID_BYTES_MAX:
        message_id = blake2b(message_id.encode(), digest_size=16).hexdigest()
    return f"{message_id}~"
