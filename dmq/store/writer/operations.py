"""What parts ask the store to do: plain values, committed together or not at all.

A *unit* is a list of ops from one caller; the writer commits whole units, many units to a batch. Ops that accept a
message (``Schedule``, ``Append``) are idempotent on ``(scope, message_id)``: when it is known already, nothing is
written for them, their event is not recorded, and their receipt is the first one, marked ``repeated``.

*A unit is whole.* An op that is passed over, since its message is known already or its entry no longer waits, takes
with it what relies on it. So ops that rely on an entry's leaving the timeline are ``instead`` of its ``Withdraw``; a
copy of what the same unit finishes is written whatever is known of its id (``IfKnown.WRITE``); and where an op says
nothing (``IfKnown.REFUSE``), its whole unit is refused if it would be passed over while there is anything beside it
that finishes, sets, deletes or tells something. Who is ahead of the disk in memory must not leave it at that.

Every op that changes state carries ``event``, the encoded audit event that goes into the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from dmq.store.schema.index import EntryState, Receipt
from dmq.store.schema.keys import Family


class IfKnown(IntEnum):
    """What follows if the id of an accepting op is known in its scope, or what is to be withdrawn is gone."""

    REFUSE = 0  # its unit is refused with ``UnitRefused``; of a unit that only moves messages, as ANSWER
    ANSWER = 1  # only this op is passed over, and its receipt says so: nothing beside it relies on it
    WRITE = 2  # it is written all the same, and the id is not looked for: it moves a message, and accepts none


class UnderKey(NamedTuple):
    """The own key of a message that is accepted, and what follows if another one waits under it.

    That one is withdrawn, and remembered as REPLACED; or it stays, and nothing is written for this one but that it was
    ABSORBED: its receipt says so, and by whom. Whichever it is, the writer decides between that and a hand-over.
    """

    row: bytes  # dmq.store.schema.own_keys.own_key_row
    keeps_first: bool
    event: Callable[[int, bytes], bytes]  # of what follows, from the time and the packed id of the message that waits


class Schedule(NamedTuple):
    """Keep a message until it is due. The writer assigns its sequence and its timeline key.

    With ``is_new`` the id was made a moment ago, and is not looked for. No event: none is recorded. ``half_body`` is a
    second row, under ``half_body_key`` of the sequence. With ``under`` it has an own key as long as it waits: the op
    that takes it off the timeline, or moves it, names that key's row (``own_key``).
    """

    scope: int
    message_id: bytes  # packed
    deliver_at_ms: int
    record: bytes  # dmq.store.schema.record.encode_waiting
    event: bytes
    is_new: bool = False
    if_known: IfKnown = IfKnown.REFUSE
    half_body: bytes = b""  # dmq.store.schema.record.encode_half_body
    under: UnderKey | None = None


class Bound(NamedTuple):
    """What a topic may have waiting: the last ops of a unit, which is refused with ``OverBound`` if it would be more.

    Only what the unit itself schedules in ``scopes``, and what is not known already, counts as more. The writer
    decides, with all that was committed before: there is no moment in which two units are both let through for the
    same room. ``is_closed``: nothing new is accepted, whatever waits, not even into a queue.
    """

    scopes: Sequence[int]  # counted together: a topic, and its half messages
    count_max: int | None  # entries; None: no bound
    bytes_max: int | None
    is_closed: bool = False


class Growth(NamedTuple):
    """What a batch put at the end of a queue: queue values, and the offset of the first."""

    first: int
    records: list[bytes]

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.first + len(self.records)


Appended = dict[tuple[int, int], Growth]  # by topic id and queue id


class Append(NamedTuple):
    """Put a message at the end of a queue. The writer assigns its offset. ``under`` decides what waits; see there."""

    scope: int
    message_id: bytes  # packed
    topic_id: int
    queue_id: int
    record: bytes  # dmq.store.schema.record.encode_queued
    event: bytes
    if_known: IfKnown = IfKnown.REFUSE
    under: UnderKey | None = None


class HandOver(NamedTuple):
    """Move a due message from the timeline to the end of a queue: index, append and event in the same batch.

    Nothing is done if it was withdrawn since it was read; its receipt then has no state, and nothing may rely on it.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # packed
    deliver_at_ms: int  # its true delivery time
    topic_id: int
    queue_id: int
    record: bytes  # dmq.store.schema.record.encode_queued
    event: bytes
    size: int  # dmq.store.schema.record.waiting_bytes of its row
    is_half: bool = False  # a half message, whose body in a row of its own goes with it
    own_key: bytes = b""


class Withdraw(NamedTuple):
    """Take an entry off the timeline before it is due, and do ``instead``; nothing at all if it no longer waits.

    ``key`` is the timeline key under which it was read. The check is made by the writer, so an entry is either handed
    over or withdrawn, never both. The receipt's state is ``WITHDRAWN``, or ``None`` if it no longer waits there. What
    is done ``instead`` moves the entry, so it is done whatever is known of its new id.

    ``event`` is recorded with the entry's sequence. With ``is_remembered`` the id is known, as ``outcome``, as long as
    that of a finished entry: a send repeated with it writes nothing, and its receipt says so. Else the id is free.
    """

    key: bytes
    scope: int
    message_id: bytes  # as it was scheduled
    deliver_at_ms: int  # its true delivery time
    size: int  # dmq.store.schema.record.waiting_bytes of its row
    instead: Sequence[Append | Delete | Emit | Put | Schedule | Tally] = ()
    event: bytes = b""
    is_remembered: bool = False
    outcome: EntryState = EntryState.WITHDRAWN
    if_gone: IfKnown = IfKnown.REFUSE
    own_key: bytes = b""


