"""What each group did with one message that is or was in a queue, for operators who ask about it.

    not finished    READY, or LEASED
    finished        and a copy of it waits, RETRYING; is visible in the group's lane, as there; or is dead, DEAD
                    and there is no copy: ACKNOWLEDGED, or passed over, which a bitmap does not tell apart

Nothing is guessed. That a message was acknowledged is said where the group passed over nothing of the topic, ever, by
its ledger: by no filter, no reset, not by where it began, and nothing was removed before it had finished it. Elsewhere
it is FINISHED; and UNKNOWN if the message is gone from its queue as well. The ids of copies are known as long as that
of the message: they were written later.

A group that pulls says how far it has read, and no more than that.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from broker_adapter.contracts.limits import GROUPS_MAX
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Clock
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.queue_front import progress as stored
from dmq.broker.groups.subscriptions import Subscriptions
from dmq.broker.io.commits import Commits
from dmq.broker.io.queue_log import Place
from dmq.broker.io.reader import Reader
from dmq.broker.operations.progress import Progress
from dmq.broker.topics.registry import Group, Names, Topic
from dmq.states import MessageState
from dmq.store.schema.failure_reason import decode_reason
from dmq.store.schema.group import committed_range, decode_exception, decode_outcome, outcome_key, unpack_group_key
from dmq.store.schema.index import REMEMBERED, CopyPlace, EntryState, Receipt, copy_place
from dmq.store.schema.keys import Family, pack_queue_key, reset_key, unpack_u64
from dmq.store.schema.ledger import Term, decode_ledger, ledger_key
from dmq.store.schema.record import WAITING_HEADER_BYTES, History, decode_history, decode_queued
from dmq.store.store import Store
from dmq.trail.events import EventKind
from retry.failure_reason import FailureReason

_LOOKS_MAX = 8  # of which each but the first finds that it failed once more since the one before
_PASSED_OVER = frozenset((int(EventKind.FILTERED), int(Term.BEFORE), int(Term.SKIPPED)))


class GroupState(NamedTuple):
    """What a group did with a message. ``attempt``: of LEASED this one, of READY and RETRYING the next; 0: not known.

    ``at_ms``: when it is due, its lease ends, or it died; else 0. ``is_paused``: READY, and the group is paused.
    ``outcome``: of DEAD, what became of the dead letter, with its time and note; else empty. ``failed_at_ms`` is when
    the group failed it last, 0 if that is not known, and ``failure`` why.
    """

    group: str
    state: MessageState
    attempt: int = 0
    at_ms: int = 0
    is_paused: bool = False
    outcome: str = ""
    outcome_at_ms: int = 0
    outcome_note: str = ""
    failed_at_ms: int = 0
    failure: FailureReason | None = None


class Where(NamedTuple):
    """A message as it was accepted. ``is_redriven``: not into a queue of its topic, but to one group alone."""

    topic: Topic
    message_id: bytes
    queue_id: int
    queue_offset: int
    is_there: bool = True  # it was not removed from its queue
    is_redriven: bool = False


class _Copy(NamedTuple):
    """A copy of a message that a group failed, or of one that was redriven to it."""

    place: CopyPlace
    receipt: Receipt
    is_dead: bool

    @property
    def waits(self) -> bool:
        """Whether it is on the timeline."""
        return self.receipt.state is EntryState.WAITING

    @property
    def order(self) -> tuple[bool, int, int, bool]:
        """What is greater of a later one, or of one to come; a retry that was ended has the id of its letter."""
        return self.waits, self.place.epoch, self.place.attempt, self.is_dead


class _Kept(NamedTuple):
    """What is stored of a group and a message."""

    copies: list[_Copy]
    last: _Copy | None  # of them
    is_acknowledged: bool  # if it is finished where it lies: by the group itself, for certain


class GroupStates:
    """Looks at one message. Belongs to the event loop; reads a few rows for each group that is known."""

    def __init__(
        self, names: Names, commits: Commits, reader: Reader, subscriptions: Subscriptions, progress: Progress
    ) -> None:
        self._names = names
        self._commits = commits
        self._reader = reader
        self._subscriptions = subscriptions
        self._progress = progress
        self._clock: Clock = commits.store.clock

    async def of(self, where: Where) -> list[GroupState]:
        """Return what each group that reads the topic did with the message, by name."""
        committed = {} if where.is_redriven else await self._reader.run(lambda store: _committed(store, where))
        readers = await self._readers(where)
        pulling = [each for each in self._known(where) if each.group_id in committed and each not in readers]
        found = await asyncio.gather(
            *(self._state(each, where) for each in readers),
            *(self._pulled(each, where, committed[each.group_id]) for each in pulling),
        )
        return sorted(each for each in found if each is not None)

    def _known(self, where: Where) -> list[Group]:
        return [each for each in self._names.groups.values() if self._names.reads(each.group_id, where.topic.name)]

    async def _readers(self, where: Where) -> list[Group]:
        known = self._known(where)
        if where.is_redriven:
            return [each for each in known if (each.group_id, where.topic.topic_id) in self._names.lanes]
        return await self._progress.readers_of(where.topic, known) if known else []

    async def _pulled(self, group: Group, where: Where, committed: int) -> GroupState:
        dead = [each for each in (await self._kept(group, where)).copies if each.is_dead]
        if dead:
            last = max(dead, key=lambda each: each.order)
            return await self._failed(group, last, await self._dead(group, last))
        is_read = where.queue_offset < committed
        return GroupState(group.name, MessageState.FINISHED if is_read else MessageState.READY)

    async def _state(self, group: Group, where: Where) -> GroupState | None:
        progress = self._subscriptions.get(group.group_id, where.topic.topic_id)
        is_live = progress is not None and progress.is_loaded.is_set()
        if progress is None or not is_live:
            progress = await self._progress.load(group.group_id, where.topic)
        queue = None if where.is_redriven else progress.queue_at(where.topic.topic_id, where.queue_id)
        if queue is not None and not queue.is_finished(where.queue_offset):
            held = self._held(group, queue, where.queue_offset, 0, is_live=is_live)
            return await self._hidden(queue, where.queue_offset, held)
        seen: _Copy | None = None
        for _ in range(_LOOKS_MAX):
            # What is finished in memory may have become a copy that is on its way to the disk.
            await self._commits.flush()
            kept = await self._kept(group, where)
            last = kept.last
            if last is None and where.is_redriven:
                return None
            if last == seen:
                if kept.is_acknowledged:
                    return GroupState(group.name, MessageState.ACKNOWLEDGED)
                return GroupState(group.name, MessageState.FINISHED if where.is_there else MessageState.UNKNOWN)
            if last is None:  # it was forgotten between two looks
                break
            if last.is_dead:
                return await self._failed(group, last, await self._dead(group, last))
            if last.waits:
                state = GroupState(group.name, MessageState.RETRYING, last.place.attempt + 1, last.receipt.at_ms)
                return await self._failed(group, last, state)
            if progress.lane is None:  # it was made since
                break
            offset = last.receipt.queue_offset
            if not progress.lane.is_finished(offset):
                held = self._held(group, progress.lane, offset, last.place.attempt, is_live=is_live)
                return await self._hidden(progress.lane, offset, await self._failed(group, last, held, progress.lane))
            seen = last
        return GroupState(group.name, MessageState.UNKNOWN)

    def _held(self, group: Group, queue: GroupQueue, offset: int, attempts_before: int, *, is_live: bool) -> GroupState:
        """Return the state of what is not finished."""
        lease = queue.leases.get(offset)
        if lease is None:
            attempt = attempts_before + queue.next_attempt(offset)
            return GroupState(group.name, MessageState.READY, attempt, is_paused=bool(group.paused_since_ms))
        ends_ms = self._clock.now_ms() + lease.ends_ms - self._clock.boot_ms() if is_live else 0
        return GroupState(group.name, MessageState.LEASED, attempts_before + lease.attempt, ends_ms)

    async def _dead(self, group: Group, last: _Copy) -> GroupState:
        """Return the state of a dead letter, with its outcome."""
        found = GroupState(group.name, MessageState.DEAD, 0, last.receipt.at_ms)
        letters = self._names.topics.get(dead_letter_topic(group.name))
        if letters is None:
            return found
        (value,) = await self._reader.values(Family.GROUP, [outcome_key(letters.topic_id, last.receipt.queue_offset)])
        if value is None:
            return found
        outcome = decode_outcome(value)
        return found._replace(outcome=outcome.what, outcome_at_ms=outcome.at_ms, outcome_note=outcome.note)

    async def _failed(self, group: Group, copy: _Copy, state: GroupState, lane: GroupQueue | None = None) -> GroupState:
        """Return a state with the failure that made a copy; as it is if the copy is not there any more."""
        letters = self._names.topics.get(dead_letter_topic(group.name))
        topic_id = lane.topic_id if lane is not None else letters.topic_id if letters is not None else 0

        def read(store: Store) -> History | None:
            if copy.waits:
                (value,) = store.get_many(Family.TIMELINE, [copy.receipt.key])
                return decode_history(value, WAITING_HEADER_BYTES) if value is not None else None
            (value,) = store.get_many(Family.QUEUE, [pack_queue_key(topic_id, 0, copy.receipt.queue_offset)])
            return decode_queued(value).history if value is not None else None

        history = await self._reader.run(read)
        if history is None or not history.failure:
            return state
        return state._replace(failed_at_ms=history.last_failed_at_ms, failure=decode_reason(history.failure))

    async def _hidden(self, queue: GroupQueue, offset: int, state: GroupState) -> GroupState:
        """Return a state with the failure that a hidden lease follows on, if its row tells of one."""
        lease = queue.leases.get(offset)
        if lease is None or not lease.has_reason:
            return state
        (value,) = await self._reader.values(Family.GROUP, [queue.exception_key(offset)])
        row = decode_exception(value) if value is not None else None
        if row is None or not row.failure:
            return state
        return state._replace(failed_at_ms=row.set_at_ms, failure=decode_reason(row.failure))

    async def _kept(self, group: Group, where: Where) -> _Kept:
        letters = self._names.topics.get(dead_letter_topic(group.name))
        lane = self._names.lanes.get((group.group_id, where.topic.topic_id))
        is_forwarder = group.group_id == self._names.forwarder_id

        def read(store: Store) -> _Kept:
            reset, *rows = store.get_many(
                Family.META,
                [
                    reset_key(group.group_id, where.topic.topic_id),
                    *(ledger_key(each.topic_id, group.group_id) for each in (where.topic, lane) if each is not None),
                ],
            )
            counts = [decode_ledger(row) for row in rows if row is not None]
            is_passed_over = any(each.get(term) for each in counts for term in _PASSED_OVER)
            epoch = unpack_u64(reset) if reset is not None else -1
            copies = _copies(store, group.group_id, where, is_dead=False)
            if letters is not None:
                copies += _copies(store, letters.topic_id, where, is_dead=True)
            # Who died before a reset may have been handed out since.
            copies = [each for each in copies if not (each.is_dead and each.place.epoch <= epoch)]
            last = max(copies, key=lambda each: each.order, default=None)
            is_sure = reset is None and not is_passed_over and not is_forwarder
            # In memory, what was removed counts as finished, and is told of when the group writes something next.
            place, offset = Place(where.topic.topic_id, where.queue_id), where.queue_offset
            if last is not None and lane is not None:
                place, offset = Place(lane.topic_id, 0), last.receipt.queue_offset
            is_stored = (
                is_sure and (found := stored(store, group.group_id, place)) is not None and found.is_finished(offset)
            )
            return _Kept(copies, last, is_stored)

        return await self._reader.run(read)


def _copies(store: Store, scope: int, where: Where, *, is_dead: bool) -> list[_Copy]:
    found = [
        _Copy(copy_place(index_id), receipt, is_dead)
        for index_id, receipt in store.copies(scope, where.message_id)
        if receipt.state not in REMEMBERED
    ]
    place = (0, 0) if where.is_redriven else (where.queue_id, where.queue_offset)
    return [each for each in found if each.place[:3] == (where.topic.topic_id, *place)]


def _committed(store: Store, where: Where) -> dict[int, int]:
    """Return where groups that pull continue on the queue of a message, by group."""
    rows = store.scan(Family.GROUP, *committed_range(where.topic.topic_id, where.queue_id), limit=GROUPS_MAX).rows
    return {unpack_group_key(key)[-1]: unpack_u64(value) for key, value in rows}
