"""Broker contract for Apache RocketMQ 5 (``PopBroker`` and ``TransactionalBroker``).

Requests that a proxy does not support are refused with ``Rule.UNSUPPORTED``: a send of several messages that are not
all normal messages of one topic. Differences from the contract:

- A send is not idempotent: two sends of one message id store two messages with that id.
- A delay is bounded (one day, unless the cluster's operators changed it), and ends up to two seconds late.
- A recall does not report the fate of the message.
- A receive waits for at least 5 s. A receive of one queue reads any queue: a proxy ignores the queue number.
- Extending an invisible duration counts as an attempt and invalidates the earlier handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import NamedTuple

from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import ROCKETMQ_GROUP, GroupSettings, Subscription, TopicRoute
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, POLLING_MS_MIN
from broker_adapter.contracts.message import Delivery, Envelope, MessageType, RecallReceipt, SendReceipt
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from broker_adapter.contracts.transactions import Check, Checker, Half, HalfReceipt, single_half
from broker_adapter.rocketmq.addresses import Name
from broker_adapter.rocketmq.codes import check, error_of
from broker_adapter.rocketmq.gathered import Gathered, GatheredSend
from broker_adapter.rocketmq.polls import PollBatch, Polls
from broker_adapter.rocketmq.proxies import CallLog, ClusterOptions, Proxies, Proxy, a_client_id, log_nothing
from broker_adapter.rocketmq.routes import ProxyRoute, Routes, place_of_message_group
from broker_adapter.rocketmq.sessions import ProxySession
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.failure_reports import REPORT, TIMEOUT_S, report_of
from broker_adapter.wire.mapping import epoch_ms, resource_of, set_duration, set_timestamp

_MARGIN_MS = 3_000  # a proxy requires the deadline of a receive to be later than its long poll
_SESSION_IDLE_S = 120.0
_SESSIONS_MAX = 10_000
_POLLS_MAX = 10_000  # distinct parameters of receives
_LEFT_MAX = 256  # above it, polls end with their last pending receive
_OF_THE_SERVER = (  # fields that the server sets
    "store_timestamp",
    "store_host",
    "receipt_handle",
    "queue_id",
    "queue_offset",
    "invisible_duration",
    "delivery_attempt",
)
_ANY_QUEUE = -1
_TRANSACTION_ID = "__transactionId__"  # property that RocketMQ leaves on committed half messages
_TYPES: Mapping[MessageType, wire.MessageType] = MappingProxyType(
    {
        MessageType.NORMAL: wire.NORMAL,
        MessageType.FIFO: wire.FIFO,
        MessageType.DELAY: wire.DELAY,
        MessageType.TRANSACTION: wire.TRANSACTION,
    }
)


class _Asked(NamedTuple):
    """Parameters of a receive. Receives with equal parameters share polls: any result serves any of them."""

    session: ProxySession
    subscription: Subscription
    batch_max: int
    invisible_ms: int
    is_renewed: bool


class RocketMQBroker:
    """Client of a cluster. Requires a running event loop; connects on first use."""

    def __init__(self, options: ClusterOptions, clock: Clock, log: CallLog = log_nothing) -> None:
        self.proxies = Proxies(options, clock, log)
        self._clock = clock
        self._numbers = 0
        self._client_id = self._next_client_id()
        self.routes = Routes(self.proxies, clock, self._client_id)
        self._producer = ProxySession(self.proxies, self._client_id, wire.PRODUCER, recover=self._recover)
        self._consumers: dict[tuple[str, str], ProxySession] = {}  # by group, and client id of a push consumer
        self._groups: dict[str, set[str]] = {}  # of push consumers, by client id
        self._used_s: dict[tuple[str, str], float] = {}
        self._gathered: dict[str, Gathered] = {}  # by topic, while it has pending sends
        self._polls: dict[_Asked, Polls] = {}  # by parameters of a receive
        self._checker: Checker | None = None
        self._reporting: set[asyncio.Task[None]] = set()
        self._background = [asyncio.ensure_future(self._beat())]

    def watch(self) -> None:
        """Monitor the proxies while no calls are made: connect at once and probe idle proxies. Call at most once."""
        self._background.append(asyncio.ensure_future(self.proxies.watch()))

    async def close(self) -> None:
        """Unregister from the cluster and close all connections."""
        ending = [*self._background, *self._reporting]
        for each in ending:
            each.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for key in list(self._consumers):
            await self._end_session(key)
        for gathered in list(self._gathered.values()):
            await gathered.close()
        await self._producer.close()
        await self.proxies.close()

    # -- the cluster --------------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """True if no proxy of the cluster answers."""
        return self.proxies.is_away

    @property
    def errors(self) -> Mapping[str, str]:
        """Failure reasons of isolated proxies, by address."""
        return self.proxies.errors

    def owns(self, handle: str) -> bool:
        """Return True if this adapter issued a receipt handle, recall handle or transaction id."""
        try:
            Name.of(handle, Rule.REQUEST)
        except Refused:
            return False
        return True

    def known_route(self, topic: str) -> TopicRoute | None:
        """Return the last route of a topic at any age, or ``None`` if there was none."""
        known = self.routes.known(topic)
        return known.as_topic_route if known is not None else None

    # -- names --------------------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRoute:
        """Implement ``PopBroker.route``. The cluster creates topics on first use if its operators enabled it."""
        return (await self.routes.of(topic)).as_topic_route

    async def ensure_group(self, group: str) -> None:
        """Implement ``PopBroker.ensure_group``. A proxy cannot create groups, so the cluster must have the group."""
        await self._ready(self._consumer(group, ""), self.proxies.choose())

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:  # noqa: ARG002 - by contract
        """Implement ``PopBroker.group_settings``: the last settings of the cluster, or RocketMQ's defaults before the
        first.
        """
        session = self._consumers.get((group, ""))
        if session is None or session.settings is None:
            return ROCKETMQ_GROUP
        policy = session.settings.backoff_policy
        delays = tuple(_ms(each) for each in policy.customized_backoff.next) or ROCKETMQ_GROUP.delays_ms
        return GroupSettings(
            session.settings.subscription.fifo, max(1, policy.max_attempts), delays, believes_clients=True
        )

    def is_known(self, kind: str, name: str) -> bool:
        """Return True if the cluster has confirmed the topic or group ``name``.

        ``kind`` is ``topics`` or ``groups``.
        """
        if kind == "topics":
            return self.routes.known(name) is not None
        session = self._consumers.get((name, ""))
        return session is not None and session.settings is not None

    # -- producing ----------------------------------------------------------------------------------------------------

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        """Implement ``PopBroker.send``, without deduplication of message ids.

        ``BrokerUnavailable`` after ``sends_max`` attempts at different proxies: each of them may have stored the
        message.
        """
        first = envelopes[0]
        if len(envelopes) > 1 and (
            any(each.topic != first.topic for each in envelopes)
            or any(each.message_type is not MessageType.NORMAL for each in envelopes)
        ):
            why = "RocketMQ accepts several messages in one send only if all are normal messages of one topic"
            raise Refused(Rule.UNSUPPORTED, why, value=f"{len(envelopes)} messages")
        now_ms = self._clock.now_ms()
        outgoing = [GatheredSend(each, _as_sent(each, now_ms)) for each in envelopes]
        if len(outgoing) > 1:
            if len({_is_packed(each) for each in outgoing}) > 1:
                why = "RocketMQ treats all messages of a send as compressed if the first one is: send them separately"
                raise Refused(Rule.MESSAGE_CORRUPTED, why, value="GZIP and IDENTITY")
            return await self._send_together(outgoing)
        if not _goes_with_others(outgoing[0]):
            return await self._send_together(outgoing)
        gathered = self._gathered.get(first.topic)
        if gathered is None:
            gathered = self._gathered[first.topic] = Gathered(self._send_together)
        try:
            return [await gathered.send(outgoing[0])]
        finally:
            if gathered.is_idle and self._gathered.get(first.topic) is gathered:
                del self._gathered[first.topic]

    async def _send_together(self, outgoing: Sequence[GatheredSend]) -> Sequence[SendReceipt]:
        first = outgoing[0].envelope
        request = wire.SendMessageRequest(messages=[each.message for each in outgoing])
        proxy, answer = await self._send(first.topic, request, message_group=first.message_group)
        if len(answer.entries) == len(outgoing):
            return [
                self._receipt(proxy, each.envelope, entry) for each, entry in zip(outgoing, answer.entries, strict=True)
            ]
        check(answer.status, proxy.address)
        if not answer.entries:
            raise BrokerUnavailable(f"{proxy.address} answered a send without a result")
        # Apache's proxy returns one entry for a whole batch, with its own id and the offset of the first message.
        offset = answer.entries[0].offset
        return [SendReceipt(each.envelope.message_id, -1, offset + number) for number, each in enumerate(outgoing)]

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        """Implement ``PopBroker.recall``. The cluster's OK does not prove that the message was still pending."""
        name = Name.of(recall_handle, Rule.REQUEST)
        request = wire.RecallMessageRequest(topic=resource_of(topic), recall_handle=name.given)
        proxy = await self._proxy_of(name, topic, Rule.REQUEST)
        answer = await self.proxies.ask(proxy, "RecallMessage", request, self._client_id)
        check(answer.status, proxy.address)
        return RecallReceipt(answer.message_id or name.message_id, self._clock.now_ms())

    # -- transactions -------------------------------------------------------------------------------------------------

    def attach(self, checker: Checker) -> None:
        """Implement ``TransactionalBroker.attach``."""
        self._checker = checker

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """Implement ``TransactionalBroker.prepare``, for one half message without a delay."""
        half = single_half(halves)
        message = _as_sent(half.envelope, self._clock.now_ms())
        message.system_properties.message_type = wire.TRANSACTION
        if half.check_after_ms:
            set_duration(message.system_properties.orphaned_transaction_recovery_duration, half.check_after_ms)
        topic = half.envelope.topic
        proxy, answer = await self._send(topic, wire.SendMessageRequest(messages=[message]), is_checked=True)
        check(answer.status, proxy.address)
        if not answer.entries:
            raise BrokerUnavailable(f"{proxy.address} answered a send without a result")
        message_id = half.envelope.message_id
        name = Name(proxy.address, self._client_id, message_id, answer.entries[0].transaction_id)
        return [HalfReceipt(message_id, str(name))]

    async def commit(self, topic: str, transaction_id: str) -> None:
        """Implement ``TransactionalBroker.commit``."""
        await self._end(topic, transaction_id, wire.COMMIT)

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """Implement ``TransactionalBroker.roll_back``."""
        await self._end(topic, transaction_id, wire.ROLLBACK)

    # -- consuming ----------------------------------------------------------------------------------------------------

    async def receive(
        self,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        """Implement ``PopBroker.receive``, with a wait of at least 5 s because of the proxies.

        If several brokers have the topic, all are polled, and the first one with messages answers. Messages received
        before a failure are returned: they are leased, and no other consumer would get them in time.

        A caller that wants a shorter wait cancels the call. Its polls continue for the next receive. A cancelled poll
        at a proxy would receive the next message and lose it, and each loss costs an attempt.
        """
        places = await self._places(subscription.topic)
        session = self._consumer(group, renew_for)
        hidden_ms = AUTO_RENEW_INVISIBLE_MS if renew_for else invisible_ms
        asked = _Asked(session, subscription._replace(queue_id=_ANY_QUEUE), batch_max, hidden_ms, bool(renew_for))
        poll_ms = max(wait_ms, POLLING_MS_MIN)
        polls = self._polls_of(asked)
        try:
            return await polls.receive(places, poll_ms)
        finally:
            if len(self._polls) > _LEFT_MAX and not polls.is_awaited:
                polls.stop()
            if polls.is_idle and self._polls.get(asked) is polls:
                del self._polls[asked]

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        """Implement ``PopBroker.ack``."""
        results: list[Exception | None] = [None] * len(receipt_handles)
        by_place: dict[tuple[str, str], list[tuple[int, Name]]] = {}
        for number, handle in enumerate(receipt_handles):
            try:
                name = Name.of(handle, Rule.RECEIPT_HANDLE)
            except Refused as error:
                results[number] = error
            else:
                by_place.setdefault((name.address, name.client_id), []).append((number, name))
        for asked in by_place.values():
            for (number, _), result in zip(
                asked, await self._ack(group, topic, [each for _, each in asked]), strict=True
            ):
                results[number] = result
        return results

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        """Implement ``PopBroker.change_invisible``. The earlier handle becomes invalid."""
        name = Name.of(receipt_handle, Rule.RECEIPT_HANDLE)
        request = wire.ChangeInvisibleDurationRequest(
            group=resource_of(group), topic=resource_of(topic), receipt_handle=name.given, message_id=name.message_id
        )
        set_duration(request.invisible_duration, invisible_ms)
        if suspend:
            request.suspend = True
        answer = await self._settle(name, topic, "ChangeInvisibleDuration", request)
        return str(name._replace(given=answer.receipt_handle)) if answer.receipt_handle else receipt_handle

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        """Implement ``PopBroker.dead_letter``. The cluster does not verify the number of attempts."""
        name = Name.of(receipt_handle, Rule.RECEIPT_HANDLE)
        request = wire.ForwardMessageToDeadLetterQueueRequest(
            group=resource_of(group),
            topic=resource_of(topic),
            receipt_handle=name.given,
            message_id=name.message_id,
            delivery_attempt=attempts,
            max_delivery_attempts=self.group_settings(group).max_attempts,
        )
        await self._settle(name, topic, "ForwardMessageToDeadLetterQueue", request)

    def report_failure(self, group: str, receipt_handle: str, error: BaseException | str) -> None:
        """Implement ``FailureReporter.report_failure``. Apache's proxies do not support the call, and it is rarely
        retried.
        """
        with suppress(Refused):
            name = Name.of(receipt_handle, Rule.RECEIPT_HANDLE)
            if not self.proxies.is_known(name.address):
                return
            proxy = self.proxies.at(name.address)
            if proxy.is_isolated or self._clock.monotonic_s() < proxy.reports_again_s:
                return
            # Start the call now, so that it precedes the call that ends the delivery on the connection.
            request, metadata = report_of(group, name.given, error), self.proxies.metadata(name.client_id)
            call = proxy.call(REPORT.name)(request, timeout=TIMEOUT_S, metadata=metadata)
            task = asyncio.ensure_future(self.proxies.report(proxy, call))
            self._reporting.add(task)
            task.add_done_callback(self._reporting.discard)

    def client_seen(self, client_id: str) -> None:
        """Implement ``PopBroker.client_seen``."""
        for group in self._groups.get(client_id, ()):
            self._used_s[group, client_id] = self._clock.monotonic_s()

    def client_gone(self, client_id: str) -> None:
        """Implement ``PopBroker.client_gone``."""
        for group in self._groups.get(client_id, ()):
            self._used_s[group, client_id] = float("-inf")

    def _receipt(self, proxy: Proxy, envelope: Envelope, entry: wire.SendResultEntry) -> SendReceipt:
        check(entry.status, proxy.address)
        if not entry.recall_handle:
            return SendReceipt(envelope.message_id, -1, entry.offset)
        handle = Name(proxy.address, self._client_id, envelope.message_id, entry.recall_handle)
        return SendReceipt(envelope.message_id, -1, -1, recall_handle=str(handle))

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _send(
        self, topic: str, request: wire.SendMessageRequest, *, message_group: str = "", is_checked: bool = False
    ) -> tuple[Proxy, wire.SendMessageResponse]:
        """Send to one proxy after another until one answers, within one request timeout after the route lookup."""
        await self.routes.of(topic)
        until_s = self._clock.monotonic_s() + self.proxies.options.request_timeout_ms / 1000
        tried: set[str] = set()
        error: BrokerError | None = None
        for attempts_left in range(self.proxies.options.sends_max, 0, -1):
            addresses = self._all_of((await self.routes.of(topic)).writable())
            if not addresses:
                raise Refused(Rule.FORBIDDEN, "the cluster allows no writes to the topic", value=topic)
            if message_group:  # no fallback to another proxy: it would break the order
                addresses = [place_of_message_group(message_group, addresses)]
            others = [each for each in addresses if each not in tried] or addresses
            proxy = self.proxies.choose(others)
            tried.add(proxy.address)
            left_ms = int((until_s - self._clock.monotonic_s()) * 1000)
            if left_ms <= 0:
                break
            if len(others) > 1:  # leave time for another proxy after a timeout
                left_ms //= attempts_left
            try:
                if is_checked:
                    await self._producer.ready(proxy, topic)
                answer = await self.proxies.ask(proxy, "SendMessage", request, self._client_id, timeout_ms=left_ms)
            except BrokerUnavailable as failure:
                error = failure
                continue
            if isinstance(found := error_of(answer.status, proxy.address), BrokerUnavailable):
                error = found
                continue
            if answer.status.code in {wire.TOPIC_NOT_FOUND, wire.FORBIDDEN}:
                self.routes.forget(topic)
            return proxy, answer
        raise error or BrokerUnavailable(f"no proxy answered a send to {topic} in time")

    async def _proxy_of(self, name: Name, topic: str, rule: Rule) -> Proxy:
        """Return the proxy of a handle.

        Handles come from clients. Connections go only to addresses in the configuration or a route.
        """
        if not self.proxies.is_known(name.address):
            for address in (await self.routes.of(topic)).addresses():
                self.proxies.at(address)
            if not self.proxies.is_known(name.address):
                raise Refused(rule, "its proxy is not one of this cluster", value=name.address)
        return self.proxies.at(name.address)

    def _all_of(self, routed: list[str]) -> list[str]:
        """Return the proxies to call: those of a route, plus the configured ones if there are several.

        A proxy may list only itself in a route. A single configured address may stand for all proxies, so it is not
        added.
        """
        named = self.proxies.options.endpoints
        return list(dict.fromkeys([*routed, *named])) if routed and len(named) > 1 else routed

    async def _end(self, topic: str, transaction_id: str, resolution: wire.TransactionResolution) -> None:
        name = Name.of(transaction_id, Rule.TRANSACTION_ID)
        request = wire.EndTransactionRequest(
            topic=resource_of(topic),
            message_id=name.message_id,
            transaction_id=name.given,
            resolution=resolution,
            source=wire.SOURCE_CLIENT,
        )
        proxy = await self._proxy_of(name, topic, Rule.TRANSACTION_ID)
        answer = await self.proxies.ask(proxy, "EndTransaction", request, self._client_id)
        check(answer.status, proxy.address)

    async def _recover(self, address: str, asked: wire.RecoverOrphanedTransactionCommand) -> None:
        if self._checker is None:
            return
        message_id = asked.message.system_properties.message_id
        name = Name(address, self._client_id, message_id, asked.transaction_id)
        number = max(1, asked.message.system_properties.delivery_attempt)
        topic = asked.message.topic.name
        await self._checker.check(Check(topic, message_id, str(name), asked.message.SerializeToString(), number))

    # -- receiving ----------------------------------------------------------------------------------------------------

    async def _places(self, topic: str) -> Sequence[str]:
        """Return the addresses of the proxies to poll."""
        route = await self.routes.of(topic)
        addresses = self._all_of(route.readable())
        if not addresses:
            raise Refused(Rule.FORBIDDEN, "the cluster allows no reads of the topic", value=topic)
        return addresses

    def _polls_of(self, asked: _Asked) -> Polls:
        polls = self._polls.get(asked)
        if polls is None:
            if len(self._polls) >= _POLLS_MAX:
                self._forget_idle_polls()
            if len(self._polls) >= _POLLS_MAX:
                raise Overloaded("too many kinds of receives wait, or their polls do", limit=_POLLS_MAX)

            async def poll(address: str, poll_ms: int) -> PollBatch:
                return await self._poll(asked, address, poll_ms)

            async def give_back(deliveries: Sequence[Delivery]) -> None:
                await self._give_back(asked.session.group, deliveries)

            polls = self._polls[asked] = Polls(poll, give_back, self._is_isolated, self._clock)
        return polls

    def _forget_idle_polls(self) -> None:
        for asked in [each for each, found in self._polls.items() if found.is_idle]:
            del self._polls[asked]

    def _is_isolated(self, address: str) -> bool:
        return self.proxies.at(address).is_isolated

    async def _poll(self, asked: _Asked, address: str, poll_ms: int) -> PollBatch:
        """Poll one proxy once."""
        session, subscription = asked.session, asked.subscription
        place, expression = self.proxies.at(address), _expression(subscription)
        await self._ready(session, place, subscription.topic, expression)
        request = wire.ReceiveMessageRequest(
            group=resource_of(session.group),
            filter_expression=expression,
            batch_size=asked.batch_max,
            auto_renew=asked.is_renewed,
        )
        request.message_queue.topic.CopyFrom(resource_of(subscription.topic))
        request.message_queue.id = _ANY_QUEUE
        request.message_queue.broker.id = 0
        if not asked.is_renewed:
            set_duration(request.invisible_duration, asked.invisible_ms)
        set_duration(request.long_polling_timeout, poll_ms)
        frames = self.proxies.frames(
            place, "ReceiveMessage", request, session.client_id, timeout_ms=poll_ms + _MARGIN_MS
        )
        route = await self.routes.of(subscription.topic)
        deliveries: list[Delivery] = []
        came_s = 0.0
        try:
            async with aclosing(frames):
                async for frame in frames:
                    content = frame.WhichOneof("content")
                    if content == "message":
                        came_s = came_s or self._clock.monotonic_s()
                        deliveries.append(_delivery(place, session.client_id, route, frame.message, asked.invisible_ms))
                    elif content == "status" and frame.status.code not in {wire.OK, wire.MESSAGE_NOT_FOUND}:
                        if frame.status.code in {wire.INTERNAL_SERVER_ERROR, wire.UNRECOGNIZED_CLIENT_TYPE}:
                            session.forget(place)  # its answer after it lost the session
                        check(frame.status, place.address)
        except BrokerError:
            if not deliveries:
                raise
        return PollBatch(deliveries, came_s)

    async def _give_back(self, group: str, deliveries: Sequence[Delivery]) -> None:
        """Release the leases of unclaimed messages. If a release fails, the lease expires by itself."""
        await asyncio.gather(
            *(self.change_invisible(group, each.topic, each.receipt_handle, 0, suspend=True) for each in deliveries),
            return_exceptions=True,
        )

    async def _end_session(self, key: tuple[str, str]) -> None:
        session = self._forget(key)
        if session is None:
            return
        for asked in [each for each in self._polls if each.session is session]:
            await self._polls.pop(asked).close()
        await session.close()

    async def _ack(self, group: str, topic: str, asked: Sequence[Name]) -> Sequence[Exception | None]:
        """Acknowledge messages that one proxy delivered to one client."""
        request = wire.AckMessageRequest(group=resource_of(group), topic=resource_of(topic))
        for name in asked:
            request.entries.add(message_id=name.message_id, receipt_handle=name.given)
        try:
            proxy = await self._proxy_of(asked[0], topic, Rule.RECEIPT_HANDLE)
        except Refused as refused:
            return [refused] * len(asked)
        answer = await self.proxies.ask(proxy, "AckMessage", request, asked[0].client_id)
        if len(answer.entries) != len(asked):
            check(answer.status, proxy.address)
            raise BrokerUnavailable(f"{proxy.address} answered {len(answer.entries)} of {len(asked)} acknowledgements")
        return [error_of(each.status, proxy.address) for each in answer.entries]

    async def _settle(self, name: Name, topic: str, rpc: str, request: object) -> wire.ChangeInvisibleDurationResponse:
        proxy = await self._proxy_of(name, topic, Rule.RECEIPT_HANDLE)
        answer: wire.ChangeInvisibleDurationResponse = await self.proxies.ask(proxy, rpc, request, name.client_id)
        check(answer.status, proxy.address)
        return answer

    def _consumer(self, group: str, renew_for: str) -> ProxySession:
        key = (group, renew_for)
        session = self._consumers.get(key)
        if session is None:
            if len(self._consumers) >= _SESSIONS_MAX:
                raise Overloaded("too many consumer groups and push consumers are in use", limit=_SESSIONS_MAX)
            kind = wire.PUSH_CONSUMER if renew_for else wire.SIMPLE_CONSUMER
            client_id = renew_for or self._next_client_id()
            session = self._consumers[key] = ProxySession(self.proxies, client_id, kind, group)
            if renew_for:
                self._groups.setdefault(renew_for, set()).add(group)
        self._used_s[key] = self._clock.monotonic_s()
        return session

    async def _ready(
        self, session: ProxySession, place: Proxy, topic: str = "", expression: wire.FilterExpression | None = None
    ) -> None:
        """Register a consumer at the proxy. A consumer that no proxy ever accepted is removed."""
        try:
            await session.ready(place, topic, expression)
        except BrokerError:
            if session.is_unknown:
                for key in ((session.group, ""), (session.group, session.client_id)):
                    if self._consumers.get(key) is session:
                        self._forget(key)
                await session.close()
            raise

    def _forget(self, key: tuple[str, str]) -> ProxySession | None:
        self._used_s.pop(key, None)
        group, client_id = key
        groups = self._groups.get(client_id, set())
        groups.discard(group)
        if not groups:
            self._groups.pop(client_id, None)
        return self._consumers.pop(key, None)

    def _next_client_id(self) -> str:
        self._numbers += 1
        return a_client_id(self._numbers)

    async def _beat(self) -> None:
        """Send heartbeats, and end consumer sessions that were idle for 120 s."""
        while True:
            await asyncio.sleep(self.proxies.options.heartbeat_ms / 1000)
            idle_since_s = self._clock.monotonic_s() - _SESSION_IDLE_S
            for key in [each for each, used_s in self._used_s.items() if used_s < idle_since_s]:
                if self._used_s.get(key, idle_since_s) < idle_since_s:  # it may have been used again meanwhile
                    await self._end_session(key)
            self._forget_idle_polls()
            await asyncio.gather(*(each.heartbeat() for each in [self._producer, *self._consumers.values()]))


def _as_sent(envelope: Envelope, now_ms: int) -> wire.Message:
    """Return the wire message of an envelope, with the envelope's fields; ``Refused(MESSAGE_CORRUPTED)``."""
    try:
        message = wire.Message.FromString(envelope.payload)
    except DecodeError:
        raise Refused(Rule.MESSAGE_CORRUPTED, "the payload is not a message", value=envelope.message_id) from None
    message.topic.Clear()
    message.topic.name = envelope.topic
    system = message.system_properties
    for name in _OF_THE_SERVER:
        system.ClearField(name)
    system.message_id = envelope.message_id
    system.message_type = _TYPES[envelope.message_type]
    if not epoch_ms(system.born_timestamp):  # a broker never checks a half message older than its files
        set_timestamp(system.born_timestamp, now_ms)
    if envelope.deliver_at_ms:
        set_timestamp(system.delivery_timestamp, envelope.deliver_at_ms)
    else:
        system.ClearField("delivery_timestamp")
    if envelope.message_group:
        system.message_group = envelope.message_group
    else:
        system.ClearField("message_group")
    return message


def _is_packed(outgoing: GatheredSend) -> bool:
    return outgoing.message.system_properties.body_encoding == wire.GZIP


def _goes_with_others(outgoing: GatheredSend) -> bool:
    """Return True if a message may share a call.

    False for messages with order or time, for retries and dead letters, and for packed bodies.
    """
    envelope = outgoing.envelope
    return (
        envelope.message_type is MessageType.NORMAL
        and not envelope.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
        and not _is_packed(outgoing)
    )


def _delivery(place: Proxy, client_id: str, route: ProxyRoute, message: wire.Message, invisible_ms: int) -> Delivery:
    system = message.system_properties
    name = Name(place.address, client_id, system.message_id, system.receipt_handle)
    delivery = Delivery(
        message.topic.name,
        system.message_id,
        b"",
        route.number_of(place.address, system.queue_id),
        system.queue_offset,
        str(name),
        max(1, system.delivery_attempt),
        invisible_ms,
        epoch_ms(system.store_timestamp),
        epoch_ms(system.delivery_timestamp),
        message_group=system.message_group,
    )
    for field in _OF_THE_SERVER:
        system.ClearField(field)
    message.user_properties.pop(_TRANSACTION_ID, None)
    return delivery._replace(payload=message.SerializeToString())


def _expression(subscription: Subscription) -> wire.FilterExpression:
    if subscription.sql:
        return wire.FilterExpression(type=wire.SQL, expression=subscription.sql)
    return wire.FilterExpression(type=wire.TAG, expression="||".join(sorted(subscription.tags)) or "*")


def _ms(duration: wire.Duration) -> int:
    return duration.seconds * 1000 + duration.nanos // 1_000_000
