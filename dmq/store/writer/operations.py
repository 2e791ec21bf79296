"""Operations on the store: plain values, committed together or not at all.

A *unit* is a list of ops from one caller. The writer commits whole units, many units to a batch. Ops that accept a
message (``Schedule``, ``Append``) are idempotent on ``(scope, message_id)``. If that id is already known, they write
nothing, record no event, and return the first receipt, marked ``repeated``.

*A unit is whole.* An op is skipped if its message is already known or its entry no longer waits. The ops that rely on
it must then be skipped as well:

- Ops that rely on an entry's removal from the timeline are ``instead`` of its ``Withdraw``.
- A copy of a message that the same unit finishes is written even if its id is known (``IfKnown.WRITE``).
- By default (``IfKnown.REFUSE``) the whole unit is refused if the op would be skipped. A unit that only accepts,
  moves or withdraws messages is excepted: none of its ops finishes, sets, deletes or records anything else.

A caller with state in memory ahead of the disk must handle such a refusal.

Every op that changes state carries ``event``, the encoded audit event that is written in the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import EntryState, Receipt


class IfKnown(IntEnum):
    """Reaction if the id of an accepting op is already known in its scope, or the entry to withdraw is gone."""

    REFUSE = 0  # refuse the unit with ``UnitRefused``; same as ANSWER if the unit only accepts or moves messages
    ANSWER = 1  # skip only this op, as its receipt shows: no other op of the unit relies on it
    WRITE = 2  # write it without looking up the id: the op moves a message and accepts none


class UnderKey(NamedTuple):
    """Own key of an accepted message, and the rule for a message that is already pending under it.

    Either the pending message is withdrawn and remembered as REPLACED, or it stays and the new message is ABSORBED. An
    absorbed message is only recorded as such, and its receipt names the pending message. The writer decides, so the
    rule never races with a hand-over.
    """

    row: bytes  # dmq.store.schema.messages.own_keys.own_key_row
    keeps_first: bool
    event: Callable[[int, bytes], bytes]  # event of the outcome, from the time and the packed id of the pending message


class Schedule(NamedTuple):
    """Store a message on the timeline until it is due. The writer assigns its sequence and its timeline key.

    With ``is_new`` the id was just generated, and is not looked up. An empty event is not recorded. ``half_body`` is a
    second row, under ``half_body_key`` of the sequence. With ``under`` the message has an own key while it is pending.
    The op that moves or removes the entry must then name that key's row (``own_key``).
    """

    scope: int
    message_id: bytes  # packed
    deliver_at_ms: int
    record: bytes  # dmq.store.schema.messages.record.encode_waiting
    event: bytes
    is_new: bool = False
    if_known: IfKnown = IfKnown.REFUSE
    half_body: bytes = b""  # dmq.store.schema.messages.record.encode_half_body
    under: UnderKey | None = None


class Bound(NamedTuple):
    """Bound on a topic's pending messages. A unit that exceeds it is refused with ``OverBound``.

    Bounds must be the last ops of their unit. Only messages that the unit schedules in ``scopes``, and that are not yet
    known, count as additional. The writer decides on the state of all earlier commits, so two units never pass for the
    same free place. With ``is_closed`` no new message is accepted, not even directly into a queue.
    """

    scopes: Sequence[int]  # counted together: a topic, and its half messages
    count_max: int | None  # entries; None: no bound
    bytes_max: int | None
    is_closed: bool = False


class AppendedRange(NamedTuple):
    """Messages that a batch appended to a queue: their queue values, and the offset of the first."""

    first: int
    records: list[bytes]

    @property
    def end(self) -> int:
        """Offset after the last appended message."""
        return self.first + len(self.records)


Appended = dict[tuple[int, int], AppendedRange]  # by topic id and queue id


class Append(NamedTuple):
    """Append a message to a queue. The writer assigns its offset.

    With ``under`` the rule of its own key applies to a message that is pending under that key; see ``UnderKey``.
    """

    scope: int
    message_id: bytes  # packed
    topic_id: int
    queue_id: int
    record: bytes  # dmq.store.schema.messages.record.encode_queued
    event: bytes
    if_known: IfKnown = IfKnown.REFUSE
    under: UnderKey | None = None


class HandOver(NamedTuple):
    """Move a due message from the timeline to the end of a queue: index, append and event in the same batch.

    Nothing is done if the message was withdrawn after it was read. The receipt then has no state, and no other op of
    the unit may rely on the hand-over.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # packed
    deliver_at_ms: int  # its true delivery time
    topic_id: int
    queue_id: int
    record: bytes  # dmq.store.schema.messages.record.encode_queued
    event: bytes
    size: int  # dmq.store.schema.messages.record.waiting_bytes of its row
    is_half: bool = False  # a half message; its separate body row is deleted with it
    own_key: bytes = b""