class Reschedule(NamedTuple):
    """Let an entry wait under another time and with another record.

    It stays the same entry, with its sequence. Nothing is done if it no longer waits under ``key``; its receipt then
    has no state. Unless the reader asks for it itself, about a row that it holds (``by_reader``), the reader may have
    read the row already: it does not hand it over. An entry that is to wait until the time that it has is left as it
    is, and its receipt says that it waits.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # as it was scheduled
    due_ms: int  # its true time so far
    deliver_at_ms: int  # its new one
    record: bytes  # dmq.store.schema.record.encode_waiting
    event: bytes  # none is recorded if it is empty
    half_body: bytes = b""  # as in ``Schedule``, for a row that held its body itself
    if_gone: IfKnown = IfKnown.REFUSE
    by_reader: bool = True
    own_key: bytes = b""


class Hold(NamedTuple):
    """Let a due entry wait behind all times, where its topic's held entries lie in the order in which they were due.

    It stays the same entry, with its sequence, its record and its delivery time, and is counted as before. Nothing is
    done if it was withdrawn since it was read; its receipt then has no state. There is no event: it waits as it did.
    """

    key: bytes  # its timeline key
    scope: int  # the topic
    message_id: bytes  # as it was scheduled
    record: bytes  # its timeline value


class Occurrence(NamedTuple):
    """A message that a schedule sends now: accepted and in its queue in one."""

    message_id: bytes  # packed
    queue_id: int
    record: bytes  # dmq.store.schema.record.encode_queued
    accepted: bytes  # its events, in their order
    delivered: bytes
    occurred: bytes  # recorded with the sequence of the schedule's entry


class Put(NamedTuple):
    """Set a row to an absolute value; the last one of a batch wins."""

    family: Family
    key: bytes
    value: bytes


class Recur(NamedTuple):
    """Put occurrences of a schedule into a queue, and let its entry wait for its next time or, without a record, go.

    All of it, or nothing if the entry was withdrawn since it was read; its receipt then has no state. The entry keeps
    its sequence; each occurrence has one of its own.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # as it was scheduled
    due_ms: int  # its time so far
    topic_id: int
    occurrences: Sequence[Occurrence]
    progress: Put
    deliver_at_ms: int = 0  # its new time
    record: bytes = b""  # dmq.store.schema.record.encode_waiting; empty: the schedule is over, or pauses
    event: bytes = b""  # that it is; none is recorded if it is empty


class Done(NamedTuple):
    """Everything on the timeline below ``mark`` is finished once this unit is committed.

    The unit was decided at ``decided_ms``: its batch's events are not of before that, though the clock was set back.
    """

    mark: int
    decided_ms: int = 0


class Delete(NamedTuple):
    """Remove a row; with ``stop`` all rows from ``key`` up to, not including, it, but for those that its batch sets."""

    family: Family
    key: bytes
    stop: bytes = b""


class Emit(NamedTuple):
    """Record an audit event that belongs to the rows beside it, and to a message of a queue if it has an offset."""

    event: bytes
    queue_offset: int = -1


class Tally(NamedTuple):
    """Add ``by`` to a term of the ledger that no event tells; nothing in a store that keeps none."""

    topic_id: int
    group_id: int  # 0: the topic itself
    term: int  # dmq.store.schema.ledger.Term
    by: int


class CloseLedger(NamedTuple):
    """Forget the ledger of a topic and all its groups or, with a group, what the topic has for that."""

    topic_id: int
    group_id: int = 0


class HoldOutbox(NamedTuple):
    """Do not cut audit events below ``below`` to keep the bound: they are being exported. 0 lets go."""

    below: int


class DropOutbox(NamedTuple):
    """Remove the audit rows that end at or below ``below``: they were exported. Lets go of what was held.

    ``starts`` are the first sequences of those rows, ascending; ``total_bytes`` are the sizes of their values, each
    with those before it. So the writer need not read what it drops, nor count twice what it cut meanwhile.
    """

    below: int
    starts: Sequence[int]
    total_bytes: Sequence[int]


class SkipOutbox(NamedTuple):
    """Go on numbering audit events from ``to``, this batch's included, and forget the rows below; never backwards."""

    to: int


Op = (
    Schedule
    | Append
    | HandOver
    | Withdraw
    | Reschedule
    | Recur
    | Hold
    | Done
    | Put
    | Delete
    | Emit
    | Tally
    | Bound
    | CloseLedger
    | HoldOutbox
    | DropOutbox
    | SkipOutbox
)


def scheduled_times(units: Sequence[Sequence[Op]]) -> tuple[list[int], bool]:
    """Return the times under which these units put entries on the timeline, and whether one of them is not new there.

    An entry that is not new keeps its sequence, which is smaller than those that the batch will assign.
    """
    times: list[int] = []
    keeps_sequence = False
    for unit in units:
        for op in unit:
            if type(op) is Schedule:
                times.append(op.deliver_at_ms)
            elif type(op) is Reschedule or (type(op) is Recur and op.record):
                times.append(op.deliver_at_ms)
                keeps_sequence = True
            elif type(op) is Withdraw and op.instead:
                times += [other.deliver_at_ms for other in op.instead if type(other) is Schedule]
    return times, keeps_sequence


NO_RECEIPT = Receipt(None, -1, -1, -1, 0, False)
