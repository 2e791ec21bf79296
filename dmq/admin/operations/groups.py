"""Operations on consumer groups."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from broker_adapter.contracts.errors import group_unknown
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, dead_letter_topic
from dmq.admin.requests import status
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.groups.subscription import Subscription
from dmq.broker.operations.admin import BEGIN, END
from dmq.broker.operations.lag import Lag
from dmq.broker.topics.catalog import DEFAULT_POLICY
from dmq.broker.topics.registry import Group, Topic
from dmq.broker.topics.settings import FLOW_STAYS, FlowChange
from dmq.runtime.slices import in_slices
from dmq.store.store import Store
from retry.policy import RetryPolicy

_DUE_BUCKETS_MAX = 10_000


class GroupOperations:
    """Status of groups from already maintained figures, and changes of them, durable on return."""

    def __init__(self, store: Store, broker: EmbeddedBroker, retries_default: str = "") -> None:
        """``retries_default`` is where groups without their own setting keep retries if a cluster is configured."""
        self._store = store
        self._broker = broker
        self._retries_default = retries_default

    async def groups(self, *, with_removed: bool = False) -> Sequence[status.GroupStatus]:
        """Return all consumer groups, by name; on request also removed groups that still have dead letters."""
        names = self._broker.names
        loop = asyncio.get_running_loop()
        figures = await loop.run_in_executor(None, self._figures)
        lags: dict[str, list[Lag]] = {}
        for each in await loop.run_in_executor(None, self._broker.lags.look):
            lags.setdefault(each.group, []).append(each)
        subscriptions = defaultdict[int, list[Subscription]](list)
        for subscription in self._broker.subscriptions.all():
            subscriptions[subscription.group_id].append(subscription)
        found = [
            _with_lag(await self._group(group, figures, subscriptions[group.group_id]), lags.get(group.name, ()))
            async for group in in_slices(list(names.groups.values()))
        ]
        if with_removed:
            letters = [each for each in names.topics.values() if each.name.startswith(DEAD_LETTER_PREFIX)]
            left = [each for each in letters if names.is_left(each)]
            found += [await self._left(each) for each in left]
        return sorted(found, key=lambda group: group.name)

    async def _left(self, letters: Topic) -> status.GroupStatus:
        """Return the status of a group that was removed or never existed: its dead letters."""
        name = letters.name.removeprefix(DEAD_LETTER_PREFIX)
        group = self._broker.names.group_of_letters(name)
        return status.GroupStatus(
            name=name,
            created_at_ms=group.created_at_ms if group is not None else letters.created_at_ms,
            policy=DEFAULT_POLICY,
            is_default_policy=True,
            is_fifo=False,
            is_fifo_set=False,
            dead=await self._broker.dead_letters.count(letters),
            is_removed=True,
        )

    async def group(self, name: str, *, with_lag: bool = False, with_unread: bool = False) -> status.GroupStatus:
        """Return one group with the due times of its retries; on request with its lag by topic.

        ``with_unread`` adds the number of unfinished messages from the rows of its progress, as a removal counts them.
        """
        group = self._known(name)
        loop = asyncio.get_running_loop()
        figures = await loop.run_in_executor(None, self._figures)
        due = await loop.run_in_executor(None, self._due_counts, group.group_id)
        subscriptions = [each for each in self._broker.subscriptions.all() if each.group_id == group.group_id]
        found = await self._group(group, figures, subscriptions, due)
        if with_lag:
            lags = await loop.run_in_executor(None, partial(self._broker.lags.look, group_id=group.group_id))
            by_topic = [
                status.TopicLag(
                    topic=each.topic,
                    unread=each.unread,
                    oldest_unread_age_ms=each.oldest_unread_age_ms,
                    in_flight=each.in_flight,
                    in_retry=each.in_retry,
                    dead=each.dead,
                )
                for each in lags
            ]
            found = replace(_with_lag(found, lags), lags=by_topic)
        if not with_unread:
            return found
        return replace(
            found, unread=[status.Unread(**each._asdict()) for each in await self._broker.operator.unread(group)]
        )

    def _due_counts(self, scope: int) -> list[status.DueBucket]:
        found = self._store.due_counts(scope, 0, 2**53, limit=_DUE_BUCKETS_MAX)
        return [status.DueBucket(until_ms=bucket.until_ms, count=bucket.count) for bucket in found]

    def _figures(self) -> tuple[dict[int, int], dict[int, int]]:
        return self._store.pending(), self._store.pending_bytes()

    async def _group(
        self,
        group: Group,
        figures: tuple[dict[int, int], dict[int, int]],
        subscribed: Sequence[Subscription],
        due: Sequence[status.DueBucket] = (),
    ) -> status.GroupStatus:
        pending, sizes = figures
        letters = self._broker.names.topics.get(dead_letter_topic(group.name))
        is_fifo = self._broker.group_settings(group.name, [each.topic.name for each in subscribed]).is_fifo
        in_force = (group.retries or self._retries_default) if self._retries_default else ""
        return status.GroupStatus(
            name=group.name,
            created_at_ms=group.created_at_ms,
            policy=group.policy or DEFAULT_POLICY,
            is_default_policy=group.policy is None,
            is_fifo=is_fifo,
            is_fifo_set=group.is_fifo is not None,
            retries=group.retries or "",
            retries_in_force="cluster" if in_force and is_fifo else in_force,
            waiting=pending.get(group.group_id, 0),
            dead=await self._broker.dead_letters.count(letters) if letters is not None else 0,
            leased=sum(len(queue.leases) for found in subscribed for queue in found.all_queues),
            due=due,
            paused_since_ms=group.paused_since_ms or 0,
            deliver_rate=group.deliver_rate or 0,
            waiting_bytes=sizes.get(group.group_id, 0),
        )

    async def set_group(
        self,
        name: str,
        *,
        policy: RetryPolicy | None,
        reset_policy: bool,
        is_fifo: bool | None,
        retries: str | None = None,
        flow: FlowChange = FLOW_STAYS,
    ) -> status.GroupStatus:
        """Change a group, durable on return."""
        await self._broker.set_group(
            name, policy=policy, reset_policy=reset_policy, is_fifo=is_fifo, retries=retries, **flow._asdict()
        )
        return await self.group(name)

    def _known(self, name: str) -> Group:
        group = self._broker.names.groups.get(name)
        if group is None:
            raise group_unknown(name)
        return group

    async def create_group(self, name: str) -> status.GroupStatus:
        """Create a group."""
        await self._broker.operator.create_group(name)
        return await self.group(name)

    async def remove_group(self, name: str, *, is_forced: bool, with_dead_letters: bool) -> None:
        await self._broker.operator.remove_group(name, is_forced=is_forced, with_dead_letters=with_dead_letters)

    async def reset_group(self, group: str, topic: str, to: int | Literal["begin", "end"]) -> Sequence[int]:
        """Move the position of a group."""
        marks = {"begin": BEGIN, "end": END}
        return await self._broker.operator.reset_group(group, topic, to if isinstance(to, int) else marks[to])

    async def subscribe(self, group: str, topic: str) -> None:
        """Subscribe a group to a topic, unless the topic belongs to a cluster. Missing ones are created as a receive
        would.
        """
        if self._broker.names.stay.has(topic):
            await self._broker.subscriptions.subscribe(group, topic, group_start="earliest")


def _with_lag(group: status.GroupStatus, lags: Sequence[Lag]) -> status.GroupStatus:
    """Add the known lag in all topics to the status of a group."""
    unread = [each.unread for each in lags if each.unread is not None]
    ages_ms = [each.oldest_unread_age_ms for each in lags if each.oldest_unread_age_ms is not None]
    return replace(
        group,
        unread_messages=sum(unread) if unread else None,
        oldest_unread_age_ms=max(ages_ms, default=None),
    )
