"""The broker in front of a cluster: stores messages that have to wait, and passes all other calls on.

stored here     delayed messages, until they are due; messages that the cluster refuses now, if sends are accepted while
                it is away; messages of a message group with earlier messages here; and messages with an own key, which
                may replace a pending message
passed on       all other sends, transactions, receives and their completion, groups, routes
own             topics that do not belong to the cluster: the embedded broker serves them alone

A group may have messages of a topic at both places: dead letters, or retries that are kept here. A receive then asks
both. A handle identifies the broker that issued it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from broker_adapter.contracts.adapter import GroupSettings, PopBroker, Subscription, TopicRoute
from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import BrokerAway, BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.limits import POLLING_MS_MIN, QUEUES_PER_TOPIC_DEFAULT
from broker_adapter.contracts.message import Delivery, Envelope, MessageType, RecallReceipt, SendReceipt, pack_id
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from broker_adapter.contracts.transactions import Checker, Half, HalfReceipt, TransactionalBroker
from dmq.broker import EmbeddedBroker
from dmq.broker.schedules import NewSchedule, ScheduleStatus, check_types
from dmq.broker.topics import Topic
from dmq.cluster.cluster import Cluster
from dmq.cluster.forwarder import Forwarder
from dmq.cluster.retries_here import ReceiveParameters, RetriesHere
from dmq.cluster.topic_forwarder import forwarded_type
from dmq.config.units import TopicPatterns
from dmq.trail.events import NO_QUEUE, EventKind, encode_event
from retry.failure_reason import FailureReason

Receiving = asyncio.Task[Sequence[Delivery]]

_UNSURE_MAX = 10_000
_AWAY_WAIT_MS = 1_000  # bounds a receive that may find messages here, so that it soon detects a reachable cluster
_DERIVED = (DEAD_LETTER_PREFIX, RETRY_PREFIX)


class ClusterBroker:
    """A ``PopBroker`` and ``TransactionalBroker`` in front of a cluster. The event loop owns it."""

    def __init__(
        self,
        local: EmbeddedBroker,
        cluster: Cluster,
        forwarder: Forwarder,
        *,
        accepts_while_away: bool,
        timeout_ms: int,
        here: RetriesHere,
    ) -> None:
        self.kept_total = 0
        self.on_group_changed: Callable[[str], None] = lambda _: None
        self._local = local
        self._cluster = cluster
        self._forwarder = forwarder
        self._accepts_while_away = accepts_while_away
        self._timeout_s = timeout_ms / 1000
        self._unsure: set[str] = set()  # groups that got default settings while the cluster was away
        self._names = local.names
        self._here = here

    async def close(self) -> None:
        """Stop taking over retries: the cluster handles deliveries that clients hold."""
        await self._here.close()

    @property
    def is_away(self) -> bool:
        """True if no part of the cluster answers."""
        return self._cluster.is_away

    # -- names --------------------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRoute:
        """Return the cluster's current or last known route; without either, one that accepts every type."""
        if self._is_own(topic):
            return await self._local.route(topic)
        try:
            return await self._cluster_route(topic)
        except Refused:
            if topic not in self._names.topics or not self._names.is_derived(topic):
                raise
            return await self._local.route(topic)  # dead letters that exist here only

    async def types_of(self, topic: str) -> Sequence[MessageType]:
        """Return the message types of a cluster's topic, empty for an own topic; raise ``Refused`` if it does not
        exist.
        """
        return () if self._is_own(topic) else (await self.route(topic)).types

    async def add_schedule(self, wanted: NewSchedule, *, is_replacing: bool = False) -> tuple[ScheduleStatus, bool]:
        """Add a schedule as ``Schedules.add``; raise ``Refused`` also for a type that the cluster's topic does not
        accept.
        """
        check_types(wanted.topic, await self.types_of(wanted.topic), is_grouped=bool(wanted.message_group))
        return await self._local.schedules.add(wanted, is_replacing=is_replacing)

    async def _cluster_route(self, topic: str) -> TopicRoute:
        known = self._cluster.known_route(topic)
        if self.is_away and known is not None:
            return _with_delays(known)
        try:
            return _with_delays(await self._cluster.route(topic))
        except BrokerUnavailable:
            if not self._accepts_while_away:
                raise
            return TopicRoute(topic, QUEUES_PER_TOPIC_DEFAULT)

    async def ensure_group(self, group: str) -> None:
        """Create a group as ``PopBroker.ensure_group``; while the cluster is away, a consumer may start and wait."""
        try:
            if not self.is_away:
                await self._cluster.ensure_group(group)
        except BrokerUnavailable:
            pass
        except Refused:
            if self._names.stay == TopicPatterns():
                raise
            return  # the group may use own topics only; the cluster delivers nothing to it
        if self.is_away:
            if len(self._unsure) < _UNSURE_MAX:
                self._unsure.add(group)
            return
        if group in self._unsure:
            self._unsure.discard(group)
            self.on_group_changed(group)

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        """Return the cluster's settings of a group; the local ones if none of the topics is the cluster's."""
        if topics and all(map(self._is_own, topics)):
            return self._local.group_settings(group, topics)
        if self._here.keeps(group):
            return self._local.group_settings(group, topics)._replace(is_fifo=False)
        return self._cluster.group_settings(group, topics)

    def is_known(self, kind: str, name: str) -> bool:
        """Return True if a use would not create the name: it exists here or there, as in ``Catalog.is_known``."""
        if kind == "topics" and self._is_own(name):
            return self._local.catalog.is_known(kind, name)
        if self._cluster.is_known(kind, name) or self._local.catalog.is_known(kind, name):
            return True
        return kind == "groups" and name in self._unsure

    def _is_own(self, topic: str) -> bool:
        return self._names.stay.has(topic)

    # -- producing ----------------------------------------------------------------------------------------------------

    def send(self, envelopes: Sequence[Envelope]) -> Awaitable[Sequence[SendReceipt]]:
        """Send as ``PopBroker.send``: durable here, or at the cluster."""
        own = [each for each in envelopes if self._is_own(each.topic)]
        if len(own) == len(envelopes):
            return self._local.send(envelopes)
        if own:
            raise Refused(
                Rule.UNSUPPORTED,
                "one request cannot contain both messages for the cluster and messages to keep",
                value=own[0].topic,
            )
        if not any(each.deliver_at_ms or (each.own_key and not each.topic.startswith(_DERIVED)) for each in envelopes):
            self._local.quotas.spend_at_once(envelopes)
            return self._pass_on(envelopes)
        for each in envelopes:
            if each.deliver_at_ms and each.topic.startswith(_DERIVED):
                raise Refused(Rule.TOPIC, "retries and dead letters cannot be delayed", value=each.topic)
        for each in envelopes:
            route = self._cluster.known_route(each.topic)
            if route is None:
                return Deferred.of(self._keep_new(envelopes))
            _check_delay(each, route.types)
        return self._local.send(envelopes)

    async def _keep_new(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        """Store delayed messages of topics without a known route."""
        for each in envelopes:
            if not self.is_away or self._cluster.known_route(each.topic) is not None:
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
            return await self._keep(envelopes, BrokerAway(why))
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
        """Store messages that the cluster refuses now, or must not get yet."""
        is_derived = any(each.topic.startswith(_DERIVED) for each in envelopes)  # local ones are never forwarded
        if error is not None and (is_derived or not self._accepts_while_away):
            raise error
        receipts = await self._local.sends.send(envelopes, _in_doubt if is_in_doubt else None, is_spent=True)
        self.kept_total += len(envelopes)
        return receipts

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        """Recall as ``PopBroker.recall``, at the owner of the handle; the cluster recalls messages that it delays
        itself.
        """
        owner = self._cluster if self._cluster.owns(recall_handle) else self._local
        return await owner.recall(topic, recall_handle)

    # -- transactions -------------------------------------------------------------------------------------------------

    def attach(self, checker: Checker) -> None:
        """Attach the checker to both brokers, as ``TransactionalBroker.attach``."""
        self._cluster.attach(checker)
        self._local.transactions.attach(checker)

    async def prepare(self, halves: Sequence[Half]) -> Sequence[HalfReceipt]:
        """Store half messages, as ``TransactionalBroker.prepare``; a message of a cluster's topic cannot have an own
        key.
        """
        if all(self._is_own(half.envelope.topic) for half in halves):
            return await self._local.transactions.prepare(halves)
        for half in halves:
            if half.envelope.own_key:  # the cluster would store it, and cannot see pending messages here
                why = "a half message of a cluster's topic cannot have an own key"
                raise Refused(Rule.PROPERTY_KEY, why, value=half.envelope.own_key)
        return await self._cluster.prepare(halves)

    async def commit(self, topic: str, transaction_id: str) -> None:
        """Commit as ``TransactionalBroker.commit``, at the owner of the transaction."""
        await self._decider(transaction_id).commit(topic, transaction_id)

    async def roll_back(self, topic: str, transaction_id: str) -> None:
        """Roll back as ``TransactionalBroker.roll_back``, at the owner of the transaction."""
        await self._decider(transaction_id).roll_back(topic, transaction_id)

    def _decider(self, transaction_id: str) -> TransactionalBroker:
        return self._cluster if self._cluster.owns(transaction_id) else self._local.transactions

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
        """Receive as ``PopBroker.receive``; raise ``BrokerAway`` at once or soon for a cluster's topic while it is
        away.
        """
        asked = ReceiveParameters(group, subscription, batch_max, invisible_ms, renew_for)
        if self._is_own(subscription.topic):
            return await self._receive_here(asked, wait_ms)
        wait_ms = await self._local.flows.left_ms(group, wait_ms)
        if wait_ms < 0:
            return ()
        if self._has_here(group, subscription.topic):
            return await self._receive_both(asked, wait_ms)
        if self.is_away:
            raise BrokerAway("the cluster is away")
        receiving = self._receive_there(asked, wait_ms)
        if wait_ms >= POLLING_MS_MIN:
            return await receiving
        try:  # a proxy waits for longer than that; its later messages are for the next receive
            async with asyncio.timeout(max(1, wait_ms) / 1000):
                return await receiving
        except TimeoutError:
            return ()

    def _has_here(self, group: str, topic: str) -> bool:
        """Return True if a group may have messages of a cluster's topic here."""
        found = self._names.topics.get(topic)
        if self._names.is_derived(topic):
            return found is not None
        if self._here.keeps(group):
            return True
        known = self._names.groups.get(group)
        return known is not None and found is not None and (known.group_id, found.topic_id) in self._names.lanes

    async def _receive_here(self, asked: ReceiveParameters, wait_ms: int) -> Sequence[Delivery]:
        subscription = asked.subscription
        if self._names.leaves(subscription.topic):
            subscription = subscription._replace(queue_id=-1)  # only the lane of such a topic can be received here
        return await self._local.receive(
            asked.group,
            subscription,
            batch_max=asked.batch_max,
            invisible_ms=asked.invisible_ms,
            wait_ms=wait_ms,
            renew_for=asked.renew_for,
        )

    async def _receive_there(
        self, asked: ReceiveParameters, wait_ms: int, *, is_kept: bool = False
    ) -> Sequence[Delivery]:
        """Receive at the cluster; ``is_kept``: the group's retries are kept here."""
        return await self._cluster.receive(
            asked.group,
            asked.subscription,
            batch_max=asked.batch_max,
            invisible_ms=self._here.hidden_ms(asked) if is_kept else asked.invisible_ms,
            wait_ms=wait_ms,
            renew_for=asked.renew_for,
        )

    async def _receive_both(self, asked: ReceiveParameters, wait_ms: int) -> Sequence[Delivery]:
        """Return the first result of both brokers. Later messages of the other one are for the next receive."""
        topic = asked.subscription.topic
        is_there = await self._is_there(topic)
        if found := await self._receive_here(asked, 0 if is_there else wait_ms):
            return found
        if not is_there:
            return ()
        if self.is_away:
            if found := await self._receive_here(asked, min(wait_ms, _AWAY_WAIT_MS)):
                return found
            raise BrokerAway("the cluster is away")
        is_kept = self._here.keeps(asked.group) and not self._names.is_derived(topic)
        loop = asyncio.get_running_loop()
        there = loop.create_task(self._receive_there(asked, wait_ms, is_kept=is_kept))
        here = loop.create_task(self._receive_here(asked, wait_ms))
        first: Receiving | None = None
        try:
            await asyncio.wait([there, here], timeout=wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
            first = there if _brought(there) or not here.done() else here
        finally:
            for each, owner in ((there, self._cluster), (here, self._local)):
                if each is not first or not each.done():
                    await _call_off(asked, each, owner)
        if first.cancelled():
            return ()
        found = first.result()
        if first is there and is_kept and found:
            found = await self._here.sift(asked, found)
            self._here.hold(asked, found)
        return found

    async def _is_there(self, topic: str) -> bool:
        """Return True if the cluster has a topic or may have it: dead letters may exist here only."""
        if self.is_away or self._cluster.known_route(topic) is not None:
            return True
        try:
            await self._cluster.route(topic)
        except Refused:
            if topic not in self._names.topics:  # neither has it, and a receive must not create it
                raise
            return False
        return True

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        """Acknowledge as ``PopBroker.ack``, each handle at its owner."""
        there = [each for each in receipt_handles if self._cluster.owns(each)]
        if not there:
            return await self._local.ack(group, topic, receipt_handles)
        if len(there) == len(receipt_handles):
            return await self._here.ack(group, topic, receipt_handles)
        here = [each for each in receipt_handles if not self._cluster.owns(each)]
        asked = [(here, self._local.ack(group, topic, here)), (there, self._here.ack(group, topic, there))]
        answers = await asyncio.gather(*(each for _, each in asked), return_exceptions=True)
        results: dict[str, Exception | None] = {}
        for (handles, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, BrokerError):
                    raise answer
                results |= dict.fromkeys(handles, answer)
            else:
                results |= zip(handles, answer, strict=True)
        return [results[each] for each in receipt_handles]

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        """Change an invisible duration as ``PopBroker.change_invisible``, at the owner of the handle."""
        owner = self._here if self._cluster.owns(receipt_handle) else self._local
        return await owner.change_invisible(group, topic, receipt_handle, invisible_ms, suspend=suspend)

    def note_failure(self, group: str, receipt_handle: str, reason: FailureReason) -> bool:
        """Store a reason as ``ServedBroker.note_failure``; for a cluster's message only with local retries."""
        owner = self._here if self._cluster.owns(receipt_handle) else self._local
        return owner.note_failure(group, receipt_handle, reason)

    async def not_taken(self, group: str, leased: Sequence[tuple[str, str]]) -> None:
        """End deliveries as ``ServedBroker.not_taken``; those of the cluster are redelivered as the same attempt."""
        await self._local.not_taken(group, [each for each in leased if not self._cluster.owns(each[1])])
        for topic, receipt_handle in leased:
            if self._cluster.owns(receipt_handle):
                with suppress(BrokerError):
                    await self._here.change_invisible(group, topic, receipt_handle, 0, suspend=True)

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        """Give up a delivery as ``PopBroker.dead_letter``, at the owner of the handle."""
        owner = self._here if self._cluster.owns(receipt_handle) else self._local
        await owner.dead_letter(group, topic, receipt_handle, attempts=attempts)

    def client_seen(self, client_id: str) -> None:
        """Record activity of a client at both brokers, as ``PopBroker.client_seen``."""
        self._cluster.client_seen(client_id)
        self._local.client_seen(client_id)

    def client_gone(self, client_id: str) -> None:
        """Remove a client from both brokers, as ``PopBroker.client_gone``."""
        self._here.client_gone(client_id)
        self._cluster.client_gone(client_id)
        self._local.client_gone(client_id)


def _brought(receiving: Receiving) -> Sequence[Delivery]:
    return receiving.result() if receiving.done() and not receiving.cancelled() and not receiving.exception() else ()


async def _call_off(asked: ReceiveParameters, receiving: Receiving, owner: PopBroker) -> None:
    """Cancel an unused receive, and release its deliveries without counting an attempt.

    Messages that the cluster returns to a cancelled receive are for the next one with the same parameters.
    """
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    for each in _brought(receiving):
        with suppress(BrokerError):  # on an error its invisible duration expires
            await owner.change_invisible(asked.group, each.topic, each.receipt_handle, 0, suspend=True)


def _with_delays(route: TopicRoute) -> TopicRoute:
    """Add DELAY to the types of a route, because the daemon delays messages for a topic that cannot."""
    types = set(route.types)
    if types & {MessageType.NORMAL, MessageType.FIFO}:
        types.add(MessageType.DELAY)
    return route._replace(types=tuple(sorted(types)))


def _check_delay(envelope: Envelope, types: Sequence[MessageType]) -> None:
    """Refuse a delayed message now if the cluster would refuse it at its delivery time."""
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
