"""Messages that consumers sent back, who pull and divide queues among themselves: they come again, or are dead.

    comes again     a delayed send to ``%RETRY%<group>``, a topic with one queue that the group's consumers pull
    dead            a letter in ``%DLQ%<group>``, as pop leaves them: the same place, the same jobs of operators

Either is one unit, so a crash leaves all of it or nothing; the original stays where it lies, and is finished when its
consumer commits a later offset. A consumer that got no answer repeats the call, and one that died before it committed
has its messages sent back again by whoever reads on from there. Such a repetition finds the copy of the same place that
still waits, or the letter that nobody dealt with, and writes nothing; a copy that was visible meanwhile is written
anew. So nothing is lost, and what comes twice came before.

The copy keeps the message as it was sent, with its id and its topic; ``delivery_attempt`` says which delivery comes
next. In the store it goes by an id of its own, ``<message id>~<topic>.<queue>.<offset>.<number>``: one message may be
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
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import decode, encode
from dmq.broker.failures.failures import Failures
from dmq.broker.groups.group_queue import ATTEMPT_MAX
from dmq.broker.groups.settled_letters import Settled
from dmq.broker.handles.receipt_handle import ReceiptHandles
from dmq.broker.io.commits import Commits
from dmq.broker.io.reader import Reader
from dmq.broker.sending.sends import Sends
from dmq.broker.topics.catalog import Catalog
from dmq.broker.topics.registry import Topic
from dmq.store.schema.index import failed_id
from dmq.store.schema.keys import WAITING_GENERATION, Family, pack_index_prefix, pack_queue_key
from dmq.store.schema.record import History, QueuedMessage, decode_queued
from dmq.store.writer.operations import Emit
from dmq.trail.events import LANE, EventKind, encode_event
from retry.policy import Reason

LEVEL_BEFORE = 2  # the first failure waits for level 3, each further one for the next: RocketMQ's rule
_ID_BYTES_MAX = 160  # of a message id in that of its copy; of a longer one its digest is there
_PLACE_BYTES = 16  # at the end of a letter's id in the index: topic, queue, offset, attempt


class _Place(NamedTuple):
    """Where a message lay when its consumer failed it. ``origin`` is the topic it was sent to."""

    origin: Topic
    topic: Topic
    queue_id: int
    queue_offset: int


class SentBack:
    """Keeps what is sent back, durable on return. Belongs to the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        commits: Commits,
        reader: Reader,
        *,
        sends: Sends,
        failures: Failures,
        receipts: ReceiptHandles,
        settled: Settled,
        levels_ms: Sequence[int],
    ) -> None:
        self._catalog = catalog
        self._names = catalog.names
        self._commits = commits
        self._reader = reader
        self._sends = sends
        self._failures = failures
        self._receipts = receipts
        self._settled = settled
        self._levels_ms = tuple(levels_ms)
        self._store = commits.store
        self._clock = self._store.clock
        # Calls for one place come one after the other: the second one sees what the first one wrote.
        self._under_way: dict[tuple[str, str, int, int], asyncio.Future[None]] = {}

    def level_ms(self, delay_level: int) -> int:
        """Return how long a delay level is; a level behind the last one is the last one."""
        return self._levels_ms[min(delay_level, len(self._levels_ms)) - 1]

    async def send_back(self, group: str, received: ReceivedMessage, *, delay_level: int, attempts_max: int) -> None:
        """As ``ClassicBroker.send_back``. ``Overloaded`` while the disk is almost full: nothing was done."""
        turn = (group, received.queue.topic, received.queue.queue_id, received.queue_offset)
        while (before := self._under_way.get(turn)) is not None:
            await asyncio.wait((before,))
        done = self._under_way[turn] = asyncio.get_running_loop().create_future()
        try:
            await self._send_back(group, received, delay_level, attempts_max)
        finally:
            del self._under_way[turn]
            done.set_result(None)

    async def _send_back(self, group: str, received: ReceivedMessage, level: int, attempts_max: int) -> None:
        retries = await self._catalog.retry_topic(group)
        topic = self._catalog.known_topic(received.queue.topic)
        origin = self._names.topics.get(received.message.topic, topic)
        place = _Place(origin, topic, received.queue.queue_id, received.queue_offset)
        payload = await self._payload(received, place)
        failed = received.attempts_failed
        if self._store.is_disk_low():
            raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
        if level < 0 or failed >= attempts_max or received.unreadable:  # what nobody can read is none the better later
            reason = Reason.SENT_BACK if level < 0 else Reason.EXHAUSTED
            await self._bury(group, received, place, payload, reason)
            return
        prefix = _copy_id(received.message.message_id, place)
        first = pack_index_prefix(WAITING_GENERATION, retries.topic_id) + pack_id(prefix)
        if (await self._reader.rows(Family.INDEX, first, first + b"\xff", limit=1)).rows:
            await self._commits.flush()  # what was read may not be durable yet
            return
        level = level or LEVEL_BEFORE + 1 + failed
        at_ms = self._clock.now_ms() + self.level_ms(level)
        await self._put(Envelope(retries.name, prefix, payload, received.message.tag, "", at_ms, True, 0))

    async def put(self, group: str, outgoing: Outgoing, envelope: Envelope) -> None:
        """Keep what a consumer puts into its retry topic itself; a letter if it was failed more than ``attempts_max``.

        RocketMQ's rule: one failure more than if it were sent back.
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
        await self._bury(
            group, received, _Place(origin, retries, queue.queue_id, 0), envelope.payload, Reason.EXHAUSTED
        )

    async def _put(self, envelope: Envelope) -> None:
        """Put a copy into a retry topic; what its id begins with becomes an id that no other one has."""
        await self._sends.send([envelope._replace(message_id=f"{envelope.message_id}{self._receipts.next_epoch()}")])

    async def _payload(self, received: ReceivedMessage, place: _Place) -> bytes:
        """Return the message as it was sent, with the number of its next delivery; from memory if retention took it."""
        key = pack_queue_key(place.topic.topic_id, place.queue_id, place.queue_offset)
        (value,) = await self._reader.values(Family.QUEUE, [key])
        payload = decode_queued(value).payload if value is not None else encode(received.message).payload
        with suppress(DecodeError):
            sent = wire.Message.FromString(payload)
            sent.system_properties.delivery_attempt = received.attempts_failed + 2  # they count from 1
            return sent.SerializeToString()
        return payload

    async def _bury(
        self, group_name: str, received: ReceivedMessage, place: _Place, payload: bytes, reason: Reason
    ) -> None:
        """Make a dead letter. In the trail the message is the group's from here on: of pulls it says nothing."""
        group = self._catalog.known_group(group_name)
        attempt = min(received.attempts_failed + 1, ATTEMPT_MAX)
        now_ms = self._clock.now_ms()
        message_id = pack_id(received.message.message_id)
        history = History(
            place.origin.topic_id,
            place.queue_id,
            place.queue_offset,
            received.stored_at_ms,
            received.stored_at_ms if received.attempts_failed else now_ms,
            now_ms,
            reason,
            self._receipts.next_epoch(),
        )
        if await self._is_buried(group_name, failed_id(message_id, history, attempt), message_id):
            await self._commits.flush()
            return
        record = QueuedMessage(
            attempt, received.stored_at_ms, 0, message_id, received.message.tag, "", payload, history
        )
        where = place.origin.topic_id, group.group_id, LANE, attempt
        taken = Emit(encode_event(EventKind.TAKEN_OVER, *where, place.queue_offset, message_id))
        ops, letter = self._failures.bury_ops(
            group.group_id, place.origin.topic_id, record, history, attempt, number=LANE
        )
        self._failures.dead_total += 1
        await self._commits.commit([taken, *ops, letter])

    async def _is_buried(self, group: str, letter_id: bytes, message_id: bytes) -> bool:
        """Say whether a letter of the same place and attempt lies there and has no outcome."""
        letters = self._names.topics.get(dead_letter_topic(group))
        if letters is None:
            return False
        copies = await self._reader.run(lambda store: store.copies(letters.topic_id, message_id))
        settled = await self._settled.load(letters.topic_id)
        return any(
            copy_id[-_PLACE_BYTES:] == letter_id[-_PLACE_BYTES:] and not settled.is_finished(found.queue_offset)
            for copy_id, found in copies
        )


def _copy_id(message_id: str, place: _Place) -> str:
    """Return what the ids of all copies of a message begin with that were made for one place."""
    return f"{_start_of_id(message_id)}{place.topic.topic_id}.{place.queue_id}.{place.queue_offset}."


def _start_of_id(message_id: str) -> str:
    if len(message_id.encode()) > _ID_BYTES_MAX:
        message_id = blake2b(message_id.encode(), digest_size=16).hexdigest()
    return f"{message_id}~"
