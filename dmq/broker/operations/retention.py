"""Retention: removes messages from the front of a queue by age or topic size, once no group needs them.

One unit moves the durable *begin* of a queue (``begin_key``) over a few messages, deletes them, and finishes them for
late groups. So a crash removes all of them or none, and no offset is ever reused. A message that some group has not
read, or that had no reader, leaves an EXPIRED event. For other messages an earlier event records the end. Message ids
stay known for their normal time, so a repeated send does not store the message again.

Regardless of the bounds, leased messages stay, and messages after a message that stays. Unless the topic overrides it,
messages unread by a known group also stay. A group is known in a topic if it ever received from it or committed an
offset in it. Retry lanes ignore the bounds: only retries that their group has finished are removed.

Retention works in turns with a limited number of units for each queue. Disk space is reclaimed for many messages at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import structlog

from broker_adapter.contracts.errors import BrokerError
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from dmq.broker.groups import (
    NOBODY,
    Edges,
    GroupQueue,
    GroupSubscription,
    PullOffsets,
    QueueFront,
    SubscribedQueue,
    Subscriptions,
    edges,
    finished,
    front,
    readers_from,
    size_of,
    sizes,
)
from dmq.broker.io import Place
from dmq.broker.operations.removal_jobs import Procedures
from dmq.broker.topics import BrokerPart, SharedParts, Topic
from dmq.errors import StoreError
from dmq.store.schema.keys import Family, begin_key, pack_queue_key, pack_u64
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.schema.topics.group import outcome_key
from dmq.store.schema.topics.names import KEEP_ALL, Keep
from dmq.store.writer.operations import Delete, Emit, Op, Put
from dmq.trail.events import EventKind, encode_event

log = structlog.get_logger("dmq.broker")

STEPS_PER_TURN = 16  # units of one queue
RECLAIM_BYTES = 16 * 1024 * 1024  # bytes removed before space is reclaimed,
RECLAIM_SHARE = 20  # or 1/20 of the tables if that is more, because reclaiming rewrites them
KEEP_DEFAULT = Keep(72 * 3_600_000, 0, unread=True)
_PAIRS_PER_LOOK = 100
_PAUSE_S_MIN, _PAUSE_S_MAX = 1.0, 60.0
_PAUSE_S_SIZED = 5.0  # with a size bound
_PAUSES_PER_TIME = 4  # turns within the shortest retention time
_BUSY_PAUSE_S = 0.05  # while there is more to remove


class RemovedMessages(NamedTuple):
    """Counts of a step or a turn.

    ``unread`` counts the messages that were not read by every group. ``retries`` counts removed retry copies.
    """

    messages: int = 0
    unread: int = 0
    size_bytes: int = 0
    retries: int = 0

    def plus(self, other: RemovedMessages) -> RemovedMessages:
        """Return the sum of both."""
        return RemovedMessages(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


_NOTHING = RemovedMessages()


class _Step(NamedTuple):
    """Removal by one unit: the new begin of the queue, the counts and the ops."""

    begin: int
    removed: RemovedMessages
    ops: list[Op]


class Retention(BrokerPart):
    """Removal of messages beyond the retention bounds. It belongs to the event loop."""

    def __init__(
        self,
        shared: SharedParts,
        *,
        subscriptions: Subscriptions,
        offsets: PullOffsets,
        procedures: Procedures,
        keep: Keep,
        keep_forwarded: Keep | None = None,
    ) -> None:
        """Create it stopped; topics with a procedure in progress are skipped.

        ``keep`` is the default of topics without bounds of their own. ``keep_forwarded`` replaces it for topics that
        are forwarded to a cluster; ``None``: the same.
        """
        super().__init__(shared)
        self._subscriptions = subscriptions
        self._settled = subscriptions.settled
        self._offsets = offsets
        self._procedures = procedures
        self._keep = keep
        self._keep_forwarded = keep_forwarded or keep
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._known: dict[int, set[int]] | None = None  # groups with progress at the start, by topic
        self._to_reclaim: dict[Place, int] = {}
        self._removed_bytes = 0
        self._has_more = False
        self.total = _NOTHING  # since the daemon started
        self.oldest_ms: dict[str, int] = {}  # store time of the oldest message, by topic, at the last turn
        self.held_queues = 0  # queues with an oldest message past a bound that cannot be removed yet

    def start(self) -> None:
        """Start the task that runs turns."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dmq-retention")

    async def close(self) -> None:
        """Stop the task; submitted units complete."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look_again(self) -> None:
        """Run a turn soon: the bounds of a topic have changed."""
        self._changed.set()

    def keep_of(self, topic: Topic) -> Keep:
        """Return the effective bounds of a topic: its own, else the configured ones.

        Dead-letter queues keep all messages by default. Messages that leave for a cluster stay until they are
        forwarded, regardless of any setting.
        """
        if self._names.leaves(topic.name):
            return topic.keep.over(self._keep_forwarded)._replace(unread=True)
        return topic.keep.over(KEEP_ALL if topic.name.startswith(DEAD_LETTER_PREFIX) else self._keep)

    async def _run(self) -> None:
        while True:
            await self._nap()
            try:
                removed = await self.turn()
                enough = self._store.engine_stats().table_bytes // RECLAIM_SHARE
                if self._removed_bytes >= max(RECLAIM_BYTES, enough):
                    await self.reclaim()
            except Exception as error:  # any error: a task that ended silently would look like a running one
                is_bug = not isinstance(error, BrokerError | StoreError)
                log.error("retention_failed", error=str(error), exc_info=is_bug)  # noqa: TRY400
                if self._store.failure is not None:
                    return
                self._has_more = False
                continue
            if removed != _NOTHING:
                log.info("messages_removed", **removed._asdict(), has_more=self._has_more)

    async def _nap(self) -> None:
        if self._has_more:
            await asyncio.sleep(_BUSY_PAUSE_S)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), self._pause_s())
            await asyncio.sleep(_PAUSE_S_MIN)  # more changes may follow
        self._changed.clear()

    def _pause_s(self) -> float:
        """Return the pause between two turns in seconds, the longest delay before an exceeded bound is noticed."""
        own = map(self.keep_of, self._names.topics.values())
        keeps = [self._keep, self._keep_forwarded, *own]  # with the defaults, because topics may be auto-created
        shortest_ms = min((keep.time_ms for keep in keeps if keep.time_ms), default=0)
        pauses = [_PAUSE_S_MAX]
        pauses += [shortest_ms / 1000 / _PAUSES_PER_TIME] if shortest_ms else []
        pauses += [_PAUSE_S_SIZED] if any(keep.size_bytes for keep in keeps) else []
        return max(_PAUSE_S_MIN, min(pauses))

    async def turn(self) -> RemovedMessages:
        """Check every queue once and remove as much as one turn allows; durable on return."""
        await self._look_for_readers()
        removed, self._has_more, self.held_queues = _NOTHING, False, 0
        oldest_ms: dict[str, int] = {}
        for topic in list(self._names.topics.values()):
            try:
                ends = await self._reader.run(partial(edges, topic_id=topic.topic_id, queues=topic.queues))
                removed = removed.plus(await self._shorten(topic, ends))
            except BrokerError as error:  # an unreadable topic must not block the others
                if self._store.failure is not None:
                    raise
                log.error("retention_failed", topic=topic.name, error=str(error))  # noqa: TRY400
            else:
                if stored := [each.oldest_ms for each in ends if each.oldest_ms]:
                    oldest_ms[topic.name] = min(stored)
        for key, lane in list(self._names.lanes.items()):
            removed = removed.plus(await self._shorten_lane(key, lane))
        self.oldest_ms = oldest_ms
        return removed

    async def reclaim(self) -> None:
        """Reclaim the disk space of removed messages."""
        found = sorted(self._to_reclaim.items())
        ranges = [(pack_queue_key(*place, 0), pack_queue_key(*place, begin)) for place, begin in found]
        self._to_reclaim, self._removed_bytes = {}, 0
        reclaim = partial(self._store.reclaim, Family.QUEUE, ranges)
        await asyncio.get_running_loop().run_in_executor(None, reclaim)

    async def _look_for_readers(self) -> None:
        """Find the groups with progress from earlier runs, once; one seek for each (group, topic) pair."""
        if self._known is not None:
            return
        known: dict[int, set[int]] = {}
        start, is_done = b"", False
        while not is_done:
            found, start = await self._reader.run(partial(readers_from, start=start, limit=_PAIRS_PER_LOOK))
            for group_id, topic_id in found:
                known.setdefault(topic_id, set()).add(group_id)
            is_done = not start
        self._known = known

    def _known_in(self, topic: Topic) -> set[int]:
        """Return the groups now known in a topic."""
        assert self._known is not None, "look for them first"
        groups = self._known.get(topic.topic_id, set()) | self._subscriptions.readers_of(topic.topic_id)
        names = self._names
        found = [group for each in groups if (group := names.groups_by_id.get(each)) is not None]
        return {group.group_id for group in found if group.name in names.groups}

    # -- queues -------------------------------------------------------------------------------------------------------

    async def _shorten(self, topic: Topic, ends: Sequence[Edges]) -> RemovedMessages:
        keep, removed = self.keep_of(topic), _NOTHING
        if not keep.bounds:
            return removed
        excess = await self._excess(topic, ends, keep)
        for queue_id, (each, over_bytes) in enumerate(zip(ends, excess, strict=True)):
            place = Place(topic.topic_id, queue_id)
            for number in range(STEPS_PER_TURN + 1):
                if each.begin == each.end or not (over_bytes > 0 or self._is_old(keep, each.oldest_ms)):
                    break
                if number == STEPS_PER_TURN:
                    self._has_more = True
                    break
                step = await self._step(topic, place, keep, over_bytes)
                if step is None:
                    self.held_queues += not number
                    break
                removed = removed.plus(step.removed)
                over_bytes -= step.removed.size_bytes  # noqa: PLW2901
        return removed

    async def _excess(self, topic: Topic, ends: Sequence[Edges], keep: Keep) -> list[int]:
        """Return the number of excess bytes of each queue, in proportion to its share of the topic's size."""
        if not keep.size_bytes:
            return [0] * len(ends)
        found = await self._reader.run(partial(sizes, topic_id=topic.topic_id, ends=ends))
        total = sum(found)
        over_bytes = max(0, total - keep.size_bytes)
        return [-(-over_bytes * size // total) if total else 0 for size in found]

    def _is_old(self, keep: Keep, stored_at_ms: int) -> bool:
        return bool(keep.time_ms) and stored_at_ms + (keep.time_ms or 0) <= self._age_by_ms()

    def _age_by_ms(self) -> int:
        """Return the current time for age checks, or 0 while the clock is not steady, so that no message is old."""
        return self._clock.now_ms() if self._clock.is_steady() else 0

    async def _step(self, topic: Topic, place: Place, keep: Keep, over_bytes: int) -> _Step | None:
        """Remove a few messages from the front of a queue, durable on return; return None if none can go now."""
        settled = await self._settled.load(topic.topic_id) if topic.name.startswith(DEAD_LETTER_PREFIX) else None
        asleep = self._known_in(topic) - {each.group_id for each in self._loaded(topic) if each.has_queues}
        self._offsets.look(place)
        try:
            found = await self._reader.run(partial(front, place=place, groups=asleep))
        finally:
            pulled = self._offsets.looked(place)
        # No await from here on: progress and leases must not change until the unit is submitted.
        loaded = self._loaded(topic)
        if not self._is_free(topic) or not all(each.is_loaded.is_set() for each in loaded):
            return None
        found = found._replace(pulled=min(found.pulled, pulled))
        readers = {each.group_id for each in loaded if each.has_queues} | {each.group_id for each in found.asleep}
        owed = {group_id for group_id in readers if self._names.reads(group_id, topic.name)}
        if self._names.leaves(topic.name):
            if not owed:  # the forwarder has not subscribed yet
                return None
            found = found._replace(pulled=NOBODY)
        step = _plan(topic, place, found, _Terms(keep, over_bytes, self._age_by_ms(), owed), loaded, settled)
        if step is None:
            return None
        ops = step.ops
        freed: list[tuple[GroupSubscription, list[tuple[SubscribedQueue, int]]]] = []
        for subscription in loaded:
            if not subscription.has_queues:
                continue
            queue = subscription.queues[place.queue_id]
            ops += queue.skip_to(step.begin)
            at = [(queue, offset) for offset, _ in found.rows if offset < step.begin and queue.order.is_grouped(offset)]
            freed += [(subscription, at)] if at else []
        if settled is not None:
            ops += [*settled.skip_to(step.begin), _outcomes_erased(place, step.begin)]
        done = self._commits.submit(ops)
        self._note(place, step)
        for subscription, places in freed:
            subscription.release_after(done, places)
        await self._commits.committed(done)
        return step

    def _loaded(self, topic: Topic) -> list[GroupSubscription]:
        return self._subscriptions.to(topic.topic_id)

    def _is_free(self, topic: Topic) -> bool:
        """Return True if a topic exists and no procedure concerns it."""
        known = self._names.topics.get(topic.name)
        return known is not None and known.topic_id == topic.topic_id and not self._procedures.is_at_work(topic)

    def _note(self, place: Place, step: _Step) -> None:
        self._subscriptions.shortened(place, step.begin)
        self.total = self.total.plus(step.removed)
        self._removed_bytes += step.removed.size_bytes
        self._to_reclaim[place] = step.begin

    # -- lanes --------------------------------------------------------------------------------------------------------

    async def _shorten_lane(self, key: tuple[int, int], lane: Topic) -> RemovedMessages:
        """Remove the finished part of a retry lane."""
        place = Place(lane.topic_id, 0)
        topic = self._names.topics_by_id[key[1]]
        known = self._subscriptions.get(*key)
        if known is not None and (known.lane is None or not known.is_loaded.is_set()):
            return _NOTHING
        floor = known.lane.floor if known is not None and known.lane is not None else 0
        is_read = bool(topic.index_properties)
        found = await self._reader.run(partial(finished, place=place, group_id=key[0], floor=floor, is_read=is_read))
        if not self._is_free(topic) or found.begin == found.end:
            return _NOTHING
        step = _Step(
            found.end, RemovedMessages(0, 0, found.size_bytes, found.end - found.begin), _removal(place, *found[:2])
        )
        done = self._commits.submit(step.ops)
        self._note(place, step)
        await self._commits.committed(done)
        return step.removed


class _Terms(NamedTuple):
    """Criteria for the removal of messages from one queue."""

    keep: Keep
    over_bytes: int  # excess bytes of the queue
    now_ms: int  # 0: the clock is not steady, so no message is old
    owed: Collection[int]  # messages unread by these groups stay; other groups no longer read here


def _plan(
    topic: Topic,
    place: Place,
    found: QueueFront,
    terms: _Terms,
    loaded: Sequence[GroupSubscription],
    settled: GroupQueue | None,
) -> _Step | None:
    """Return the removal of messages from the front, or None if the first message stays."""
    awake = [each.queues[place.queue_id] for each in loaded if each.has_queues]
    awake_ids = {each.group_id for each in loaded if each.has_queues}
    readers = [*awake, *(each for each in found.asleep if each.group_id not in awake_ids)]
    readers += [settled] if settled is not None else []
    is_known = bool(readers) or found.pulled < NOBODY
    stop = min((min(queue.leases) for queue in awake if queue.leases), default=NOBODY)
    if terms.keep.unread:
        owed = [each.floor for each in readers if each is settled or each.group_id in terms.owed]
        stop = min(stop, found.pulled, *owed)
    events: list[Op] = []
    over_bytes, begin, count = terms.over_bytes, found.begin, 0
    for offset, record in found.rows:
        is_old = terms.keep.time_ms and record.stored_at_ms + terms.keep.time_ms <= terms.now_ms
        if offset >= stop or not (is_old or over_bytes > 0):
            break
        if not (is_known and found.pulled > offset and all(queue.is_finished(offset) for queue in readers)):
            events.append(Emit(_expired(topic, place, record), offset))
        over_bytes -= size_of(record)
        begin, count = offset + 1, count + 1
    if not count:
        return None
    removed = RemovedMessages(count, len(events), terms.over_bytes - over_bytes)
    return _Step(begin, removed, [*events, *_removal(place, found.begin, begin)])


def _removal(place: Place, begin: int, new_begin: int) -> list[Op]:
    rows = Delete(Family.QUEUE, pack_queue_key(*place, begin), pack_queue_key(*place, new_begin))
    return [rows, Put(Family.META, begin_key(*place), pack_u64(new_begin))]


def _outcomes_erased(place: Place, stop: int) -> Delete:
    first, last = (outcome_key(place.topic_id, offset) for offset in (0, stop))
    return Delete(Family.GROUP, first, last)


def _expired(topic: Topic, place: Place, record: QueuedMessage) -> bytes:
    what = (record.deliver_at_ms, record.message_id)
    return encode_event(EventKind.EXPIRED, topic.topic_id, 0, place.queue_id, 0, *what)
