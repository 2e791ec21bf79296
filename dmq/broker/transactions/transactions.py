"""Half messages from acceptance to decision: implements ``TransactionalBroker``.

    accept      a timeline row at the time of its first check
    commit      the row is withdrawn; in the same batch the message is in its queue, or pending until its delivery time
    rollback    the row is withdrawn

``dmq.broker.transactions.transaction_checks`` handles undecided half messages. The writer decides between a concurrent
commit, rollback and check; this module finds the entry, submits the op and interprets the answer. The outcome of a half
message is remembered as long as a message id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import MessageType, pack_id
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.contracts.transactions import Check, Checker, Half, HalfReceipt
from dmq.broker.handles import EntryHandle, EntryHandles, HandleKind, NotAHandle
from dmq.broker.io import look_at
from dmq.broker.message_spans import MessageSpans
from dmq.broker.sending import Placement, Sends, body_of, failure_of, wrong_type
from dmq.broker.topics import BrokerPart, SharedParts, Topic
from dmq.broker.transactions.transaction_checks import GIVEN_UP_GROUP, Checks
from dmq.config.units import format_time
from dmq.errors import MessageIdTaken, OverBound
from dmq.store.schema.keys import Family, half_body_key, half_scope
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import (
    EntryKind,
    HalfMessageState,
    HalfRow,
    Terms,
    WaitingEntry,
    decode_half,
    decode_half_body,
    encode_half,
    encode_half_body,
)
from dmq.store.schema.topics.names import PLAIN
from dmq.store.writer.operations import Delete, IfKnown, Op, Schedule, Withdraw
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

log = structlog.get_logger("dmq.broker")

_TRIES_MAX = 16  # reads of an entry that moves between two of them


class Transactions(BrokerPart):
    """Acceptance and decision of half messages. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        placement: Placement,
        checks: Checks,
        handles: EntryHandles,
        sends: Sends,
        spans: MessageSpans | None = None,
    ) -> None:
        """Create it; ``sends`` holds the quotas and counts refusals at a limit."""
        super().__init__(shared)
        self._spans = spans
        self._placement = placement
        self._checks = checks
        self._handles = handles
        self._quotas = sends.quotas
        self._on_refused = sends.count_refused
        self._checkers: list[Checker] = []
        self._loop = asyncio.get_running_loop()
        self._asking: set[asyncio.Task[None]] = set()
        self.accepted_total = 0

    def attach(self, checker: Checker) -> None:
        """As ``TransactionalBroker.attach``."""
        self._checkers.append(checker)
        self._checks.attach(is_live=self._is_live, ask=self._on_checks)

    async def close(self) -> None:
        """Stop sending checks. A counted check that was not sent is repeated in the next run."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    # -- acceptance ---------------------------------------------------------------------------------------------------

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """As ``TransactionalBroker.prepare``."""
        if self._spans is None:
            return await self._prepare(halves)
        with self._spans.of_halves([half.envelope for half in halves]):
            return await self._prepare(halves)

    async def _prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        if self._store.is_disk_low():
            self._on_refused(len(halves))
            raise Overloaded("the disk is almost full", limit="disk_low_water_bytes")
        await self._make_place_for_given_up()
        now_ms = self._clock.now_ms()
        for half in halves:
            await self._catalog.topic(half.envelope.topic)
        topics = [self._catalog.known_topic(half.envelope.topic) for half in halves]
        for topic in topics:
            if topic.message_type not in {None, MessageType.TRANSACTION}:
                raise wrong_type(topic, MessageType.TRANSACTION)
        ops: list[Op] = [self._accept(topic, half, now_ms) for topic, half in zip(topics, halves, strict=True)]
        changed, more = self._names.plan_first({topic.name: PLAIN for topic in topics})
        asked = self._quotas.ask(topics)
        try:
            if more:  # valid for other sends from now on, even if this one is refused
                self._commits.submit(more, is_urgent=False).add_done_callback(look_at)
                self._names.change_topics(changed)
            done = self._commits.submit([*ops, *asked.bounds], is_urgent=False)
        except Overloaded:
            self._quotas.give_back(asked.spent)
            self._on_refused(len(halves))
            raise
        try:
            receipts = (await self._commits.committed(done))[: len(halves)]
        except BrokerUnavailable as error:
            self._quotas.give_back(asked.spent)
            if isinstance(error.__cause__, MessageIdTaken):
                raise failure_of(error.__cause__) from None
            if not isinstance(error.__cause__, OverBound):
                raise
            self._on_refused(len(halves))
            raise self._quotas.refusal(error.__cause__, asked, self._clock.now_ms()) from None
        if asked.spent:
            self._quotas.give_back_repeated(asked, [receipt.repeated for receipt in receipts], topics)
        self.accepted_total += sum(not receipt.repeated for receipt in receipts)
        return [_receipt(self._handles, half, receipt) for half, receipt in zip(halves, receipts, strict=True)]

    async def _make_place_for_given_up(self) -> None:
        """Create the group and the dead-letter queue for undecided half messages.

        The scheduler cannot create names, so both must exist before the first half message.
        """
        if dead_letter_topic(GIVEN_UP_GROUP) not in self._names.topics or GIVEN_UP_GROUP not in self._names.groups:
            if GIVEN_UP_GROUP not in self._names.groups:
                await self._catalog.make_group(GIVEN_UP_GROUP)
            await self._catalog.topic(dead_letter_topic(GIVEN_UP_GROUP))

    def _accept(self, topic: Topic, half: Half, now_ms: int) -> Schedule:
        envelope, scope = half.envelope, half_scope(topic.topic_id)
        message_id = pack_id(envelope.message_id)
        check_ms = now_ms + (half.check_after_ms or self._checks.options.first_after_ms)
        body = body_of(envelope, message_id)
        terms = Terms(0 if half.delay_ms else envelope.deliver_at_ms, half.delay_ms)
        entry = WaitingEntry(EntryKind.TRANSACTION, 0, topic.topic_id, scope, check_ms, now_ms)
        record = encode_half(entry, HalfMessageState(terms, check_ms - now_ms, 0, len(envelope.payload)), message_id)
        event = encode_event(EventKind.HALF, topic.topic_id, 0, NO_QUEUE, 0, check_ms, message_id)
        half_body = encode_half_body(body)
        return Schedule(scope, message_id, check_ms, record, event, if_known=IfKnown.ANSWER, half_body=half_body)

    # -- decisions ----------------------------------------------------------------------------------------------------

    async def commit(self, topic: str, transaction_id: str, *, queue_id: int = -1) -> None:
        """As ``TransactionalBroker.commit``; ``queue_id`` is the target queue if the sender chose one."""
        await self._end(topic, transaction_id, EntryState.COMMITTED, partial(self._commit_op, queue_id))

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """As ``TransactionalBroker.roll_back``."""
        await self._end(topic, transaction_id, EntryState.WITHDRAWN, _roll_back_op)

    async def _end(
        self,
        topic_name: str,
        text: str,
        wanted: EntryState,
        make: Callable[[Topic, EntryHandle, bytes, HalfRow, bytes], Withdraw],
    ) -> None:
        """Decide a half message, unless it already has the same outcome."""
        transaction = _decode(self._handles, text)
        if transaction.topic != topic_name:
            why = f"it is of a message of topic {transaction.topic!r}"
            raise Refused(Rule.TRANSACTION_ID, why, value=topic_name)
        topic = self._catalog.known_topic(topic_name)
        is_durable = False  # whether the last read is durable
        for _ in range(_TRIES_MAX):
            found, value = await self._reader.entry(half_scope(topic.topic_id), transaction.message_id)
            if found is not None and found.sequence != transaction.sequence:
                found = None  # a later message with the same id; the outcome of the handle's message is forgotten
            if found is not None and found.state is EntryState.WAITING:
                if value is None:
                    continue
                half = decode_half(value)
                body = half.body
                if body is None and wanted is EntryState.COMMITTED:
                    (row,) = await self._reader.values(Family.TIMELINE, [half_body_key(found.sequence)])
                    if row is None:  # decided in the meantime
                        continue
                    body = decode_half_body(row)
                op = make(topic, transaction, found.key, half, body or b"")
                told = (await self._commits.commit([op]))[0]
                if told.state is EntryState.WITHDRAWN:
                    return
            elif is_durable:
                _answer(found, wanted)
                return
            # The read may be neither durable nor final, because the entry may have been moving between two rows. After
            # this unit it is both.
            await self._commits.flush()
            is_durable = True
        raise BrokerUnavailable("the half message changes too often; repeat the call")

    def _commit_op(
        self, queue_id: int, topic: Topic, transaction: EntryHandle, key: bytes, half: HalfRow, body: bytes
    ) -> Withdraw:
        entry, terms = half.entry, half.vigil.terms
        now_ms = self._clock.now_ms()
        deliver_at_ms = min(now_ms + terms.delay_ms, DELIVER_AT_MS_MAX) if terms.delay_ms else terms.deliver_at_ms
        message = self._placement.put(
            topic,
            transaction.message_id,
            "",
            body,
            deliver_at_ms,
            now_ms,
            is_relative=bool(terms.delay_ms),
            queue_id=queue_id,
        )
        event = encode_event(
            EventKind.COMMITTED, topic.topic_id, 0, NO_QUEUE, entry.retry_count, deliver_at_ms, transaction.message_id
        )
        return Withdraw(
            key,
            entry.scope,
            transaction.message_id,
            entry.deliver_at_ms,
            half.size,
            (message, _drop_body(transaction)),
            event,
            is_remembered=True,
            outcome=EntryState.COMMITTED,
        )

    # -- checks -------------------------------------------------------------------------------------------------------

    def _is_live(self, topic: str) -> bool:
        return any(checker.is_live(topic) for checker in self._checkers)

    async def _is_asked(self, check: Check) -> bool:
        for checker in self._checkers:
            if await checker.check(check):
                return True
        return False

    def _on_checks(self, checks: list[Check]) -> None:
        """Pass checks from the scheduler's thread to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._ask, checks)
        except RuntimeError:  # the loop is closed; the next run repeats the checks
            return

    def _ask(self, checks: list[Check]) -> None:
        by_topic: dict[str, list[Check]] = {}
        for check in checks:
            by_topic.setdefault(check.topic, []).append(check)
        for some in by_topic.values():
            task = self._loop.create_task(self._ask_for(some), name="dmq-transaction-checks")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask_for(self, checks: Sequence[Check]) -> None:
        for check in checks:
            is_asked = False
            try:
                is_asked = await self._is_asked(check)
            except Exception:  # one failed check must not stop the others
                log.exception("transaction_check_failed", topic=check.topic, message_id=check.message_id)
            finally:
                self._checks.settled(check)
            if not is_asked:  # its producers have just left, or do not read their stream
                log.info("transaction_check_unsent", topic=check.topic, message_id=check.message_id, check=check.number)


