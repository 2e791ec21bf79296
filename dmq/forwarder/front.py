"""The broker that clients meet in front of a cluster: what must wait is kept here, everything else is passed on.

kept here       what is delayed, until it is due; what the cluster does not take now, if sends are accepted meanwhile;
                and what belongs to a message group of which something is here already
passed on       all other sends, transactions, receives and what becomes of them, groups, routes
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from broker_adapter.adapter import GroupSettings, Subscription, TopicRoute
from broker_adapter.deferred import Deferred
from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.limits import POLLING_MS_MIN, QUEUES_PER_TOPIC_DEFAULT
from broker_adapter.message import Delivery, Envelope, MessageType, RecallReceipt, SendReceipt, pack_id
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.rocketmq.addresses import Name
from broker_adapter.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from broker_adapter.transactions import Checker, Half, HalfReceipt
from dmq.audit.events import NO_QUEUE, EventKind, encode_event
from dmq.embedded.broker import EmbeddedBroker
from dmq.embedded.names import Topic
from dmq.forwarder.forwarder import Forwarder
from dmq.forwarder.lane import forwarded_type

_UNSURE_MAX = 10_000
_DERIVED = (DEAD_LETTER_PREFIX, RETRY_PREFIX)


class ClusterFront:
    """Fits ``PopBroker`` and ``TransactionalBroker``. Belongs to the event loop."""

    def __init__(
        self,
        local: EmbeddedBroker,
        cluster: RocketMQBroker,
        forwarder: Forwarder,
        *,
        accepts_while_away: bool,
        timeout_ms: int,
    ) -> None:
        self.kept_total = 0
        self.on_group_changed: Callable[[str], None] = lambda _: None
        self._local = local
        self._cluster = cluster
        self._forwarder = forwarder
        self._accepts_while_away = accepts_while_away
        self._timeout_s = timeout_ms / 1000
        self._unsure: set[str] = set()  # groups that were told defaults while nobody could be asked

    @property
    def is_away(self) -> bool:
        """Whether no proxy of the cluster answers."""
        return self._cluster.proxies.is_away

    # -- names --------------------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRoute:
        """As ``PopBroker.route``: what the cluster says, or said last; without it, one that takes everything."""
        known = self._cluster.routes.known(topic)
        if self.is_away and known is not None:
            return _with_delays(known.as_topic_route)
        try:
            return _with_delays(await self._cluster.route(topic))
        except BrokerUnavailable:
            if not self._accepts_while_away:
                raise
            return TopicRoute(topic, QUEUES_PER_TOPIC_DEFAULT)

    async def ensure_group(self, group: str) -> None:
        """As ``PopBroker.ensure_group``; while the cluster is away a consumer may begin all the same, and wait."""
        try:
            if not self.is_away:
                await self._cluster.ensure_group(group)
        except BrokerUnavailable:
            pass
        if self.is_away:
            if len(self._unsure) < _UNSURE_MAX:
                self._unsure.add(group)
            return
        if group in self._unsure:
            self._unsure.discard(group)
            self.on_group_changed(group)

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        """As ``PopBroker.group_settings``."""
        return self._cluster.group_settings(group, topics)

    def is_known(self, kind: str, name: str) -> bool:
        """As ``Catalog.is_known``: what the cluster has, or what waits for it, is not made by using it."""
        if self._cluster.is_known(kind, name) or self._local.catalog.is_known(kind, name):
            return True
        return kind == "groups" and name in self._unsure

    # -- producing ----------------------------------------------------------------------------------------------------

    def send(self, envelopes: Sequence[Envelope]) -> Awaitable[Sequence[SendReceipt]]:
        """As ``PopBroker.send``: durable here, or at the cluster."""
        if not any(each.deliver_at_ms for each in envelopes):
            return self._pass_on(envelopes)
        for each in envelopes:
            if each.deliver_at_ms and each.topic.startswith(_DERIVED):
                raise Refused(Rule.TOPIC, "retries and dead letters cannot be delayed", value=each.topic)
        for each in envelopes:
            route = self._cluster.routes.known(each.topic)
            if route is None:
                return Deferred.of(self._keep_new(envelopes))
            _check_delay(each, route.types)
        return self._local.send(envelopes)

    async def _keep_new(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        """Keep what is delayed, of topics that nothing is known of yet."""
        for each in envelopes:
            if not self.is_away or self._cluster.routes.known(each.topic) is not None:
                try:
                    _check_delay(each, (await self._cluster.route(each.topic)).types)
                except BrokerUnavailable:
                    if not self._accepts_while_away:
                        raise
        return await self._local.send(envelopes)

    async def _pass_on(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        first = envelopes[0]
        lane = self._forwarder.lanes.get(first.topic)
        is_grouped = any(each.message_group for each in envelopes) and not first.topic.startswith(_DERIVED)
        if is_grouped and (len(envelopes) > 1 or self._forwarder.is_busy(first.topic)):
            return await self._keep(envelopes)
        if self.is_away or (lane is not None and not lane.gate.is_open):
            why = f"the cluster is away: {lane.gate.error}" if lane is not None and lane.gate.error else "it is away"
            return await self._keep(envelopes, BrokerUnavailable(why))
        try:
            async with asyncio.timeout(self._timeout_s):
                receipts = await self._cluster.send(envelopes)
        except TimeoutError:
            error = BrokerUnavailable(f"the cluster did not answer a send within {self._timeout_s:g} s")
        except BrokerUnavailable as failure:
            error = failure
        else:
            if lane is not None:
                lane.gate.succeeded()
            return receipts
        self._forwarder.failed(first.topic, [each.message_id for each in envelopes], str(error))
        return await self._keep(envelopes, error, is_in_doubt=True)

    async def _keep(
        self, envelopes: Sequence[Envelope], error: BrokerUnavailable | None = None, *, is_in_doubt: bool = False
    ) -> Sequence[SendReceipt]:
        """Keep what the cluster does not take now, or must not take yet."""
        is_derived = any(each.topic.startswith(_DERIVED) for each in envelopes)  # those here never leave
        if error is not None and (is_derived or not self._accepts_while_away):
            raise error
        receipts = await self._local.send(envelopes, _in_doubt if is_in_doubt else None)
        self.kept_total += len(envelopes)
        return receipts

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        """As ``PopBroker.recall``, where the message is; of what the cluster delays its answer is the cluster's."""
        try:
            Name.of(recall_handle, Rule.REQUEST)
        except Refused:
            return await self._local.recall(topic, recall_handle)
        return await self._cluster.recall(topic, recall_handle)

    # -- transactions -------------------------------------------------------------------------------------------------

    def attach(self, checker: Checker) -> None:
        """As ``TransactionalBroker.attach``."""
        self._cluster.attach(checker)

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """As ``TransactionalBroker.prepare``."""
        return await self._cluster.prepare(halves)

    async def commit(self, topic: str, transaction_id: str) -> None:
        """As ``TransactionalBroker.commit``."""
        await self._cluster.commit(topic, transaction_id)

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """As ``TransactionalBroker.roll_back``."""
        await self._cluster.roll_back(topic, transaction_id)

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
        """As ``PopBroker.receive``. While the cluster is away it says so at once."""
        if self.is_away:
            raise BrokerUnavailable("the cluster is away")
        receiving = self._cluster.receive(
            group,
            subscription,
            batch_max=batch_max,
            invisible_ms=invisible_ms,
            wait_ms=wait_ms,
            renew_for=renew_for,
        )
        if wait_ms >= POLLING_MS_MIN:
            return await receiving
        try:  # a proxy waits for longer than that: what it brings afterwards is for the next receive
            async with asyncio.timeout(max(1, wait_ms) / 1000):
                return await receiving
        except TimeoutError:
            return ()

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        """As ``PopBroker.ack``."""
        return await self._cluster.ack(group, topic, receipt_handles)

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        """As ``PopBroker.change_invisible``."""
        return await self._cluster.change_invisible(group, topic, receipt_handle, invisible_ms, suspend=suspend)

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        """As ``PopBroker.dead_letter``."""
        await self._cluster.dead_letter(group, topic, receipt_handle, attempts=attempts)

    def client_seen(self, client_id: str) -> None:
        """As ``PopBroker.client_seen``."""
        self._cluster.client_seen(client_id)

    def client_gone(self, client_id: str) -> None:
        """As ``PopBroker.client_gone``."""
        self._cluster.client_gone(client_id)


def _with_delays(route: TopicRoute) -> TopicRoute:
    """Let clients know that the daemon delays what the cluster's topic cannot."""
    types = set(route.types)
    if types & {MessageType.NORMAL, MessageType.FIFO}:
        types.add(MessageType.DELAY)
    return route._replace(types=tuple(sorted(types)))


def _check_delay(envelope: Envelope, types: Sequence[MessageType]) -> None:
    """Refuse now what the cluster would refuse when it is due."""
    if not envelope.deliver_at_ms:
        return
    if forwarded_type(types, is_grouped=bool(envelope.message_group)) is None:
        takes = ", ".join(each.name for each in types)
        actual = "FIFO" if envelope.message_group else "NORMAL"
        why = f"topic {envelope.topic!r} of the cluster takes {takes}, so nothing delayed: it would come as {actual}"
        raise Refused(Rule.MESSAGE_TYPE, why, value="DELAY")


def _in_doubt(topic: Topic, envelope: Envelope) -> bytes:
    message_id = pack_id(envelope.message_id)
    return encode_event(EventKind.FORWARD_IN_DOUBT, topic.topic_id, 0, NO_QUEUE, 0, 0, message_id)
