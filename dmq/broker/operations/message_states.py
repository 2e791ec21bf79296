"""State of one message for each group: for a message that is or was in a queue, on request of an operator.

    not finished    READY, or LEASED
    finished        with a copy: RETRYING if it is pending; as above if it is visible in the retry lane; DEAD if it is a
                    dead letter
                    without a copy: ACKNOWLEDGED or skipped, which a bitmap does not distinguish

The result contains no guesses. ACKNOWLEDGED requires that the group never skipped a message of the topic, by its
ledger. It must not have skipped any by a filter, a reset or its start position, or by removal before it finished.
Otherwise the state is FINISHED, or UNKNOWN if the message is also gone from its queue. The ids of copies stay known at
least as long as the id of the message, because they are written later.

For a group that pulls, only its committed offset is known.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from broker_adapter.contracts.limits import GROUPS_MAX
from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.groups import GroupQueue, Subscriptions
from dmq.broker.groups import progress as stored
from dmq.broker.io import Place
from dmq.broker.operations.progress import ProgressReader
from dmq.broker.topics import BrokerPart, Group, SharedParts, Topic
from dmq.states import MessageState
from dmq.store import Store
from dmq.store.schema.accounting.ledger import Term, decode_ledger, ledger_key
from dmq.store.schema.keys import Family, pack_queue_key, reset_key, unpack_u64
from dmq.store.schema.messages.failure_reason import decode_reason
from dmq.store.schema.messages.index import REMEMBERED, CopyPlace, EntryState, Receipt, copy_place
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, History, decode_history, decode_queued
from dmq.store.schema.topics.group import (
    committed_range,
    decode_exception,
    decode_outcome,
    outcome_key,
    unpack_group_key,
)
from dmq.trail.events import EventKind
from retry.failure_reason import FailureReason

_LOOKS_MAX = 8  # each read after the first is due to another failure since the previous read
_PASSED_OVER = frozenset((int(EventKind.FILTERED), int(Term.BEFORE), int(Term.SKIPPED)))


class GroupState(NamedTuple):
    """State of a message for one group.

    ``attempt``: the current one for LEASED, the next one for READY and RETRYING; 0: unknown. ``at_ms``: due time, end
    of the lease, or time of death; else 0. ``is_paused``: READY, and the group is paused. ``outcome``: for DEAD, the
    outcome of the dead letter, with its time and note; else empty. ``failed_at_ms``: time of the group's last failure,
    0 if unknown. ``failure``: its reason.
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
    """Location of a message as it was accepted.

    ``is_redriven``: it was not sent to a queue of its topic, but redriven to one group.
    """

    topic: Topic
    message_id: bytes
    queue_id: int
    queue_offset: int
    is_there: bool = True  # still stored in its queue
    is_redriven: bool = False


class _Copy(NamedTuple):
    """Copy of a message that a group failed, or that was redriven to it."""

    place: CopyPlace
    receipt: Receipt
    is_dead: bool

    @property
    def waits(self) -> bool:
        """Whether the copy is on the timeline."""
        return self.receipt.state is EntryState.WAITING

    @property
    def order(self) -> tuple[bool, int, int, bool]:
        """Sort key that increases with time; a retry ended by an operator has the same id as its dead letter."""
        return self.waits, self.place.epoch, self.place.attempt, self.is_dead


class _Kept(NamedTuple):
    """Stored facts of one group about one message."""

    copies: list[_Copy]
    last: _Copy | None  # the last of ``copies``
    is_acknowledged: bool  # finished at its last place, by the group itself for certain


class GroupStates(BrokerPart):
    """Reader of message states. It belongs to the event loop, and reads a few rows for each known group."""

    def __init__(self, shared: SharedParts, subscriptions: Subscriptions, progress: ProgressReader) -> None:
        super().__init__(shared)
        self._subscriptions = subscriptions
        self._progress = progress

    async def of(self, where: Where) -> list[GroupState]:
        """Return the state of the message for each group that reads the topic, sorted by name."""
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
            # An offset finished in memory may have a copy that is not durable yet.
            await self._commits.flush()
            kept = await self._kept(group, where)
            last = kept.last
            if last is None and where.is_redriven:
                return None
            if last == seen:
                if kept.is_acknowledged:
                    return GroupState(group.name, MessageState.ACKNOWLEDGED)
                return GroupState(group.name, MessageState.FINISHED if where.is_there else MessageState.UNKNOWN)
            if last is None:  # its id expired between two reads
                break
            if last.is_dead:
                return await self._failed(group, last, await self._dead(group, last))
            if last.waits:
                state = GroupState(group.name, MessageState.RETRYING, last.place.attempt + 1, last.receipt.at_ms)
                return await self._failed(group, last, state)
            if progress.lane is None:  # created since
                break
            offset = last.receipt.queue_offset
            if not progress.lane.is_finished(offset):
                held = self._held(group, progress.lane, offset, last.place.attempt, is_live=is_live)
                return await self._hidden(progress.lane, offset, await self._failed(group, last, held, progress.lane))
            seen = last
        return GroupState(group.name, MessageState.UNKNOWN)

    def _held(self, group: Group, queue: GroupQueue, offset: int, attempts_before: int, *, is_live: bool) -> GroupState:
        """Return the state of an unfinished message: READY or LEASED."""
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
        """Return ``state`` with the failure that made a copy, or unchanged if the copy is gone."""
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
        """Return ``state`` with the failure before a hidden lease or a return, if its row stores one."""
        if not queue.has_row(offset):
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
            # A message dead before a reset may have been delivered since.
            copies = [each for each in copies if not (each.is_dead and each.place.epoch <= epoch)]
            last = max(copies, key=lambda each: each.order, default=None)
            is_sure = reset is None and not is_passed_over and not is_forwarder
            # In memory, removed messages count as finished; their SKIPPED count is stored with the group's next rows.
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
    """Return the committed offsets on the queue of a message, by group."""
    rows = store.scan(Family.GROUP, *committed_range(where.topic.topic_id, where.queue_id), limit=GROUPS_MAX).rows
    return {unpack_group_key(key)[-1]: unpack_u64(value) for key, value in rows}
