"""Embedded broker: implements ``PopBroker``; its ``pulls`` implement ``PullBroker``.

It creates the parts of the broker, passes each its dependencies, and forwards client calls to them.

All state in memory belongs to one event loop. One thread does all reads; the store's writer does all writes. A state
change is answered only after the store confirms that it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from broker_adapter.contracts.adapter import GroupSettings, Subscription, TopicRoute
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery, MessageType
from dmq.broker.classic import ClassicClients, SentBackMessages
from dmq.broker.delayed import Recalls
from dmq.broker.deliveries import Deliveries, Leases
from dmq.broker.failures import Failures, Outcomes, WaitingRetries
from dmq.broker.groups import LeaseEnds, Subscriptions
from dmq.broker.handles import EntryHandles, ReceiptHandles
from dmq.broker.io import Commits, Reader
from dmq.broker.message_spans import MessageSpans, SendCall
from dmq.broker.operations import (
    KEEP_DEFAULT,
    DeadLetters,
    IndexBuilds,
    MessageJobs,
    Operator,
    Procedures,
    Retention,
)
from dmq.broker.pulling import Pulls
from dmq.broker.sending import Placement, Sends
from dmq.broker.topics import (
    AUTO_CREATE,
    DEFAULT_POLICY,
    LIMITS_DEFAULT,
    QUEUES_DEFAULT,
    AutoCreate,
    Catalog,
    Names,
    ScheduleLimits,
    SharedParts,
    check_not_forwarder,
)
from dmq.broker.transactions import CheckOptions, Checks, Transactions
from dmq.config.units import ALL_TOPICS, TopicPatterns
from dmq.store import Store
from dmq.store.schema.topics.names import NO_QUOTAS, Keep, TopicQuotas
from dmq.store.writer.operations import Appended
from dmq.tracing import EmitSpan
from retry.policy import DELAY_LEVELS_MS, RetryPolicy, delays_ms

CHECKS_DEFAULT = CheckOptions()


class EmbeddedBroker:
    """Full broker on the store. Create it on the event loop that uses it; ``close`` stops its tasks and its thread."""

    def __init__(
        self,
        store: Store,
        *,
        queues_per_topic: int = QUEUES_DEFAULT,
        group_start: Literal["earliest", "latest"] = "earliest",
        delay_levels_ms: Sequence[int] = DELAY_LEVELS_MS,
        checks: CheckOptions = CHECKS_DEFAULT,
        auto_create: AutoCreate = AUTO_CREATE,
        keep: Keep = KEEP_DEFAULT,
        keep_forwarded: Keep | None = None,
        stay: TopicPatterns = ALL_TOPICS,
        schedules: ScheduleLimits = LIMITS_DEFAULT,
        delay_max_ms: int | None = None,
        quotas: TopicQuotas = NO_QUOTAS,
        failure_reasons: bool = True,
        emit_span: EmitSpan | None = None,
    ) -> None:
        """``stay``: patterns of the topics of this broker; the forwarder sends messages of all others to a cluster.

        ``quotas``: defaults for topics without quotas of their own. ``emit_span`` gets the spans of traced messages.
        """
        self.store = store
        self.on_group_changed: Callable[[str], None] = lambda _: None
        self.on_appended: Callable[[Appended], None] = lambda _: None
        self._clock = store.clock
        loop = asyncio.get_running_loop()
        # Shared by the parts: names, the read and write paths of the store, and the state of groups and queues.
        self.names = names = Names(store, stay)
        self.commits = commits = Commits(store)
        self.reader = reader = Reader(store, loop)
        self.catalog = catalog = Catalog(names, commits, queues_per_topic=queues_per_topic, auto_create=auto_create)
        self.shared = shared = SharedParts(catalog, commits, reader)
        self.handles = handles = EntryHandles(store.identity)
        self.receipts = receipts = ReceiptHandles(store.identity, store.boot)
        self.lease_ends = ends = LeaseEnds(store.clock)
        self.subscriptions = subscriptions = Subscriptions(shared, ends, group_start=group_start)
        self.placement = placement = Placement(names)
        self.spans = spans = MessageSpans(names, store.clock, emit_span) if emit_span is not None else None
        # One part for each kind of client or operator call.
        self.sends = Sends(shared, placement, handles, quotas)
        self.quotas = self.sends.quotas
        self.recalls = Recalls(shared, handles, delay_max_ms=delay_max_ms)
        self.delayed = self.recalls.delayed
        self.checks = Checks(names, checks, handles)
        self.transactions = Transactions(
            shared, placement=placement, checks=self.checks, handles=handles, sends=self.sends, spans=spans
        )
        self.outcomes = outcomes = Outcomes(shared, subscriptions, levels_ms=delay_levels_ms)
        self.failures = failures = Failures(
            *(shared, subscriptions, ends, receipts), outcomes=outcomes, keeps_reasons=failure_reasons, spans=spans
        )
        self.note_failure = failures.reasons.note
        self.retries = WaitingRetries(shared, outcomes)
        self.leases = Leases(store, ends, failures, spans)
        self.deliveries = deliveries = Deliveries(
            shared,
            subscriptions=subscriptions,
            ends=ends,
            receipts=receipts,
            failures=failures,
            leases=self.leases,
            spans=spans,
        )
        self.flows = deliveries.flows
        self.pulls = Pulls(shared, filters=deliveries.filters, settled=subscriptions.settled)
        self.dead_letters = DeadLetters(shared, subscriptions=subscriptions, placement=placement, spans=spans)
        self._add_calls(shared, delay_levels_ms)
        self._add_upkeep(shared, keep, keep_forwarded, schedules)
        store.attach(loop, self._on_appended)

    def _add_calls(self, shared: SharedParts, levels_ms: Sequence[int]) -> None:
        """Add the calls of ``PopBroker`` that one part serves, and the parts for ``dmq.broker.in_process_client``."""
        deliveries, ends = self.deliveries, self.lease_ends
        self.send: SendCall = self.sends.send if self.spans is None else self.spans.of_sends(self.sends.send)
        self.recall = self.recalls.recall
        self.ack, self.not_taken = deliveries.ack, deliveries.not_taken
        self.change_invisible, self.dead_letter = deliveries.change_invisible, deliveries.dead_letter
        self.send_back = deliveries.send_back
        self.client_seen, self.client_gone = ends.client_seen, ends.client_gone
        self.clients = ClassicClients(self._clock)
        self.transactions.attach(self.clients)
        self.sent_back = SentBackMessages(
            *(shared, self.outcomes),
            sends=self.sends,
            failures=self.failures,
            receipts=self.receipts,
            levels_ms=levels_ms,
        )

    def _add_upkeep(self, shared: SharedParts, keep: Keep, keep_forwarded: Keep | None, limits: ScheduleLimits) -> None:
        """Add the parts that change names, reset groups and remove messages."""
        subscriptions = self.subscriptions
        self.message_jobs = MessageJobs(shared, self.delayed)
        self.procedures = procedures = Procedures(
            shared, subscriptions=subscriptions, tails=self.pulls.tails, receipts=self.receipts
        )
        self.retention = Retention(
            shared,
            subscriptions=subscriptions,
            offsets=self.pulls.offsets,
            procedures=procedures,
            keep=keep,
            keep_forwarded=keep_forwarded,
        )
        self.index_builds = IndexBuilds(shared)
        self.operator = Operator(
            shared,
            subscriptions=subscriptions,
            procedures=procedures,
            dead_letters=self.dead_letters,
            retention=self.retention,
            index_builds=self.index_builds,
            limits=limits,
        )
        self.schedules, self.lags = self.operator.schedules, self.operator.lags

    def _on_appended(self, appended: Appended) -> None:
        self.pulls.tails.on_appended(appended)
        self.subscriptions.on_appended(appended)
        self.on_appended(appended)

    async def close(self) -> None:
        """Stop lease expiry, all background tasks and reads. The store stays open."""
        await asyncio.get_running_loop().run_in_executor(None, self.lags.close)
        await self.schedules.close()
        await self.retention.close()
        await self.index_builds.close()
        await self.procedures.close()
        await self.leases.close()
        await self.failures.close()
        await self.transactions.close()
        await self.dead_letters.close()
        await self.message_jobs.close()
        self.reader.close()

    @property
    def lease_count(self) -> int:
        """Number of messages that are leased and not finished, of all groups."""
        return sum(len(queue.leases) for each in self.subscriptions.all() for queue in each.all_queues)

    # -- topics and groups --------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRoute:
        found = await self.catalog.topic(topic)
        types = tuple(MessageType) if found.message_type is None else (found.message_type,)
        return TopicRoute(found.name, found.queues, types)

    async def ensure_group(self, group: str) -> None:
        check_not_forwarder(group)
        if group not in self.names.groups:
            await self.catalog.group(group)

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        found = self.names.groups.get(group)
        policy = found.policy if found is not None and found.policy is not None else DEFAULT_POLICY
        is_fifo = found.is_fifo if found is not None else None
        if is_fifo is None:
            known = [self.names.topics.get(topic) for topic in topics]
            is_fifo = bool(known) and all(topic is not None and topic.is_fifo for topic in known)
        return GroupSettings(is_fifo, policy.max_attempts, delays_ms(policy))

    async def set_group(
        self,
        name: str,
        *,
        policy: RetryPolicy | None = None,
        reset_policy: bool = False,
        is_fifo: bool | None = None,
        retries: str | None = None,
        is_paused: bool | None = None,
        deliver_rate: int | None = None,
    ) -> None:
        """Change settings of a group, durable on return, and notify connected clients. ``None`` leaves a setting
        unchanged.

        An unknown group is created, unless the call pauses it, resumes it or sets its delivery rate.
        """
        check_not_forwarder(name)
        group = self.names.groups.get(name)
        if group is None:
            is_new = is_paused is None and deliver_rate is None
            group = await self.catalog.make_group(name) if is_new else self.catalog.known_group(name)
        if policy is not None or reset_policy:
            group = group._replace(policy=policy)
        if is_fifo is not None:
            group = group._replace(is_fifo=is_fifo)
        if retries is not None:
            group = group._replace(retries=retries)
        if group.is_fifo and group.retries == "here":
            why = "the order of a FIFO group is the cluster's affair, so its retries are as well"
            raise Refused(Rule.GROUP, why, value=name, limit="retries = cluster, or no FIFO group")
        before, (group, said) = group, self.flows.change(group, is_paused, deliver_rate)
        done = self.commits.submit(self.names.plan_settings(group, said))
        self.names.add_group(group)
        self.flows.changed(before, group)
        await self.commits.committed(done)
        self.on_group_changed(name)

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
        check_not_forwarder(group)
        return await self.deliveries.receive(
            group, subscription, batch_max=batch_max, invisible_ms=invisible_ms, wait_ms=wait_ms, renew_for=renew_for
        )