class Withdraw(NamedTuple):
    """Remove an entry from the timeline before it is due, and execute ``instead``. Do nothing if it no longer waits.

    ``key`` is the timeline key under which it was read. The writer checks it, so an entry is either handed over or
    withdrawn, never both. The receipt's state is ``WITHDRAWN``, or ``None`` if the entry no longer waits there. Ops in
    ``instead`` move the entry, so they are executed even if its new id is known.

    ``event`` is recorded with the entry's sequence. With ``is_remembered`` the id stays known, as ``outcome``, as long
    as that of a finished entry: a repeated send writes nothing and gets that receipt. Otherwise the id is free.
    """

    key: bytes
    scope: int
    message_id: bytes  # as it was scheduled
    deliver_at_ms: int  # its true delivery time
    size: int  # dmq.store.schema.messages.record.waiting_bytes of its row
    instead: Sequence[Append | Delete | Emit | Put | Schedule | Tally] = ()
    event: bytes = b""
    is_remembered: bool = False
    outcome: EntryState = EntryState.WITHDRAWN
    if_gone: IfKnown = IfKnown.REFUSE
    own_key: bytes = b""


class Reschedule(NamedTuple):
    """Move a waiting entry to another time, with another record.

    It stays the same entry and keeps its sequence. Nothing is done if it no longer waits under ``key``; the receipt
    then has no state. ``by_reader`` means that the reader itself moves a row that it has read. Otherwise the reader may
    have read the row already; the writer then prevents its hand-over. An entry already scheduled for that time stays
    unchanged, and its receipt has the state WAITING. ``also`` is set in both cases, unless the entry is gone.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # as it was scheduled
    due_ms: int  # its current true delivery time
    deliver_at_ms: int  # its new delivery time
    record: bytes  # dmq.store.schema.messages.record.encode_waiting
    event: bytes  # not recorded if empty
    half_body: bytes = b""  # as in ``Schedule``, if its body was in its row until now
    if_gone: IfKnown = IfKnown.REFUSE
    by_reader: bool = True
    own_key: bytes = b""
    also: Put | None = None


class Hold(NamedTuple):
    """Move a due entry to its topic's held entries, which sort after all times, in the order of their due times.

    It stays the same entry with its sequence, record and delivery time, and counts as before. Nothing is done if it was
    withdrawn after it was read; the receipt then has no state. There is no event, since the entry stays pending.
    """

    key: bytes  # its timeline key
    scope: int  # the topic
    message_id: bytes  # as it was scheduled
    record: bytes  # its timeline value


class Restore(NamedTuple):
    """Put an entry of another store on the timeline, under its own key and with its own sequence.

    Only for a store that has no reader yet. The caller has checked that the entry is not in the store, and that its own
    key is free.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # as it was scheduled
    deliver_at_ms: int  # its true delivery time
    record: bytes  # dmq.store.schema.messages.record.encode_waiting
    half_body: bytes = b""  # as in ``Schedule``
    own_key: bytes = b""


class Occurrence(NamedTuple):
    """Message that a schedule sends now: accepted and appended to its queue in one step."""

    message_id: bytes  # packed
    queue_id: int
    record: bytes  # dmq.store.schema.messages.record.encode_queued
    accepted: bytes  # its events, in their order
    delivered: bytes
    occurred: bytes  # recorded with the sequence of the schedule's entry