def _decode(handles: EntryHandles, text: str) -> EntryHandle:
    try:
        return handles.decode(HandleKind.TRANSACTION, text)
    except NotAHandle as error:
        known = "it is not one of this store, or from before a restore, or cut short"
        why = known if text.strip() else "transaction id cannot be empty"
        raise Refused(Rule.TRANSACTION_ID, why, value=text) from error


def _roll_back_op(topic: Topic, transaction: EntryHandle, key: bytes, half: HalfRow, _body: bytes) -> Withdraw:
    entry, message_id = half.entry, transaction.message_id
    event = encode_event(EventKind.ROLLED_BACK, topic.topic_id, 0, NO_QUEUE, entry.retry_count, 0, message_id)
    return Withdraw(
        *(key, entry.scope, message_id, entry.deliver_at_ms, half.size),
        instead=(_drop_body(transaction),),
        event=event,
        is_remembered=True,
    )


def _drop_body(transaction: EntryHandle) -> Delete:
    return Delete(Family.TIMELINE, half_body_key(transaction.sequence))


def _receipt(handles: EntryHandles, half: Half, receipt: Receipt) -> HalfReceipt:
    envelope = half.envelope
    transaction = EntryHandle(receipt.sequence, envelope.topic, pack_id(envelope.message_id))
    ended = ""
    if receipt.state not in {EntryState.WAITING, EntryState.COMMITTED}:
        ended = _ended(receipt)
    text = handles.encode(HandleKind.TRANSACTION, transaction)
    return HalfReceipt(envelope.message_id, text, receipt.repeated, ended)


def _answer(found: Receipt | None, wanted: EntryState) -> None:
    """Raise ``Refused`` unless an ended half message has the outcome ``wanted``.

    Never use "not found": the Node client treats that code as success.
    """
    if found is None:
        why = "nothing is known of the transaction: it ended longer ago than ends are remembered, or never began here"
        raise Refused(Rule.TRANSACTION_ID, why)
    if found.state is not wanted:
        raise Refused(Rule.TRANSACTION_ID, f"the transaction {_ended(found)}")


def _ended(found: Receipt) -> str:
    at = format_time(found.at_ms)
    if found.state is EntryState.COMMITTED:
        return f"was committed at {at}"
    if found.state is EntryState.WITHDRAWN:
        return f"was rolled back at {at}"
    place = f"{dead_letter_topic(GIVEN_UP_GROUP)}, offset {found.queue_offset}"
    return f"was given up at {at}, because no producer decided it: see {place}"
