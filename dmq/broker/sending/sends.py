"""Path of a send from the envelope to the receipt, without a coroutine of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import Envelope, SendReceipt, unpack_id
from dmq.broker.handles import EntryHandle, EntryHandles, HandleKind
from dmq.broker.io import refusal_of
from dmq.broker.limits import SendQuotas
from dmq.broker.sending.placement import Placement, wrong_type
from dmq.broker.topics import BrokerPart, SharedParts, Topic
from dmq.errors import MessageIdTaken, OverBound, StoreError
from dmq.metrics.counting import TopicCounts
from dmq.store.schema.messages.index import EntryState
from dmq.store.schema.messages.index import Receipt as Stored
from dmq.store.schema.topics.names import GROUPED, PLAIN, TopicQuotas
from dmq.store.writer.operations import Append, Emit, Schedule
from dmq.store.writer.writer import LoopUnit, Unit

Note = Callable[[Topic, Envelope], bytes]  # an encoded audit event
RECALL = HandleKind.RECALL  # enum members, looked up once
QUEUED, WITHDRAWN, ABSORBED = EntryState.QUEUED, EntryState.WITHDRAWN, EntryState.ABSORBED


class Sends(BrokerPart):
    """Sends of messages to topics, and their counters. It belongs to the event loop."""

    def __init__(self, shared: SharedParts, placement: Placement, handles: EntryHandles, quotas: TopicQuotas) -> None:
        super().__init__(shared)
        self.accepted = TopicCounts()  # messages, without repeated and absorbed ones
        self.repeated_total = 0
        self.refused_total = 0  # by a quota, low disk space or a busy store
        self._placement = placement
        self._handles = handles
        self.quotas = SendQuotas(self._names, self._clock, quotas)

    @property
    def accepted_total(self) -> int:
        """Number of accepted messages of all topics."""
        return self.accepted.total

    def count_refused(self, messages: int) -> None:
        """Count messages that another path refused at a limit."""
        self.refused_total += messages

    def send(
        self, envelopes: Sequence[Envelope], note: Note | None = None, *, is_spent: bool = False
    ) -> Deferred[Sequence[SendReceipt]]:
        """As ``PopBroker.send``. The event that ``note`` returns for each message is recorded with it, also for a known
        id.

        No quota applies to a send with a note, because it was accepted elsewhere. No quota applies with ``is_spent``
        either: the caller has spent the rate, and all messages are due now.
        """
        is_free = is_spent or note is not None
        if self._store.is_disk_low():
            self.refused_total += len(envelopes)
            raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
        topics = self._names.topics
        if len(envelopes) == 1 and note is None and not self.quotas.may_refuse:
            (envelope,) = envelopes
            topic = topics.get(envelope.topic)
            holds = GROUPED if envelope.message_group else PLAIN
            if topic is not None and topic.message_type is None and topic.holds & holds:
                return self._send_one(topic, envelope)
        for envelope in envelopes:
            if envelope.topic not in topics:
                return Deferred.of(self._send_to_new(envelopes, note, is_free=is_free))
        return self._send(envelopes, note, is_free=is_free)

    def _send_one(self, topic: Topic, envelope: Envelope) -> Deferred[Sequence[SendReceipt]]:
        """As ``_send``, for the most frequent case: one message that only a full store can refuse."""
        op = self._placement.accept(topic, envelope, self._clock.now_ms())
        sent = _OneSent(self, self._handles, envelope, op)
        try:
            self._store.send(op, sent.committed)
        except StoreError as error:
            raise self._not_accepted(error, 1) from error
        return sent

    def _not_accepted(self, error: StoreError, messages: int) -> BrokerError:
        refusal = refusal_of(error)
        if isinstance(refusal, Overloaded):
            self.refused_total += messages
        return refusal

    async def _send_to_new(
        self, envelopes: Sequence[Envelope], note: Note | None, *, is_free: bool
    ) -> Sequence[SendReceipt]:
        for envelope in envelopes:
            if envelope.topic not in self._names.topics:
                await self._catalog.topic(envelope.topic)
        return await self._send(envelopes, note, is_free=is_free)

    def _send(
        self, envelopes: Sequence[Envelope], note: Note | None, *, is_free: bool
    ) -> Deferred[Sequence[SendReceipt]]:
        topics = self._names.topics
        now_ms = self._clock.now_ms()
        ops: list[Schedule | Append] = []
        sent_to: list[Topic] = []
        taken: dict[str, int] = {}
        for envelope in envelopes:  # refuse topics removed meanwhile
            topic = topics.get(envelope.topic) or self._catalog.known_topic(envelope.topic)
            if topic.message_type is not None and topic.message_type is not envelope.message_type:
                raise wrong_type(topic, envelope.message_type)
            holds = GROUPED if envelope.message_group else PLAIN
            if not topic.holds & holds:
                taken[topic.name] = taken.get(topic.name, 0) | holds
            ops.append(self._placement.accept(topic, envelope, now_ms))
            sent_to.append(topic)
        quotas = self.quotas
        asked = quotas.ask(() if is_free else sent_to)
        changed, more = self._names.plan_first(taken) if taken else ([], [])
        notes = [Emit(note(topics[each.topic], each)) for each in envelopes] if note is not None else []
        sent: Deferred[Sequence[SendReceipt]] = Deferred()

        def settle(unit: Unit) -> None:
            if unit.error is not None:
                quotas.give_back(asked.spent)
                if isinstance(unit.error, OverBound):
                    self.refused_total += len(envelopes)
                    sent.fail(quotas.refusal(unit.error, asked, self._clock.now_ms()))
                else:
                    sent.fail(failure_of(unit.error))
                return
            receipts, repeated = _receipts(self._handles, envelopes, ops, unit.receipts)
            if repeated and asked.spent:
                quotas.give_back_repeated(asked, [receipt.repeated for receipt in receipts], sent_to)
            self.repeated_total += repeated
            told = zip(envelopes, unit.receipts, strict=False)
            new = Counter(each.topic for each, stored in told if not stored.repeated and stored.state is not ABSORBED)
            for name, count in new.items():
                self.accepted.add(name, count)
            sent.settle(receipts)

        try:
            if more:  # valid for other sends from now on, even if this one is refused
                self._store.submit(LoopUnit(more))
                self._names.change_topics(changed)
            self._store.submit(LoopUnit([*ops, *notes, *asked.bounds], settle))
        except StoreError as error:
            refusal = self._not_accepted(error, len(envelopes))
            if isinstance(refusal, Overloaded):
                quotas.give_back(asked.spent)
            raise refusal from error
        return sent


class _OneSent(Deferred[Sequence[SendReceipt]]):
    """Deferred receipt of a message that is sent alone."""

    __slots__ = ("_envelope", "_handles", "_op", "_sends")

    def __init__(self, sends: Sends, handles: EntryHandles, envelope: Envelope, op: Schedule | Append) -> None:
        super().__init__()
        self._sends = sends
        self._handles = handles
        self._envelope = envelope
        self._op = op

    def committed(self, stored: Stored | None, error: StoreError | None) -> None:
        """Settle the receipt once the message is durable or the store has failed."""
        if stored is None:
            self.fail(failure_of(error))
            return
        if stored.repeated:
            self._sends.repeated_total += 1
        elif stored.state is not ABSORBED:
            self._sends.accepted.add(self._envelope.topic)
        self.settle([_receipt(self._handles, self._envelope, self._op, stored)])


def failure_of(error: StoreError | None) -> BrokerError:
    """Return the broker error for a send that the store refused with ``error``."""
    if not isinstance(error, MessageIdTaken):
        return BrokerUnavailable(str(error))
    other = "a half message" if error.by_half else "a message that is no half message"
    why = f"the topic has {other} with this id: send this one under a new id"
    return Refused(Rule.MESSAGE_ID, why, value=unpack_id(error.message_id))


def _receipts(
    handles: EntryHandles, envelopes: Sequence[Envelope], ops: Sequence[Schedule | Append], stored: Sequence[Stored]
) -> tuple[list[SendReceipt], int]:
    """Return the receipts of a send, and the number of repeated messages."""
    receipts: list[SendReceipt] = []
    repeated = 0
    for envelope, op, told in zip(envelopes, ops, stored, strict=False):
        receipts.append(_receipt(handles, envelope, op, told))
        repeated += told.repeated
    return receipts, repeated


def _receipt(handles: EntryHandles, envelope: Envelope, op: Schedule | Append, stored: Stored) -> SendReceipt:
    message_id = envelope.message_id
    state, _, queue_id, queue_offset, at_ms, repeated, _ = stored
    if state is QUEUED:
        return SendReceipt(message_id, queue_id, queue_offset, repeated)
    if state is WITHDRAWN:
        return SendReceipt(message_id, -1, -1, repeated, recalled_at_ms=at_ms)
    packed_id = op.message_id
    if state is ABSORBED:  # answer with the message that was pending when this one arrived
        packed_id = stored.instead
        message_id = unpack_id(packed_id)
    handle = handles.encode(RECALL, EntryHandle(stored.sequence, envelope.topic, packed_id))
    return SendReceipt(message_id, queue_id, queue_offset, repeated, handle)
