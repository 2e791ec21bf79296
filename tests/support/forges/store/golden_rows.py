"""One row of each kind that a store may hold, as the code makes it and as it reads it.

``tests/golden`` keeps their bytes, a file per family. ``python -m support.forges.store.golden_rows``, with ``tests``
as ``PYTHONPATH``, adds the bytes of rows that are new here. It changes none that is there: stores of released versions
hold those.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from broker_adapter.contracts.message import MessageType
from broker_adapter.runtime.clock import ManualClock, Moment
from dmq.acl.quotas import Holder, Quota, Quotas
from dmq.broker.groups.group_queue import DeliveryLease, GroupQueue
from dmq.broker.schedules.firing import waiting_record
from dmq.broker.topics.registry import Group, Names, Topic
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema import keys
from dmq.store.schema.accounting import counts, ledger, outbox
from dmq.store.schema.cell.border import Border, decode_border, encode_border
from dmq.store.schema.cell.clock import ClockRow, Move, decode_clock, decode_moves, encode_clock, encode_moves
from dmq.store.schema.cell.identity import Identity, StorePlace, decode_identity, encode_identity
from dmq.store.schema.cell.position import Position, decode_position, encode_position
from dmq.store.schema.keys import FORMAT_VERSION, Family
from dmq.store.schema.messages import failure_reason, record
from dmq.store.schema.messages import index as of_index
from dmq.store.schema.messages import properties as of_properties
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.own_keys import (
    KeyHolder,
    decode_key_holder,
    encode_key_holder,
    own_key_in,
    own_key_of_row,
    own_key_row,
    own_key_scope,
    row_of,
    without_own_key,
)
from dmq.store.schema.messages.recurring import (
    CatchUp,
    Phase,
    RecurrenceRule,
    ScheduleProgress,
    decode_message,
    decode_progress,
    decode_schedule,
    encode_message,
    encode_progress,
    encode_schedule,
    schedule_keys,
)
from dmq.store.schema.operators.activity import Activity, CallOutcome, decode_activity, encode_activity
from dmq.store.schema.operators.message_jobs import (
    JobMessage,
    MessageFilter,
    MessageJob,
    MessageJobKind,
    decode_job_message,
    decode_message_job,
    encode_job_message,
    encode_message_job,
    job_message_key,
    message_job_key,
)
from dmq.store.schema.operators.orders import Procedure, decode_job, decode_procedure, encode_job, encode_procedure
from dmq.store.schema.spool import (
    TakenMark,
    TypeTotals,
    dead_key,
    decode_dead,
    decode_entry,
    decode_taken,
    decode_totals,
    encode_dead,
    encode_entry,
    encode_taken,
    encode_totals,
    entry_id,
    key_queue_id,
    key_queue_key,
    key_queue_of,
    parked_key,
    parked_number,
    spool_total_key,
    taken_key,
    turn_of,
    uid_key,
)
from dmq.store.schema.topics.group import (
    ExceptionRow,
    LetterOutcome,
    committed_key,
    decode_exception,
    decode_outcome,
    encode_outcome,
    outcome_key,
    unpack_group_row,
)
from dmq.store.schema.topics.names import GROUPED, Keep
from dmq.store.schema.topics.notified import OverdueNotification, decode_overdue, encode_overdue, notified_key
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Op, Put
from dmq.trail.events import EventKind, decode_event, encode_event
from retry.dead_letter import DeadFilter, Job, JobKind, JobState
from retry.failure_reason import FailureReason
from retry.policy import Reason, RetryPolicy
from retry.sink import DeadEntry, Death, Entry

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
NOW = 1_790_000_000_000
TOPIC, GROUP, LANE, SCOPE = 5, 6, 7, 5
ID = b"\x01" + bytes(range(16))
BODY = record.encode_body(ID, b"tag", b"group", b"wire")
WIDE_BODY = record.encode_body(ID, b"t" * 256, b"", b"wire")
DATED_BODY = record.encode_body(ID, b"tag", b"group", b"wire", NOW + 7)
KEYED_BODY = record.encode_body(ID, b"tag", b"group", b"wire", 0, record.OwnKey(b"invoice-7", False))
KEPT_BODY = record.encode_body(ID, b"t" * 256, b"", b"wire", NOW + 7, record.OwnKey(b"k", True))
OLD_HISTORY = record.History(TOPIC, 2, 17, NOW - 9, NOW - 8, NOW - 7, 0)
HISTORY = OLD_HISTORY._replace(epoch=1 << 32 | 5)
REASON = failure_reason.encode_reason(
    FailureReason("RuntimeError", "no courier \u20ac", "worker-7", "client-1", "192.0.2.7")
)
FAILED_HISTORY = HISTORY._replace(failure=REASON)
OLD_FAILED_HISTORY = OLD_HISTORY._replace(failure=REASON)
DEAD_HISTORY = HISTORY._replace(reason=int(Reason.EXHAUSTED))
TERMS = record.Terms(NOW + 500, 0)
VIGIL = record.HalfMessageState(TERMS, 30_000, 2, 4)
QUEUE = 3
JOB_MESSAGE = JobMessage(b"\x01" * 17, 2**40, 1, NOW)
MESSAGE_JOB = MessageJob(
    job_id=3,
    kind=MessageJobKind.RESCHEDULE,
    topic="orders",
    topic_id=TOPIC,
    query="tag:late",
    filter=MessageFilter(tag="late", due_before_ms=NOW),
    delay_by_ms=-60_000,
    rate_per_s=2.5,
    created_at_ms=NOW,
    is_selected=True,
    next_offset=5,
    end_offset=20,
    done=3,
    gone=1,
    unchanged=1,
    state=JobState.STOPPED,
)
JOB = Job(
    job_id=3,
    kind=JobKind.REDRIVE,
    group="billing",
    filter=DeadFilter(reasons=frozenset({Reason.EXHAUSTED}), topics=frozenset({"a", "b"}), since_ms=5, until_ms=NOW),
    to_topic="orders2",
    why="fixed",
    rate_per_s=2.5,
    created_at_ms=NOW,
    first_offset=10,
    next_offset=15,
    end_offset=20,
    done=2,
    passed=2,
    failed=1,
    state=JobState.STOPPED,
)
ENTRY = Entry(
    type_name="orders",
    uid=bytes(range(16)),
    payload=b"payload",
    key="k",
    created_at_ms=NOW - 5,
    due_at_ms=NOW,
    attempts=2,
    is_uncertain=True,
    error="no",
)


class Case(NamedTuple):
    """A row as the code makes it, how it is read, and what that gives."""

    name: str
    key: bytes
    value: bytes
    read: Callable[[bytes, bytes], object]
    plain: object


def put_of(ops: list[Op]) -> tuple[bytes, bytes]:
    """The one row that these ops set."""
    ((key, value),) = [(op.key, op.value) for op in ops if isinstance(op, Put)]
    return key, value


# -- timeline ----------------------------------------------------------------------------------------------------------


def _waiting(kind: record.EntryKind, rest: bytes = BODY) -> bytes:
    return record.encode_waiting(kind, 2, TOPIC, SCOPE, NOW, NOW - 10, rest)


def _read_waiting(key: bytes, value: bytes) -> object:
    return keys.unpack_timeline_key(key), record.decode_waiting(value), record.body_facts(value[28:])


def _read_retry(_: bytes, value: bytes) -> object:
    at = record.WAITING_HEADER_BYTES
    return record.decode_history(value, at), record.body_payload(value[at + record.history_bytes(value, at) :])


def _halves(head: record.WaitingEntry) -> list[Case]:
    key, body_key = keys.pack_timeline_key(NOW, 9), keys.half_body_key(9)
    half = head._replace(kind=record.EntryKind.TRANSACTION)
    whole = half._replace(kind=record.EntryKind.WHOLE_HALF)
    return [
        Case(
            "transaction",
            key,
            record.encode_half(half, VIGIL, ID),
            lambda _, value: record.decode_half(value),
            record.HalfRow(half, VIGIL, ID, None, len(record.encode_half(half, VIGIL, ID)) + VIGIL.payload_bytes),
        ),
        Case(
            "whole half message of format 2",
            key,
            _waiting(record.EntryKind.WHOLE_HALF, record.encode_terms(TERMS) + BODY),
            lambda _, value: record.decode_half(value),
            record.HalfRow(
                whole,
                record.HalfMessageState(TERMS, 0, 0, 4),
                ID,
                BODY,
                record.whole_half_bytes(b"\1" + BODY),
            ),
        ),
        Case(
            "half body",
            body_key,
            record.encode_half_body(BODY),
            lambda key, value: (keys.is_half_body_key(key), key[-8:], record.decode_half_body(value)),
            (True, bytes(7) + b"\x09", BODY),
        ),
    ]


def _keyed(key: bytes, head: record.WaitingEntry) -> list[Case]:
    return [
        Case(
            "delayed with an own key",
            key,
            _waiting(record.EntryKind.DELAYED, KEYED_BODY),
            lambda key, value: (row_of(value), _read_waiting(key, value), without_own_key(value)[28:]),
            (own_key_row(TOPIC, b"invoice-7"), ((NOW, 9), head, (ID, b"group")), BODY),
        ),
        Case(
            "delayed with an own key, until some time",
            key,
            _waiting(record.EntryKind.DELAYED_FOR, KEPT_BODY),
            lambda _, value: (
                own_key_in(value),
                record.decode_queued(bytes((1, *bytes(19))) + value[28:]).not_after_ms,
            ),
            (record.OwnKey(b"k", True), NOW + 7),
        ),
    ]


def timeline() -> list[Case]:
    """Everything that must happen later."""
    key = keys.pack_timeline_key(NOW, 9)
    head = record.WaitingEntry(record.EntryKind.DELAYED, 2, TOPIC, SCOPE, NOW, NOW - 10)
    delayed_for = _waiting(record.EntryKind.DELAYED_FOR, WIDE_BODY)
    return [
        Case("delayed", key, _waiting(record.EntryKind.DELAYED), _read_waiting, ((NOW, 9), head, (ID, b"group"))),
        Case(
            "held",
            keys.timeline_key(keys.held_mark(TOPIC, NOW << 64 | 9)),
            _waiting(record.EntryKind.DELAYED),
            lambda key, value: (keys.is_held_key(key), keys.held_topic_id(key), record.decode_waiting(value)),
            (True, TOPIC, head),
        ),
        Case(
            "delayed for a time, with a long tag",
            key,
            delayed_for,
            _read_waiting,
            ((NOW, 9), head._replace(kind=record.EntryKind.DELAYED_FOR), (ID, b"")),
        ),
        *_keyed(key, head),
        Case(
            "retry",
            key,
            _waiting(record.EntryKind.RETRY, record.encode_history(HISTORY) + BODY),
            _read_retry,
            (HISTORY, b"wire"),
        ),
        Case(
            "retry of format 2",
            key,
            _waiting(record.EntryKind.RETRY, record.encode_history(OLD_HISTORY) + BODY),
            _read_retry,
            (OLD_HISTORY, b"wire"),
        ),
        *_halves(head),
        Case(
            "recurring",
            key,
            waiting_record(TOPIC, "nightly", "group", NOW, NOW - 10),
            _read_waiting,
            (
                (NOW, 9),
                record.WaitingEntry(record.EntryKind.RECURRING, 0, TOPIC, keys.recurring_scope(TOPIC), NOW, NOW - 10),
                (b"\0nightly", b"group"),
            ),
        ),
        Case(
            "spooled",
            key,
            encode_entry(ENTRY, TOPIC, 4),
            lambda _, value: decode_entry(value, "orders"),
            (ENTRY, 4),
        ),
    ]


# -- index -------------------------------------------------------------------------------------------------------------


def index() -> list[Case]:
    """Under which ids entries wait, or finished."""
    waiting, finished = keys.pack_index_prefix(keys.WAITING_GENERATION, SCOPE), keys.pack_index_prefix(2, SCOPE)
    copy, old_copy = of_index.failed_id(ID, HISTORY, 2), of_index.failed_id(ID, OLD_HISTORY, 2)

    def read(_: bytes, value: bytes) -> object:
        return of_index.decode_index(value)

    def read_copy(key: bytes, value: bytes) -> object:
        return of_index.failed_message_id(key[8:]), of_index.failed_topic_id(key[8:]), of_index.decode_index(value)

    is_waiting = Receipt(EntryState.WAITING, 9, -1, -1, NOW, True)
    row = of_index.encode_index_waiting(9, NOW)
    return [
        Case("waiting", waiting + ID, row, read, is_waiting),
        Case("waiting copy", waiting + copy, row, read_copy, (ID, TOPIC, is_waiting)),
        Case("waiting copy of format 2", waiting + old_copy, row, read_copy, (ID, TOPIC, is_waiting)),
        Case("redriven", finished + of_index.redriven_id(ID, TOPIC), row, read_copy, (ID, TOPIC, is_waiting)),
        Case(
            "waiting of a spool",
            waiting + entry_id(ENTRY.uid, 4),
            row,
            lambda key, value: (turn_of(key[8:]), of_index.decode_index(value)),
            (4, is_waiting),
        ),
        *(
            Case(
                state.name.lower(),
                finished + ID,
                of_index.encode_index_finished(state, 9, NOW, QUEUE, 17),
                read,
                Receipt(state, 9, QUEUE, 17, NOW, True),
            )
            for state in (EntryState.QUEUED, EntryState.DELIVERED)
        ),
        *(
            Case(
                state.name.lower(),
                finished + ID,
                of_index.encode_index_withdrawn(9, NOW, state),
                read,
                Receipt(state, 9, -1, -1, NOW, True),
            )
            for state in (EntryState.WITHDRAWN, EntryState.COMMITTED, EntryState.REPLACED)
        ),
        Case(
            "absorbed",
            finished + ID,
            of_index.encode_index_absorbed(9, NOW, ID[::-1]),
            read,
            Receipt(EntryState.ABSORBED, 9, -1, -1, NOW, True, ID[::-1]),
        ),
        Case(
            "last holder of an own key",
            keys.pack_index_prefix(2, own_key_scope(TOPIC)) + b"invoice-7",
            of_index.encode_index_absorbed(9, NOW, ID),
            lambda key, value: (keys.index_place(key), key[8:], of_index.decode_index(value)),
            ((2, own_key_scope(TOPIC)), b"invoice-7", Receipt(EntryState.ABSORBED, 9, -1, -1, NOW, True, ID)),
        ),
    ]


# -- queue -------------------------------------------------------------------------------------------------------------


def queue() -> list[Case]:
    """The messages of the queues."""
    key = keys.pack_queue_key(TOPIC, QUEUE, 17)

    def read(key: bytes, value: bytes) -> object:
        return keys.queue_offset_of(key), record.decode_queued(value)

    plain = record.QueuedMessage(2, NOW, NOW - 1, ID, "tag", "group", b"wire", None)

    def copy(history: record.History) -> bytes:
        return record.encode_queued(2, NOW, NOW - 1, record.encode_history(history) + BODY, has_history=True)

    return [
        Case("message", key, record.encode_queued(2, NOW, NOW - 1, BODY), read, (17, plain)),
        Case(
            "message with a long tag",
            key,
            record.encode_queued(2, NOW, NOW - 1, WIDE_BODY),
            read,
            (17, plain._replace(tag="t" * 256, message_group="")),
        ),
        Case(
            "message that is not wanted for ever",
            key,
            record.encode_queued(2, NOW, NOW - 1, DATED_BODY),
            read,
            (17, plain._replace(not_after_ms=NOW + 7)),
        ),
        Case("copy", key, copy(HISTORY), read, (17, plain._replace(history=HISTORY))),
        Case("copy of format 2", key, copy(OLD_HISTORY), read, (17, plain._replace(history=OLD_HISTORY))),
        Case("copy with a reason", key, copy(FAILED_HISTORY), read, (17, plain._replace(history=FAILED_HISTORY))),
        Case(
            "copy with a reason and no epoch",
            key,
            copy(OLD_FAILED_HISTORY),
            read,
            (17, plain._replace(history=OLD_FAILED_HISTORY)),
        ),
        Case("dead letter", key, copy(DEAD_HISTORY), read, (17, plain._replace(history=DEAD_HISTORY))),
    ]


# -- group -------------------------------------------------------------------------------------------------------------


def _progress() -> list[Case]:
    state = GroupQueue(GROUP, TOPIC, QUEUE)
    state.end = 3_000
    floor = put_of(state.start_at(17))
    chunk = put_of(state.finish([1_040, 1_030]))
    lease = DeliveryLease(1 << 32 | 5, 2, 0, first_failed_at_ms=NOW - 8)
    state.lease(20, lease)
    hidden = put_of(state.hide(20, lease, Moment(NOW, 7), 1_000, is_suspended=True, message_group="group"))
    counted = put_of(state.hide(20, lease, Moment(NOW, 7), 1_000))
    reasoned = put_of(state.hide(20, lease, Moment(NOW, 7), 1_000, message_group="group", failure=REASON))
    old = struct.pack(">HQQQB", 2, NOW + 1_000, 1 << 32 | 5, NOW - 8, 0) + b"group"  # no later version makes it
    returned = put_of(state.plan_return(20, DeliveryLease(1 << 32 | 5, 2, 0), NOW)[1])

    def read(key: bytes, value: bytes) -> object:
        return unpack_group_row(key), decode_exception(value)

    bits = (1 << 1_040 - 1_024 | 1 << 1_030 - 1_024).to_bytes(128, "little")
    row = ExceptionRow(2, NOW + 1_000, 1 << 32 | 5, NOW - 8, True, NOW, "group")
    return [
        Case("floor", *floor, lambda key, value: (unpack_group_row(key), keys.unpack_u64(value)), ((1, 0), 17)),
        Case("chunk", *chunk, lambda key, value: (unpack_group_row(key), value), ((2, 1), bits)),
        Case("hidden exception", *hidden, read, ((3, 20), row)),
        Case(
            "hidden exception that counts",
            *counted,
            read,
            ((3, 20), row._replace(is_suspended=False, message_group="")),
        ),
        Case(
            "hidden exception with a reason",
            *reasoned,
            read,
            ((3, 20), row._replace(is_suspended=False, failure=REASON)),
        ),
        Case(
            "hidden exception of format 2",
            hidden[0],
            old,
            read,
            ((3, 20), row._replace(is_suspended=False, set_at_ms=0)),
        ),
        Case("returned exception", *returned, read, ((3, 20), ExceptionRow(3, 0, 1 << 32 | 5, NOW, False, 0, ""))),
    ]


def _spool_rows() -> list[Case]:
    lane, cell_id = key_queue_id(TOPIC, "k"), "0123456789abcdef"
    value = encode_entry(ENTRY, TOPIC, 4)
    place = TakenMark(1, NOW << 64 | 9, 3)
    dead = DeadEntry(entry=ENTRY, death=Death.EXHAUSTED, died_at_ms=NOW)
    return [
        Case(
            "spool: key queue",
            key_queue_key(lane),
            keys.pack_pair(2, 5),
            lambda key, value: (key_queue_of(key), keys.unpack_pair(value)),
            (lane, (2, 5)),
        ),
        Case(
            "spool: parked",
            parked_key(lane, 3),
            value,
            lambda key, value: (parked_number(key), decode_entry(value, "orders")),
            (3, (ENTRY, 4)),
        ),
        Case(
            "spool: uid",
            uid_key(lane, ENTRY.uid),
            (3).to_bytes(8, "big"),
            lambda key, value: (key[-16:], int.from_bytes(value, "big")),
            (ENTRY.uid, 3),
        ),
        Case(
            "spool: dead",
            dead_key(TOPIC, ENTRY.uid),
            encode_dead(value, Death.EXHAUSTED, NOW),
            lambda _, value: decode_dead(value, "orders"),
            (dead, 4),
        ),
        Case("spool: taken over", taken_key(cell_id), encode_taken(place), lambda _, value: decode_taken(value), place),
    ]


def group() -> list[Case]:
    """Progress, outcomes of dead letters, committed offsets; what a spool keeps."""
    outcome = LetterOutcome("redriven", NOW, "orders 01AB for group billing")
    key = outcome_key(TOPIC, 17)
    return [
        *_progress(),
        Case(
            "outcome",
            key,
            encode_outcome(outcome),
            lambda key, value: (unpack_group_row(key), decode_outcome(value)),
            ((4, 17), outcome),
        ),
        Case(
            "committed",
            committed_key(TOPIC, QUEUE, GROUP),
            keys.pack_u64(17),
            lambda key, value: (unpack_group_row(key), keys.unpack_u64(value)),
            ((5, GROUP), 17),
        ),
        *_spool_rows(),
    ]


# -- audit -------------------------------------------------------------------------------------------------------------


def audit() -> list[Case]:
    """The outbox."""
    event = encode_event(EventKind.QUEUED, TOPIC, GROUP, QUEUE, 2, NOW, ID)
    plain = decode_event(event)
    records = [outbox.pack_record_head(len(event), 9, 17), event]
    records += [outbox.pack_record_head(len(event), outbox.NOT_APPLICABLE, outbox.NOT_APPLICABLE), event]
    nothing = outbox.NOT_APPLICABLE
    return [
        Case(
            "events of a batch",
            keys.pack_u64(40),
            outbox.encode_block(3, NOW, 2, records),
            lambda key, value: [(each, decode_event(each.event)) for each in outbox.decode_block(key, value)],
            [
                (outbox.OutboxRecord(40, 3, NOW, 9, 17, event), plain),
                (outbox.OutboxRecord(41, 3, NOW, nothing, nothing, event), plain),
            ],
        )
    ]


# -- meta --------------------------------------------------------------------------------------------------------------


def _names(*rows: tuple[bytes, bytes]) -> Names:
    """What is known by rows of the meta family."""
    store = Store(MemoryEngine(), ManualClock(), StoreOptions())
    try:
        store.commit([Put(Family.META, key, value) for key, value in rows])
        return Names(store)
    finally:
        store.close()


def _new_names() -> Names:
    """Nothing is known, and ids begin with ``TOPIC``."""
    names = _names()
    names._next_id = TOPIC
    return names


def _read_name(key: bytes, value: bytes) -> object:
    """What becomes known by a record, beside that of topic 1 and that of group 2."""
    names = _names()
    names.add_topic(Topic(1, "first", 1, 0))
    of_first, of_second = put_of(names.plan_change(names.topics["first"])[:1]), put_of(names.plan_group("second", 0)[1])
    names = _names(of_first, of_second, (key, value))
    topics = [each for name_id, each in names.topics_by_id.items() if name_id > 2]
    groups = [each for name_id, each in names.groups_by_id.items() if name_id > 2]
    return topics, groups, sorted(names.topics), sorted(names.groups), {**names.lanes}


def _name_rows() -> list[Case]:
    names = _new_names()
    topic, of_topic = names.plan_topic("orders", 4, NOW)
    group = Group(GROUP, "workers", NOW)
    names.add_topic(topic)
    of_group = names.plan_group("workers", NOW)[1]
    names.add_group(group)
    lane, of_lane = names.lane(Group(2, "second", 0), 1, NOW)
    removed_topic, removed_group = put_of(names.plan_removal(topic)), put_of(names.plan_removal(group))
    removed_lane = put_of(names.drop_lane((2, 1)))
    no_topic: list[Topic] = []
    no_group: list[Group] = []
    first, second = ["first"], ["second"]
    return [
        Case("topic", *put_of(of_topic), _read_name, ([topic], no_group, ["first", "orders"], second, {})),
        Case("group", *put_of(of_group), _read_name, (no_topic, [group], first, ["second", "workers"], {})),
        Case("lane", *put_of(of_lane), _read_name, ([lane], no_group, first, second, {(2, 1): lane})),
        Case("removed topic", *removed_topic, _read_name, ([topic], no_group, first, second, {})),
        Case("removed group", *removed_group, _read_name, (no_topic, [group], first, second, {})),
        Case("removed lane", *removed_lane, _read_name, (no_topic, no_group, first, second, {})),
    ]


def _read_settings(key: bytes, value: bytes) -> object:
    """What is known of a topic or a group with a name of its own by its settings, or by what it holds."""
    names = _new_names()
    topic, of_topic = names.plan_topic("orders", 4, NOW)
    names.add_topic(topic)
    names = _names(put_of(of_topic), put_of(names.plan_group("workers", NOW)[1]), (key, value))
    return names.topics["orders"], names.groups["workers"]


def _settings_rows() -> list[Case]:
    topic, group = Topic(TOPIC, "orders", 4, NOW), Group(GROUP, "workers", NOW)
    set_topic = topic._replace(message_type=MessageType.DELAY, keep=Keep(1_000, 2_000, unread=False))
    set_group = group._replace(policy=RetryPolicy(), is_fifo=True)
    in_front = set_group._replace(retries="here", stay="bills;own*")
    of_topic = [op for op in Names.plan_change(set_topic) if isinstance(op, Put) and op.key[:1] == b"p"]
    slowed, paused = topic._replace(paused_since_ms=NOW, deliver_rate=50), group._replace(paused_since_ms=NOW)
    of_slowed = [op for op in Names.plan_change(slowed) if isinstance(op, Put) and op.key[:1] == b"p"]
    indexed = topic._replace(index_properties=("customer", "order-id"))
    of_indexed = [op for op in Names.plan_change(indexed) if isinstance(op, Put) and op.key[:1] == b"p"]
    names = _new_names()
    names.add_topic(topic)
    of_holds = names.plan_first({"orders": GROUPED})[1]
    return [
        Case("settings of a topic", *put_of([*of_topic]), _read_settings, (set_topic, group)),
        Case("settings of a topic that is slowed", *put_of([*of_slowed]), _read_settings, (slowed, group)),
        Case("settings of a topic with indexed properties", *put_of([*of_indexed]), _read_settings, (indexed, group)),
        Case("settings of a paused group", *put_of(names.plan_settings(paused)), _read_settings, (topic, paused)),
        Case("settings of a group", *put_of(names.plan_settings(set_group)), _read_settings, (topic, set_group)),
        Case(
            "settings in front of a cluster", *put_of(names.plan_settings(in_front)), _read_settings, (topic, in_front)
        ),
        Case("holds", *put_of(of_holds), _read_settings, (topic._replace(holds=GROUPED), group)),
    ]


def _counts() -> list[Case]:
    minutes = [1, 2, *[0] * 58]
    hour = keys.hour_key(SCOPE, 497)

    def read(key: bytes, value: bytes) -> object:
        return keys.meta_id(key), keys.hour_of(key), counts.unpack_hour(value)

    return [
        *(
            Case(
                f"hour in {most.bit_length() // 8} bytes each",
                hour,
                counts.pack_hour([*minutes[:-1], most]),
                read,
                (SCOPE, 497, (*minutes[:-1], most)),
            )
            for most in (2**7, 2**15, 2**31, 2**63)
        ),
        Case(
            "total",
            keys.total_key(SCOPE),
            keys.pack_u64(3),
            lambda key, value: (keys.meta_id(key), keys.unpack_u64(value)),
            (SCOPE, 3),
        ),
        Case(
            "minute of format 1",
            b"c" + keys.hour_key(SCOPE, 497 * 60 + 2)[1:],
            keys.pack_u64(3),
            lambda key, value: (keys.meta_id(key), keys.hour_of(key), keys.unpack_u64(value)),
            (SCOPE, 497 * 60 + 2, 3),
        ),
    ]


def _figures() -> list[Case]:
    def number(_: bytes, value: bytes) -> object:
        return keys.unpack_u64(value)

    clock = ClockRow(NOW, 7, NOW - 7, 5, is_steady=True, is_held=False, boot_id="a-b")
    held = clock._replace(is_steady=False, is_held=True, trusted_offset_ms=-5)
    border = Border(7, is_settled=True)
    position = Position(7, 3, 12, 40, bytes(range(16)))
    identity = Identity(7, bytes(range(32)), StorePlace(9, 10))
    moves = [Move(60_000, NOW << 64 | 9), Move(5_000, 0)]
    state, lost = outbox.OutboxState(40, 42, 1_000), outbox.OutboxState(40, 42, 1_000, 8)
    return [
        Case("format", keys.META_FORMAT, keys.pack_u64(FORMAT_VERSION), number, FORMAT_VERSION),
        Case("boot", keys.META_BOOT, keys.pack_u64(3), number, 3),
        Case("sequence", keys.META_SEQUENCE, keys.pack_u64(9), number, 9),
        Case("closed", keys.META_CLOSED, keys.pack_u64(9), number, 9),
        Case(
            "done",
            keys.META_DONE,
            keys.timeline_key(keys.timeline_mark(NOW, 9)),
            lambda _, value: keys.unpack_mark(value),
            NOW << 64 | 9,
        ),
        Case(
            "generation", keys.META_GENERATION, keys.pack_pair(2, 60_000), lambda _, v: keys.unpack_pair(v), (2, 60_000)
        ),
        Case("outbox", keys.META_OUTBOX, outbox.encode_state(state), lambda _, v: outbox.decode_state(v), state),
        Case(
            "outbox that was cut",
            keys.META_OUTBOX,
            outbox.encode_state(lost),
            lambda _, value: outbox.decode_state(value),
            lost,
        ),
        Case("identity", keys.META_IDENTITY, encode_identity(identity), lambda _, v: decode_identity(v), identity),
        Case("border", keys.META_BORDER, encode_border(border), lambda _, v: decode_border(v), border),
        Case("clock", keys.META_CLOCK, encode_clock(clock), lambda _, value: decode_clock(value), clock),
        Case("held clock", keys.META_CLOCK, encode_clock(held), lambda _, value: decode_clock(value), held),
        Case("position", keys.META_POSITION, encode_position(position), lambda _, v: decode_position(v), position),
        Case("moves", keys.META_MOVES, encode_moves(moves), lambda _, value: decode_moves(value), moves),
    ]


def _of_value(decode: Callable[[bytes], object]) -> Callable[[bytes, bytes], object]:
    """Return a reader of a row whose key has nothing to decode."""
    return lambda _, value: decode(value)


BEGUN = Activity(7, "SetTopic", NOW, CallOutcome.BEGUN, address="10.0.0.7", topic="orders", what="is_paused=True")
DONE = BEGUN._replace(outcome=CallOutcome.REFUSED, ended_ms=NOW + 1, key="shop", group="g", why="disk", error="no")


def _orders() -> list[Case]:
    limits = Quotas(ManualClock())
    limits.change(Holder("key", "shop"), Quota.TOPICS, 5)
    value = limits.change(Holder("address", "10.0.0.7"), Quota.BYTES, 2**20)
    set_limits = {(Holder("key", "shop"), Quota.TOPICS): 5, (Holder("address", "10.0.0.7"), Quota.BYTES): 2**20}
    removal, reset = Procedure(TOPIC, 0), Procedure(TOPIC, GROUP, (3, 0), (9, 0))
    old_job = {name: each for name, each in json.loads(encode_job(JOB)).items() if name != "all_groups"}

    def read_limits(_: bytes, value: bytes) -> object:
        read = Quotas(ManualClock(), None, value)
        return {(each.holder, each.quota): each.limit for each in read.rows() if each.is_set}

    def read_job(_: bytes, value: bytes) -> object:
        return decode_job(value)

    return [
        Case("removal", removal.key, encode_procedure(removal), decode_procedure, removal),
        Case("reset", reset.key, encode_procedure(reset), decode_procedure, reset),
        Case("job", keys.job_key(3), encode_job(JOB), read_job, JOB),
        Case(
            "job without a choice",
            keys.job_key(3),
            json.dumps(old_job, separators=(",", ":")).encode(),
            read_job,
            Job(**{name: getattr(JOB, name) for name in old_job} | {"all_groups": True}),
        ),
        Case(
            "message job",
            message_job_key(3),
            encode_message_job(MESSAGE_JOB),
            _of_value(decode_message_job),
            MESSAGE_JOB,
        ),
        Case(
            "message of a job",
            job_message_key(3, 7),
            encode_job_message(JOB_MESSAGE),
            _of_value(decode_job_message),
            JOB_MESSAGE,
        ),
        Case("limits", keys.META_QUOTAS, value, read_limits, set_limits),
        *(
            Case(name, keys.activity_key(7), encode_activity(each), lambda _, row: decode_activity(7, row), each)
            for name, each in (("activity", DONE), ("activity that began", BEGUN))
        ),
    ]


def _schedules() -> list[Case]:
    rows = schedule_keys("nightly")
    schedule = RecurrenceRule(
        TOPIC,
        cron="0 2 * * *",
        zone="Europe/Berlin",
        start_ms=NOW - 5,
        end_ms=NOW + 5,
        count=7,
        jitter_ms=60_000,
        catch_up=CatchUp.SKIP,
        message_group="group",
        created_at_ms=NOW - 10,
    )
    every = RecurrenceRule(TOPIC, 1_000, created_at_ms=NOW)
    progress = ScheduleProgress(Phase.WAITING, 3, NOW - 1, NOW)
    paused = ScheduleProgress(Phase.PAUSED, 3, NOW - 1, 0, "why")
    return [
        Case("schedule", rows[0], encode_schedule(schedule), lambda _, value: decode_schedule(value), schedule),
        Case("schedule of an interval", rows[0], encode_schedule(every), lambda _, v: decode_schedule(v), every),
        Case("progress", rows[1], encode_progress(progress), lambda _, value: decode_progress(value), progress),
        Case("paused", rows[1], encode_progress(paused), lambda _, value: decode_progress(value), paused),
        Case("message of a schedule", rows[2], encode_message(BODY), lambda _, value: decode_message(value), BODY),
    ]


def meta() -> list[Case]:
    """Figures, names, counts, and what operators ordered."""
    overdue = OverdueNotification(NOW, b"{}")
    return [
        *_figures(),
        *_name_rows(),
        *_settings_rows(),
        *_counts(),
        *_orders(),
        *_schedules(),
        Case("begin", keys.begin_key(TOPIC, QUEUE), keys.pack_u64(17), lambda _, v: keys.unpack_u64(v), 17),
        Case("bound", keys.bound_key(TOPIC, QUEUE), keys.pack_u64(17), lambda _, v: keys.unpack_u64(v), 17),
        Case("notified", notified_key(TOPIC), keys.pack_u64(17), lambda _, v: keys.unpack_u64(v), 17),
        Case("overdue", keys.META_OVERDUE, encode_overdue(overdue), lambda _, v: decode_overdue(v), overdue),
        Case(
            "ledger",
            keys.META_LEDGER + ledger.pack_pair(TOPIC, GROUP),
            ledger.encode_ledger({int(EventKind.ACKED): 7, ledger.Term.BEFORE: -2, ledger.Term.SKIPPED: 0}),
            lambda key, value: (ledger.unpack_ledger_key(key), ledger.decode_ledger(value)),
            ((TOPIC, GROUP), {int(EventKind.ACKED): 7, int(ledger.Term.BEFORE): -2}),
        ),
        Case(
            "ledger: head",
            keys.META_LEDGER_HEAD,
            ledger.encode_head(ledger.LedgerHead(3, NOW)),
            lambda _, value: ledger.decode_head(value),
            ledger.LedgerHead(3, NOW),
        ),
        Case(
            "own key",
            own_key_row(TOPIC, b"invoice-7"),
            encode_key_holder(KeyHolder(9, NOW, 132, ID)),
            lambda key, value: (keys.meta_id(key), own_key_of_row(key), decode_key_holder(value)),
            (TOPIC, b"invoice-7", KeyHolder(9, NOW, 132, ID)),
        ),
        Case("bytes that wait", keys.bytes_key(SCOPE), keys.pack_u64(900), lambda _, v: keys.unpack_u64(v), 900),
        Case("bytes: head", keys.META_BYTES_HEAD, keys.pack_pair(3, 9), lambda _, v: keys.unpack_pair(v), (3, 9)),
        Case("held", keys.held_key(TOPIC), keys.pack_u64(17), lambda _, v: keys.unpack_u64(v), 17),
        Case("reset epoch", keys.reset_key(GROUP, TOPIC), keys.pack_u64(2**32), lambda _, v: keys.unpack_u64(v), 2**32),
        Case(
            "spool: totals",
            spool_total_key(TOPIC),
            encode_totals(TypeTotals(3, 900, 1)),
            lambda _, value: decode_totals(value),
            TypeTotals(3, 900, 1),
        ),
    ]


def properties() -> list[Case]:
    """A pending and a queued message with a property, and the starts of the property there."""
    of = of_properties.property_id(TOPIC, "order-id")
    scope, queue = of_properties.scope_place(SCOPE), of_properties.queue_place(LANE, QUEUE)

    def case(name: str, place: bytes, number: int, index_id: bytes, found: object) -> Case:
        digests = of[4:], of_properties.value_digest("42")
        plain = of_properties.PropertyRow(TOPIC, *digests, found, index_id)  # type: ignore[arg-type]
        return Case(
            name, of_properties.row_key(of, "42", place, number), index_id, of_properties.decode_property, plain
        )

    def start(name: str, place: bytes) -> Case:
        def read(key: bytes, value: bytes) -> object:
            return *of_properties.split_start(key), keys.unpack_u64(value)

        return Case(name, of_properties.start_key(place, of), keys.pack_u64(17), read, (place, of, 17))

    return [
        case("property of a pending message", scope, 9, ID, of_properties.PendingPlace(SCOPE, 9)),
        case("property of a queued message", queue, 17, b"", of_properties.QueuePlace(LANE, QUEUE, 17)),
        start("start of a property in a scope", scope),
        start("start of a property in a queue", queue),
        Case(
            "built row of a property",
            of_properties.built_key(of),
            b"",
            lambda key, _: of_properties.split_built(key),
            of,
        ),
        Case("damaged row", of_properties.DAMAGED, b"", lambda key, _: key, of_properties.DAMAGED),
    ]


CASES: dict[Family, list[Case]] = {
    Family.TIMELINE: timeline(),
    Family.INDEX: index(),
    Family.QUEUE: queue(),
    Family.GROUP: group(),
    Family.AUDIT: audit(),
    Family.META: meta(),
    Family.PROPERTY: properties(),
}


def kept(family: Family) -> dict[str, dict[str, str]]:
    """The bytes that are kept of a family: key and value, by name."""
    path = GOLDEN / f"{family.name.lower()}.json"
    found: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def main() -> None:
    """Add what is not kept yet."""
    GOLDEN.mkdir(exist_ok=True)
    for family, cases in CASES.items():
        made = {each.name: {"key": each.key.hex(), "value": each.value.hex()} for each in cases}
        text = json.dumps(made | kept(family), indent=1)
        (GOLDEN / f"{family.name.lower()}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
