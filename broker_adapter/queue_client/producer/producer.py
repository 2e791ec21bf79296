"""Producer that sends messages to the queues of a cluster as RocketMQ's producers do."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from broker_adapter.contracts.classic import (
    ClassicBroker,
    Decision,
    Outgoing,
    QueueReceipt,
    ReceivedMessage,
    SendStatus,
    TransactionCheck,
)
from broker_adapter.contracts.errors import BrokerAway, BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX, DELAY_LEVELS_MS
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import check_group, check_topic
from broker_adapter.queue_client import Membership
from broker_adapter.queue_client.balance import (
    RULES_4,
    RULES_5,
    Environments,
    FaultTable,
    RoundRobin,
    avoiding_faults,
    avoiding_faults_4,
    by_hash,
    in_turn,
)
from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.runtime.log import LibraryLog
from broker_adapter.runtime.trace_context import TRACEPARENT, current_traceparent

# Result codes for which another broker may succeed; RocketMQ 5.5 (retryResponseCodes).
_CODES_TO_RETRY = frozenset({1, 2, 14, 16, 17, 204, 205, 1500})
_DEFAULT_TOPIC = "TBW102"  # brokers with topic auto-creation have it, and its route lists them
_DEFAULT_TOPIC_QUEUES = 4  # RocketMQ 5.5 default (defaultTopicQueueNums)

_log = LibraryLog("broker_adapter.queue_client.producer")

Chooser: TypeAlias = Callable[[Sequence[MessageQueue]], MessageQueue]
Checker: TypeAlias = Callable[[ReceivedMessage], Awaitable[Decision]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """Options of a producer; defaults are those of RocketMQ 5.5 unless a comment states otherwise."""

    attempts_max: int = 3  # retryTimesWhenSendFailed + 1
    timeout_ms: int = 3_000  # of all attempts together (sendMsgTimeout)
    attempt_timeout_ms: int | None = None  # of each of them (sendMsgMaxTimeoutPerRequest)
    resend_unsafe: bool = False  # to another broker, if stored but not yet on the disk or at a replica
    fault_avoidance: bool = False  # pause slow and failing brokers (sendLatencyFaultEnable)
    as_4: bool = False  # with fault avoidance: the tables and the choice of 4.x, minutes instead of seconds
    environment: str = ""  # send to its queues only
    environments: Environments | None = None

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or self.timeout_ms < 1:
            raise ValueError(
                f"attempts_max and timeout_ms must be 1 or more; got {self.attempts_max}, {self.timeout_ms}"
            )
        if bool(self.environment) != (self.environments is not None):
            raise ValueError("environment and environments require each other")


class TransactionReceipt(NamedTuple):
    """Receipt of a half message, and the decision of its transaction as far as this process has it."""

    receipt: QueueReceipt
    decision: Decision


_DEFAULTS = ProducerOptions()


class Producer:
    """Producer of a group, until it is closed. Belongs to one event loop; safe for concurrent calls.

    A send that raises may have stored the message, except for ``Refused`` or ``Overloaded``. Repeat it with the same
    message id: consumers and the audit detect repetitions by it.
    """

    def __init__(
        self,
        membership: Membership,
        group: str,
        options: ProducerOptions = _DEFAULTS,
        *,
        on_check: Checker | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """Store the options.

        ``on_check`` returns the decision of a transaction of an earlier run; without it those stay undecided.
        """
        self.group = check_group(group)
        self.loop: asyncio.AbstractEventLoop | None = None  # event loop of its calls, set by ``start``
        self._membership = membership
        self._options = options
        self._on_check = on_check
        self._clock = clock or SystemClock()
        random = random or Random()
        self._turn = RoundRobin(random)
        self.faults = FaultTable(RULES_4 if options.as_4 else RULES_5, random)
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def left_alone(self) -> Mapping[str, int]:
        """Slow or failed brokers, with the remaining pause of each in milliseconds.

        The state is local to this process; empty without fault avoidance.
        """
        if not self._options.fault_avoidance:
            return {}
        now_ms = self._now_ms()
        left_ms = {broker: each.available_at_ms - now_ms for broker, each in sorted(self.faults.brokers.items())}
        return {broker: each for broker, each in left_ms.items() if each > 0}

    async def start(self) -> None:
        """Register the group at the brokers. ``GroupTaken``."""
        self.loop = asyncio.get_running_loop()
        await self._membership.add_producer(self.group, self._check)

    async def close(self) -> None:
        """Cancel pending transaction checks and leave the group."""
        for task in self._checks:
            task.cancel()
        await self._membership.remove_producer(self.group)

    async def send(
        self,
        message: Message,
        *,
        delay_level: int = 0,
        since_ms: int = 0,
        choose: Chooser | None = None,
        timeout_ms: int | None = None,
    ) -> QueueReceipt:
        """Store a message in a queue of its topic, with the durability that the broker is configured for.

        ``delay_level`` is 1 to 18 and takes precedence over ``message.deliver_at_ms``. It counts from now. For a
        repeated send it counts from ``since_ms`` (epoch milliseconds, by RocketMQ's table of levels): the message then
        has a delivery time, or at brokers without delivery times the lowest level that is not too early.

        If ``choose`` or a message group determines the queue, there is one attempt. Otherwise each further attempt goes
        to another broker. Raises ``Refused``, ``Overloaded`` or ``BrokerUnavailable`` of the last attempt. Its cause is
        the error of an earlier attempt that may have stored the message.
        """
        if not 0 <= delay_level <= len(DELAY_LEVELS_MS):
            limit = f"1 to {len(DELAY_LEVELS_MS)}"
            raise Refused(Rule.DELIVERY_TIME, "unknown delay level", value=delay_level, limit=limit)
        message = self._named(message)
        if delay_level and since_ms:
            since_ms = min(since_ms, self._clock.now_ms())  # the clock may have been set back
            return await self._send_again(message, since_ms + DELAY_LEVELS_MS[delay_level - 1], choose, timeout_ms)
        return await self._send(Outgoing(message=message, delay_level=delay_level), choose, timeout_ms)

    async def send_one_way(self, message: Message, *, delay_level: int = 0, choose: Chooser | None = None) -> None:
        """Write a message to the connection without waiting for an answer: it may be lost without an error."""
        message = self._named(message)
        queues = await self._writable(message.topic)
        queue = self._chosen(queues, message, choose) or in_turn(queues, self._turn)
        outgoing = Outgoing(message=message, delay_level=delay_level)
        await self._broker.send(self.group, queue, [outgoing], timeout_ms=self._options.timeout_ms, one_way=True)

    async def send_batch(self, messages: Sequence[Message], *, timeout_ms: int | None = None) -> QueueReceipt:
        """Store messages of one topic in one queue, all or none. Delayed messages are ``Refused``, as in RocketMQ."""
        if not messages or len({each.topic for each in messages}) > 1:
            raise Refused(
                Rule.REQUEST, "a batch cannot have messages of several topics", value=len(messages), limit="1 or more"
            )
        if any(each.deliver_at_ms for each in messages):
            raise Refused(Rule.DELIVERY_TIME, "messages of a batch cannot be delayed: send them one by one")
        batch = [Outgoing(message=self._named(each)) for each in messages]
        if sum(len(each.message.body) for each in batch) > BODY_BYTES_MAX:
            size = sum(len(each.message.body) for each in batch)
            raise Refused(Rule.BODY_SIZE, "the batch is too large", value=size, limit=f"{BODY_BYTES_MAX} bytes")
        return await self._attempts(batch, None, timeout_ms)

    async def send_in_transaction(
        self, message: Message, execute: Callable[[Message], Awaitable[Decision]]
    ) -> TransactionReceipt:
        """Store a half message, invisible to consumers, call ``execute``, and report its decision to the broker.

        An exception of ``execute`` leaves the decision unknown: the broker later calls ``on_check``, repeatedly.
        """
        message = self._named(message)
        receipt = await self.send_half(message)
        try:
            decision = await execute(message)
        except Exception as error:  # noqa: BLE001 - raised by the application
            _log.warning(
                "transaction_undecided", message_id=message.message_id, error=f"{type(error).__name__}: {error}"
            )
            decision = Decision.UNKNOWN
        try:
            await self._broker.end_transaction(self.group, receipt, decision)
        except BrokerError as error:
            _log.warning("transaction_end_failed", message_id=message.message_id, error=str(error))
        return TransactionReceipt(receipt, decision)

    async def send_half(self, message: Message, system: Mapping[str, str] = MappingProxyType({})) -> QueueReceipt:
        """Store a half message, for callers that report the decision to the broker themselves.

        ``system`` are additional RocketMQ system properties, by their RocketMQ names.
        """
        return await self._send(Outgoing(message=self._named(message), is_half=True, system=system), None, None)

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Recall a delayed message by the handle of its receipt; return its id."""
        return await self._broker.recall(check_topic(topic), recall_handle)

    async def _send_again(
        self, message: Message, due_at_ms: int, choose: Chooser | None, timeout_ms: int | None
    ) -> QueueReceipt:
        """Send a message that had a delay level, due at ``due_at_ms``."""
        left_ms = due_at_ms - self._clock.now_ms()
        message = replace(message, deliver_at_ms=due_at_ms if left_ms > 0 else 0)
        try:
            return await self._send(Outgoing(message=message), choose, timeout_ms)
        except Refused as refused:
            if refused.rule is not Rule.UNSUPPORTED or left_ms <= 0:
                raise
        level = bisect_left(DELAY_LEVELS_MS, left_ms) + 1
        return await self._send(Outgoing(message=message, delay_level=level), choose, timeout_ms)

    # -- one send ---------------------------------------------------------------------------------------------------

    @property
    def _broker(self) -> ClassicBroker:
        return self._membership.broker

    async def _send(self, outgoing: Outgoing, choose: Chooser | None, timeout_ms: int | None) -> QueueReceipt:
        return await self._attempts([outgoing], choose, timeout_ms)

    async def _attempts(
        self, messages: Sequence[Outgoing], choose: Chooser | None, timeout_ms: int | None
    ) -> QueueReceipt:
        budget_ms = self._options.timeout_ms if timeout_ms is None else timeout_ms
        until_ms, whole_ms = self._now_ms() + budget_ms, self._options.attempt_timeout_ms or budget_ms
        first = messages[0].message
        queues = await self._writable(first.topic)
        fixed = self._chosen(queues, first, choose)
        failure: BrokerError | None = None
        doubt: BrokerError | None = None
        stored: QueueReceipt | None = None
        last_broker = ""
        for attempt in range(1 if fixed else self._options.attempts_max):
            left_ms = until_ms - self._now_ms()
            if left_ms <= 0:
                break
            queue = fixed or self._next(queues, last_broker, is_repeated=attempt > 0)
            last_broker = queue.broker
            try:
                receipt = await self._attempt(queue, messages, min(left_ms, whole_ms), whole_ms)
            except BrokerError as error:
                doubt = failure if _is_in_doubt(failure) else doubt
                failure = error
                if not _may_retry(error):
                    break
                continue
            stored = stored or receipt
            if receipt.status is SendStatus.STORED or not self._options.resend_unsafe:
                return receipt
        if stored is not None:
            return stored
        raise failure or BrokerAway(f"no attempt to send to {first.topic} within {budget_ms} ms") from doubt

    async def _attempt(
        self, queue: MessageQueue, messages: Sequence[Outgoing], timeout_ms: int, whole_ms: int
    ) -> QueueReceipt:
        """Make one attempt. A timeout with less than half of ``whole_ms`` left does not count as a failure of the
        broker.

        An earlier attempt used up the time. RocketMQ's producers pause both brokers in this case, which has the effect
        of pausing neither.
        """
        begun_ms = self._now_ms()
        failed = True
        try:
            receipt = await self._broker.send(self.group, queue, messages, timeout_ms=timeout_ms)
            failed = False
        except Refused as refused:
            failed = refused.code in _CODES_TO_RETRY
            raise
        finally:
            had_no_time = timeout_ms < whole_ms / 2 and self._now_ms() - begun_ms >= timeout_ms
            self._note(queue.broker, begun_ms, failed=failed and not had_no_time)
        return receipt

    def _note(self, broker: str, begun_ms: int, *, failed: bool) -> None:
        now_ms = self._now_ms()
        was_available = self.faults.is_available(broker, now_ms)
        self.faults.note(broker, now_ms - begun_ms, now_ms, failed=failed)
        if was_available and (for_ms := self.left_alone.get(broker, 0)):
            _log.warning("broker_avoided", broker=broker, for_ms=for_ms, latency_ms=now_ms - begun_ms, failed=failed)

    def _next(self, queues: Sequence[MessageQueue], last_broker: str, *, is_repeated: bool) -> MessageQueue:
        if not self._options.fault_avoidance:
            return in_turn(queues, self._turn, last_broker=last_broker)
        if self._options.as_4:
            return avoiding_faults_4(queues, self.faults, self._turn, self._now_ms(), last_broker=last_broker)
        if is_repeated:
            self._turn.restart()
        return avoiding_faults(queues, self.faults, self._turn, self._now_ms(), last_broker=last_broker)

    def _chosen(self, queues: Sequence[MessageQueue], message: Message, choose: Chooser | None) -> MessageQueue | None:
        if choose is not None:
            if queues[0].queue_id < 0:
                why = "this broker chooses the queue: use a message_group instead of choose"
                raise Refused(Rule.UNSUPPORTED, why)
            return choose(queues)
        return by_hash(queues, message.message_group) if message.message_group else None

    async def _writable(self, topic: str) -> Sequence[MessageQueue]:
        check_topic(topic)
        try:
            queues: Sequence[MessageQueue] = (await self._membership.route(topic)).writable
        except Refused as refused:
            if refused.rule is not Rule.TOPIC_UNKNOWN:
                raise
            queues = await self._where_topics_are_made(topic, refused)
        if not queues:
            raise BrokerAway(f"topic {topic} has no queue that can be written to: none of its brokers has a master now")
        if self._options.environments is not None:
            return self._options.environments.queues_of(self._options.environment, queues)
        return queues

    async def _where_topics_are_made(self, topic: str, unknown: Refused) -> Sequence[MessageQueue]:
        """Return the future queues of an unknown topic: its broker creates it with the first message."""
        try:
            made = await self._membership.route(_DEFAULT_TOPIC)
        except Refused:
            raise unknown from None
        numbers = range(_DEFAULT_TOPIC_QUEUES)
        return [MessageQueue(topic, each.broker, each.queue_id) for each in made.writable if each.queue_id in numbers]

    def _named(self, message: Message) -> Message:
        """Return the message with an id, its time, and the trace context of the caller unless it has one."""
        if TRACEPARENT not in message.properties and (context := current_traceparent()):
            message = replace(message, properties={**message.properties, TRACEPARENT: context})
        if message.message_id and message.born_at_ms:
            return message
        now_ms = self._clock.now_ms()
        return replace(
            message,
            message_id=message.message_id or new_message_id(now_ms, os.getpid(), os.urandom(10)),
            born_at_ms=message.born_at_ms or now_ms,
        )

    # -- transactions -----------------------------------------------------------------------------------------------

    def _check(self, check: TransactionCheck) -> None:
        task = asyncio.ensure_future(self._decide(check))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _decide(self, check: TransactionCheck) -> None:
        message_id = check.message.message.message_id
        if self._on_check is None:
            _log.warning("transaction_check_unanswered", message_id=message_id, what="pass on_check to the producer")
            return
        try:
            decision = await self._on_check(check.message)
            receipt = QueueReceipt(
                SendStatus.STORED,
                message_id,
                check.message.queue,
                check.message.queue_offset,
                check.message.offset_id,
                check.transaction_id,
            )
            await self._broker.end_transaction(self.group, receipt, decision, check=check)
        except Exception as error:  # noqa: BLE001 - the broker checks again
            _log.warning("transaction_undecided", message_id=message_id, error=f"{type(error).__name__}: {error}")

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)


def _may_retry(error: BrokerError) -> bool:
    code = getattr(error, "code", 0)
    if isinstance(error, Refused | Overloaded):
        return code in _CODES_TO_RETRY
    return not code or code in _CODES_TO_RETRY


def _is_in_doubt(error: BrokerError | None) -> bool:
    return isinstance(error, BrokerUnavailable) and not isinstance(error, BrokerAway)
