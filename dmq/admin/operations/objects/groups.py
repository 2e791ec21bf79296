"""RPCs of ``AdminService`` about consumer groups and their pending retries, from already maintained figures."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from broker_adapter.contracts.errors import Refused, Rule, group_unknown
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, check_group, check_topic, dead_letter_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.objects.pages import page_of
from dmq.admin.requests import mapping, validate
from dmq.broker import EmbeddedBroker
from dmq.broker.groups import GroupSubscription
from dmq.broker.operations import BEGIN, END, Lag
from dmq.broker.topics import DEFAULT_POLICY, Group, Topic
from dmq.runtime.slices import in_slices
from dmq.store import Store

_DUE_BUCKETS_MAX = 10_000
_LIST_S_MAX = 60.0  # for all pages of a list


class GroupCalls:
    """RPCs of groups. Changes are durable on return. Raise ``Refused`` for invalid input."""

    def __init__(self, store: Store, broker: EmbeddedBroker, retries_default: str = "") -> None:
        """``retries_default`` is where groups without their own setting keep retries if a cluster is configured."""
        self._store = store
        self._broker = broker
        self._retries_default = retries_default
        self._lags: dict[str, list[Lag]] = {}
        self._lags_until_s = 0.0

    async def list_groups(self, request: wire.ListGroupsRequest) -> wire.ListGroupsResponse:
        """List a page of the groups, by name; on request with removed groups that still have dead letters."""
        names = self._broker.names
        left = await asyncio.to_thread(self._left_letters) if request.with_removed else {}
        page = await asyncio.to_thread(page_of, (*names.groups.copy(), *left), request.token, request.limit)
        groups = {name: names.groups[name] for name in page.names if name in names.groups}
        lags = await self._lags_of_all(is_first=not request.token)
        subscriptions = defaultdict[int, list[GroupSubscription]](list)
        for subscription in self._broker.subscriptions.all():
            subscriptions[subscription.group_id].append(subscription)
        found = []
        async for name in in_slices(page.names):
            group = groups.get(name)
            if group is not None:
                shown = await self._group(group, subscriptions[group.group_id])
                found.append(_with_lag(shown, lags.get(name, ())))
            if name in left:
                found.append(await self._left(name, left[name]))
        return wire.ListGroupsResponse(groups=found, next_token=page.next_token)

    async def get_group(self, request: wire.GetGroupRequest) -> wire.GetGroupResponse:
        """Return one group with its lag by topic.

        ``with_unread`` adds the number of unfinished messages from the rows of its progress, as a removal counts them.
        """
        group = self._known(check_group(request.group))
        shown = await self._shown(group)
        lags = await asyncio.to_thread(self._broker.lags.look, group_id=group.group_id)
        for each in lags:
            shown.lags.add(**{field: value for field, value in each._asdict().items() if field != "group"})
        if request.with_unread:
            shown.unread.extend(wire.Unread(**each._asdict()) for each in await self._broker.operator.unread(group))
        return wire.GetGroupResponse(group=_with_lag(shown, lags))

    async def set_group(self, request: wire.SetGroupRequest) -> wire.SetGroupResponse:
        """Change the settings of a group, and return it."""
        name = check_group(request.group)
        policy = mapping.policy_of(request.policy) if request.HasField("policy") else None
        if policy is not None and request.reset_policy:
            raise Refused(Rule.REQUEST, "give a policy or reset it to the default, not both")
        if request.retries not in {"", "here", "cluster"}:
            raise Refused(Rule.REQUEST, "unknown place for retries", value=request.retries, limit="here, cluster")
        is_fifo, is_paused, deliver_rate = validate.given(request, "is_fifo", "is_paused", "deliver_rate")
        await self._broker.set_group(
            name,
            policy=policy,
            reset_policy=request.reset_policy,
            is_fifo=is_fifo,
            retries=request.retries or None,
            is_paused=is_paused,
            deliver_rate=deliver_rate,
        )
        return wire.SetGroupResponse(group=await self._shown(self._known(name)))

    async def create_group(self, request: wire.CreateGroupRequest) -> wire.CreateGroupResponse:
        """Create a group."""
        await self._broker.operator.create_group(check_group(request.group))
        return wire.CreateGroupResponse(group=await self._shown(self._known(request.group)))

    async def remove_group(self, request: wire.RemoveGroupRequest) -> wire.RemoveGroupResponse:
        await self._broker.operator.remove_group(
            check_group(request.group), is_forced=request.force, with_dead_letters=request.with_dead_letters
        )
        return wire.RemoveGroupResponse()

    async def reset_group(self, request: wire.ResetGroupRequest) -> wire.ResetGroupResponse:
        """Move the position of a group."""
        group, topic = check_group(request.group), check_topic(request.topic)
        kind = request.WhichOneof("to")
        if kind is None or not 0 <= request.at_ms <= DELIVER_AT_MS_MAX:
            raise Refused(Rule.REQUEST, "the target must be the beginning, the end, or a time", value=request.at_ms)
        to = {"begin": BEGIN, "end": END}.get(kind, request.at_ms)
        return wire.ResetGroupResponse(offsets=await self._broker.operator.reset_group(group, topic, to))

    async def subscribe(self, request: wire.SubscribeRequest) -> wire.SubscribeResponse:
        """Subscribe a group to a topic, unless the topic belongs to a cluster. Missing ones are created as a receive
        would.
        """
        group, topic = check_group(request.group), check_topic(request.topic)
        if self._broker.names.stay.has(topic):
            await self._broker.subscriptions.subscribe(group, topic, group_start="earliest")
        return wire.SubscribeResponse()

    # -- retries ------------------------------------------------------------------------------------------------------

    async def list_retries(self, request: wire.ListRetriesRequest) -> wire.ListRetriesResponse:
        """List a page of the pending retries."""
        page = await self._broker.retries.page(
            check_group(request.group),
            topic=check_topic(request.topic) if request.topic else "",
            token=validate.check_token(request.token),
            limit=validate.check_limit(request.limit),
        )
        retries = [
            mapping.filled(
                wire.WaitingRetry,
                each,
                content=mapping.content_if_readable(each.payload, with_body=False),
                failure=mapping.wire_reason(each.failure),
            )
            async for each in in_slices(page.retries)
        ]
        return wire.ListRetriesResponse(retries=retries, next_token=page.next_token)

    async def run_retries_now(self, request: wire.RunRetriesNowRequest) -> wire.RunRetriesNowResponse:
        """Make retries due at once."""
        group, entries = check_group(request.group), validate.check_entries(request.entries)
        return wire.RunRetriesNowResponse(**asdict(await self._broker.retries.run_now(group, entries)))

    async def end_retries(self, request: wire.EndRetriesRequest) -> wire.EndRetriesResponse:
        """Move retries to the dead-letter queue."""
        group, entries = check_group(request.group), validate.check_entries(request.entries)
        return wire.EndRetriesResponse(**asdict(await self._broker.retries.end(group, entries)))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> Group:
        group = self._broker.names.groups.get(name)
        if group is None:
            raise group_unknown(name)
        return group

    async def _shown(self, group: Group) -> wire.Group:
        """Return a group with the due times of its retries."""
        due = await asyncio.to_thread(self._store.due_counts, group.group_id, 0, 2**53, limit=_DUE_BUCKETS_MAX)
        subscribed = [each for each in self._broker.subscriptions.all() if each.group_id == group.group_id]
        shown = await self._group(group, subscribed)
        shown.due.extend(wire.DueBucket(**bucket._asdict()) for bucket in due)
        return shown

    async def _group(self, group: Group, subscribed: Sequence[GroupSubscription]) -> wire.Group:
        letters = self._broker.names.topics.get(dead_letter_topic(group.name))
        waiting, waiting_bytes = self._store.pending_of(group.group_id)
        is_fifo = self._broker.group_settings(group.name, [each.topic.name for each in subscribed]).is_fifo
        in_force = (group.retries or self._retries_default) if self._retries_default else ""
        return wire.Group(
            name=group.name,
            created_at_ms=group.created_at_ms,
            policy=mapping.wire_policy(group.policy or DEFAULT_POLICY),
            is_default_policy=group.policy is None,
            is_fifo=is_fifo,
            is_fifo_set=group.is_fifo is not None,
            retries=group.retries or "",
            retries_in_force="cluster" if in_force and is_fifo else in_force,
            waiting=waiting,
            dead=await self._broker.dead_letters.count(letters) if letters is not None else 0,
            leased=sum(len(queue.leases) for found in subscribed for queue in found.all_queues),
            paused_since_ms=group.paused_since_ms or 0,
            deliver_rate=group.deliver_rate or 0,
            waiting_bytes=waiting_bytes,
        )

    async def _lags_of_all(self, *, is_first: bool) -> dict[str, list[Lag]]:
        """Return the lags by group. All pages of a list share one read, which costs a row for each topic and group."""
        clock = self._store.clock
        if is_first or clock.monotonic_s() >= self._lags_until_s:
            lags = defaultdict[str, list[Lag]](list)
            for each in await asyncio.to_thread(self._broker.lags.look):
                lags[each.group].append(each)
            self._lags, self._lags_until_s = dict(lags), clock.monotonic_s() + _LIST_S_MAX
        return self._lags

    def _left_letters(self) -> dict[str, Topic]:
        """Return the dead letters of removed groups, by the name of the group."""
        names = self._broker.names
        letters = (each for each in names.topics.copy().values() if each.name.startswith(DEAD_LETTER_PREFIX))
        return {each.name.removeprefix(DEAD_LETTER_PREFIX): each for each in letters if names.is_left(each)}

    async def _left(self, name: str, letters: Topic) -> wire.Group:
        """Return a group that was removed or never existed, and has dead letters."""
        group = self._broker.names.group_of_letters(name)
        return wire.Group(
            name=name,
            created_at_ms=group.created_at_ms if group is not None else letters.created_at_ms,
            policy=mapping.wire_policy(DEFAULT_POLICY),
            is_default_policy=True,
            dead=await self._broker.dead_letters.count(letters),
            is_removed=True,
        )


def _with_lag(group: wire.Group, lags: Iterable[Lag]) -> wire.Group:
    """Add the known lag in all topics to a group."""
    unread = [each.unread for each in lags if each.unread is not None]
    ages_ms = [each.oldest_unread_age_ms for each in lags if each.oldest_unread_age_ms is not None]
    if unread:
        group.unread_messages = sum(unread)
    if ages_ms:
        group.oldest_unread_age_ms = max(ages_ms)
    return group