class Put(NamedTuple):
    """Set a row to an absolute value. The last value in a batch wins."""

    family: Family
    key: bytes
    value: bytes


class Recur(NamedTuple):
    """Append occurrences of a schedule to a queue, and move the schedule's entry to its next time.

    If ``record`` is empty the entry is removed instead. All of it is done, or nothing if the entry was withdrawn after
    it was read. The receipt then has no state. The entry keeps its sequence; each occurrence gets a new one.
    """

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # as it was scheduled
    due_ms: int  # its time so far
    topic_id: int
    occurrences: Sequence[Occurrence]
    progress: Put
    deliver_at_ms: int = 0  # its new time
    record: bytes = b""  # dmq.store.schema.messages.record.encode_waiting; empty: the schedule is over, or pauses
    event: bytes = b""  # event of the end or pause; not recorded if empty


class Done(NamedTuple):
    """Mark the timeline below ``mark`` as finished once this unit is committed.

    The unit was decided at ``decided_ms``. The events of its batch are not dated before that, even if the clock was set
    back.
    """

    mark: int
    decided_ms: int = 0


class Delete(NamedTuple):
    """Delete a row, or with ``stop`` the range ``[key, stop)``. Rows set by the same batch survive a range delete."""

    family: Family
    key: bytes
    stop: bytes = b""


class Emit(NamedTuple):
    """Record an audit event of the unit's other rows; ``queue_offset`` is that of the message concerned, or -1."""

    event: bytes
    queue_offset: int = -1


class Tally(NamedTuple):
    """Add ``by`` to a ledger term that is not derived from events. Has no effect in a store without a ledger."""

    topic_id: int
    group_id: int  # 0: the topic itself
    term: int  # dmq.store.schema.accounting.ledger.Term
    by: int


class IndexProperties(NamedTuple):
    """Index user properties of a topic from this op on, and delete the rows of all its other ones.

    The unit also sets the topic's settings, from which the next run reads the names.
    """

    topic_id: int
    names: Sequence[str]


class IndexMessages(NamedTuple):
    """Add the rows of stored messages for the indexed properties of their topics.

    ``keys`` are those of index rows of pending messages, or of messages in queues. Messages that are gone are skipped.
    """

    family: Family
    keys: Sequence[bytes]


class IndexBuilt(NamedTuple):
    """Note that all messages with an indexed property of a topic have their rows."""

    topic_id: int
    names: Sequence[str]


class CloseLedger(NamedTuple):
    """Delete the ledger of a topic with all its groups or, with a group, only the topic's ledger for that group."""

    topic_id: int
    group_id: int = 0


class HoldOutbox(NamedTuple):
    """Protect the audit events below ``below`` from being cut, since they are being exported. 0 ends the protection."""

    below: int


class DropOutbox(NamedTuple):
    """Remove the exported audit rows that end at or below ``below``, and end their protection.

    ``starts`` are the first sequences of those rows, ascending. ``total_bytes`` are the cumulative sizes of their
    values. The writer therefore need not read the dropped rows, and does not subtract rows twice that it cut meanwhile.
    """

    below: int
    starts: Sequence[int]
    total_bytes: Sequence[int]


class SkipOutbox(NamedTuple):
    """Continue the audit sequences at ``to``, from this batch on, and delete the rows below. Never moves backwards."""

    to: int


Op = (
    Schedule
    | Append
    | HandOver
    | Withdraw
    | Reschedule
    | Recur
    | Hold
    | Restore
    | Done
    | Put
    | Delete
    | Emit
    | Tally
    | Bound
    | IndexProperties
    | IndexMessages
    | IndexBuilt
    | CloseLedger
    | HoldOutbox
    | DropOutbox
    | SkipOutbox
)


def scheduled_times(units: Sequence[Sequence[Op]]) -> tuple[list[int], bool]:
    """Return the times under which these units put entries on the timeline, and whether any of them is moved.

    A moved entry keeps its sequence, which is smaller than those that the batch will assign.
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
