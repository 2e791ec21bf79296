"""Every format on disk: what is encoded is decoded, order is kept, what is not whole is damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_adapter.contracts.errors import Refused
from dmq.broker.handles import receipt_handle as receipt
from dmq.errors import StoreCorrupt
from dmq.store.schema import keys
from dmq.store.schema.accounting import outbox
from dmq.store.schema.cell.identity import Identity
from dmq.store.schema.messages import index, record
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.operators.message_jobs import job_message_key, job_messages_range, message_job_key
from dmq.store.schema.spool import spool_total_key
from dmq.store.schema.topics import group as of_group
from dmq.store.schema.topics.notified import notified_key
from dmq.trail import events

pytestmark = pytest.mark.property

u8, u16, u32 = st.integers(0, 2**8 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.integers(0, 2**32 - 2)  # the range of one ends where that of the next one begins
short = st.binary(max_size=255)
text = st.text(max_size=60)
packed_ids = st.binary(min_size=1, max_size=255)
tags = text | text.map(lambda each: each * 250)  # of more than 255 bytes, up to 60,000
payload = st.binary(max_size=300)
event_kinds = st.sampled_from(list(events.EventKind))
histories = st.builds(record.History, u32, u16, u64, u64, u64, u64, st.integers(0, 63), u64, payload)


# -- records -----------------------------------------------------------------------------------------------------------


@given(u8, u16, u32, u32, u64, u64, packed_ids, tags, text, payload)
def test_waiting_entries(
    kind: int,
    retries: int,
    topic: int,
    scope: int,
    due: int,
    accepted: int,
    mid: bytes,
    tag: str,
    group: str,
    wire: bytes,
) -> None:
    """The head of a timeline value, and the body behind it as it went in."""
    body = record.encode_body(mid, tag.encode(), group.encode(), wire)
    value = record.encode_waiting(kind, retries, topic, scope, due, accepted, body)
    assert record.decode_waiting(value) == record.WaitingEntry(kind, retries, topic, scope, due, accepted)
    assert value[record.WAITING_HEADER_BYTES :] == body
    assert record.body_facts(body) == (mid, group.encode())
    assert record.body_id(value, record.WAITING_HEADER_BYTES) == mid
    assert record.body_payload(body) == wire


@given(u16, u64, u64, packed_ids, tags, text, payload)
def test_queued_messages(attempts: int, stored: int, due: int, mid: bytes, tag: str, group: str, wire: bytes) -> None:
    """A queue value, taken apart; one that was never failed counts its attempts and its age from here."""
    body = record.encode_body(mid, tag.encode(), group.encode(), wire)
    message = record.decode_queued(record.encode_queued(attempts, stored, due, body))
    assert message == record.QueuedMessage(attempts, stored, due, mid, tag, group, wire, None)
    assert (message.is_dead, message.attempts_so_far, message.since_ms) == (False, attempts, stored)


@given(histories, u16, u64, packed_ids, tags, text, payload)
def test_copies_of_failed_messages(
    history: record.History, attempts: int, stored: int, mid: bytes, tag: str, group: str, wire: bytes
) -> None:
    """History and message come back whole from both values; a dead letter begins anew for those who consume it."""
    copy = record.encode_history(history) + record.encode_body(mid, tag.encode(), group.encode(), wire)
    waiting = record.encode_waiting(record.EntryKind.RETRY, attempts, 1, 2, 3, 4, copy)
    assert record.decode_history(waiting, record.WAITING_HEADER_BYTES) == history
    at = record.WAITING_HEADER_BYTES + record.history_bytes(waiting, record.WAITING_HEADER_BYTES)
    assert record.body_facts(waiting[at:]) == (mid, group.encode())
    message = record.decode_queued(record.encode_queued(attempts, stored, 0, copy, has_history=True))
    assert message == record.QueuedMessage(attempts, stored, 0, mid, tag, group, wire, history)
    assert message.is_dead == (history.reason != 0)
    expected = (0, stored) if history.reason else (attempts, history.since_ms)
    assert (message.attempts_so_far, message.since_ms) == expected


@given(st.lists(st.tuples(short, st.integers(0, 2**31 - 1), u16, u64, u16, u64), min_size=2, max_size=2, unique=True))
@example([(b"\1" + bytes(16), 1, 2, 3, 4, 0), (b"\1", 0, 0, 0, 4, 0)])
@example([(b"\1" + bytes(8), 1, 2, 3, 4, 0), (b"\1", 1, 2, 3, 4, 1)])
def test_no_two_failed_copies_share_an_id(two: list[tuple[bytes, int, int, int, int, int]]) -> None:
    """Another id, place, attempt or hand-out is another copy; when and why it failed makes no difference."""
    made = [
        index.failed_id(mid, record.History(topic, queue, offset, 1, 2, 3, 0, epoch), attempt)
        for mid, topic, queue, offset, attempt, epoch in two
    ]
    assert made[0] != made[1]
    mid, topic, queue, offset, attempt, epoch = two[0]
    assert made[0] == index.failed_id(mid, record.History(topic, queue, offset, 7, 8, 9, 5, epoch), attempt)
    assert index.failed_topic_id(made[0]) == topic
    assert not mid or index.failed_message_id(made[0]) == mid


@given(u64, u64)
def test_index_rows_of_waiting_entries(sequence: int, key_ms: int) -> None:
    """Read back as the receipt of a repeated send."""
    value = index.encode_index_waiting(sequence, key_ms)
    assert index.decode_index(value) == Receipt(EntryState.WAITING, sequence, -1, -1, key_ms, True)


@given(st.sampled_from([EntryState.QUEUED, EntryState.DELIVERED]), u64, u64, u16, u64)
def test_index_rows_of_finished_entries(state: EntryState, sequence: int, at_ms: int, queue: int, offset: int) -> None:
    """Read back as the receipt of a repeated send."""
    value = index.encode_index_finished(state, sequence, at_ms, queue, offset)
    assert index.decode_index(value) == Receipt(state, sequence, queue, offset, at_ms, True)


# -- keys --------------------------------------------------------------------------------------------------------------


@given(u64, u64, u64, u64)
def test_timeline_keys_are_ordered_by_time_then_sequence(
    time1: int, sequence1: int, time2: int, sequence2: int
) -> None:
    """As bytes and as marks; one is the other."""
    first, second = keys.pack_timeline_key(time1, sequence1), keys.pack_timeline_key(time2, sequence2)
    assert (first < second) == ((time1, sequence1) < (time2, sequence2))
    marks = keys.timeline_mark(time1, sequence1), keys.timeline_mark(time2, sequence2)
    assert (marks[0] < marks[1]) == (first < second)
    assert keys.timeline_key(marks[0]) == first
    assert keys.unpack_timeline_key(first) == (time1, sequence1)
    assert keys.unpack_mark(first) == marks[0]


@given(u32, u16, u64, u32, u16, u64)
def test_queue_keys_are_ordered_by_queue_then_offset(
    topic1: int, queue1: int, offset1: int, topic2: int, queue2: int, offset2: int
) -> None:
    """All messages of a queue lie together, in order."""
    first, second = keys.pack_queue_key(topic1, queue1, offset1), keys.pack_queue_key(topic2, queue2, offset2)
    assert (first < second) == ((topic1, queue1, offset1) < (topic2, queue2, offset2))
    assert keys.queue_offset_of(first) == offset1


@given(u32, u32, u16, u8, u64, u32, u32, u16)
@example(1, 2, 3, 255, 2**64 - 1, 1, 2, 3)
def test_group_rows_are_in_the_range_of_their_queue(
    group: int, topic: int, queue: int, kind: int, number: int, group2: int, topic2: int, queue2: int
) -> None:
    """And in no other one; the largest kind and number included."""
    key = of_group.pack_group_key(group, topic, queue, kind, number)
    assert of_group.unpack_group_row(key) == (kind, number)
    start, stop = of_group.group_queue_range(group2, topic2, queue2)
    assert (start <= key < stop) == ((group, topic, queue) == (group2, topic2, queue2))


@pytest.mark.parametrize("key", [b"", b"\1" * 18, b"\1" * 20])
def test_a_group_key_of_another_length_is_damage(key: bytes) -> None:
    """Wherever it is read: a snapshot, retention's look for readers, a check."""
    with pytest.raises(StoreCorrupt, match="a group key of"):
        of_group.unpack_group_key(key)


@given(u32, st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**63))
def test_hours_are_in_their_range(scope: int, hour: int, first: int, last: int) -> None:
    """From ``first`` up to, not including, ``last``."""
    key = keys.hour_key(scope, hour)
    start, stop = keys.hour_range(scope, first, last)
    assert (start <= key < stop) == (first <= hour < last)
    assert (keys.meta_id(key), keys.hour_of(key)) == (scope, hour)


@given(ids, ids, u64)
def test_meta_rows_are_apart(scope: int, name: int, job: int) -> None:
    """A kind's range holds its own rows, and none of another kind."""
    rows = {
        "total": keys.total_key(scope),
        "name": keys.name_key(name),
        "hour": keys.hour_key(scope, 1),
        "settings": keys.settings_key(name),
        "holds": keys.holds_key(name),
        "job": keys.job_key(job),
        "message job": message_job_key(job),
        "message of a job": job_message_key(job, name),
        "activity": keys.activity_key(job),
        "begin": keys.begin_key(name, 1),
        "bound": keys.bound_key(name, 1),
        "notified": notified_key(name),
        "procedure": keys.procedure_key(name, scope),
        "reset": keys.reset_key(name, scope),
        "spool total": spool_total_key(name),
        "bytes": keys.bytes_key(scope),
    }
    ranges = {
        "total": keys.meta_range(keys.META_TOTAL),
        "name": keys.meta_range(keys.META_NAME),
        "hour": keys.hour_range(scope, 0, 2**64 - 1),
        "settings": keys.meta_range(keys.META_SETTINGS),
        "holds": keys.meta_range(keys.META_HOLDS),
        "bytes": keys.meta_range(keys.META_BYTES),
        "job": keys.meta_range(keys.META_JOB),
        "message job": keys.meta_range(keys.META_MESSAGE_JOB),
        "message of a job": job_messages_range(job),
        "activity": keys.meta_range(keys.META_ACTIVITY),
        "procedure": keys.meta_range(keys.META_PROCEDURE),
        "reset": keys.reset_range(name),
    }
    single = [keys.META_FORMAT, keys.META_BOOT, keys.META_SEQUENCE, keys.META_DONE, keys.META_OUTBOX,
              keys.META_GENERATION, keys.META_CLOSED, keys.META_BYTES_HEAD]  # fmt: skip
    for kind, (start, stop) in ranges.items():
        assert [name for name, key in rows.items() if start <= key < stop] == [kind]
        assert not [key for key in single if start <= key < stop]
    assert len(set(single)) == len(single)
    assert keys.meta_id(rows["total"]) == scope


@given(st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1), u32, short)
def test_generations_are_in_their_range(first: int, last: int, generation: int, scope: int, mid: bytes) -> None:
    """So that they can be dropped whole; what waits (generation 0) never lies in one."""
    start, stop = keys.generation_range(first, last)
    assert (start <= keys.pack_index_prefix(generation, scope) + mid < stop) == (first <= generation < last)
    assert not start <= keys.pack_index_prefix(keys.WAITING_GENERATION, scope) + mid < stop


@given(ids, u32, st.integers(0, 2), short)
def test_pending_rows_are_in_the_range_of_their_scope(scope: int, other: int, generation: int, mid: bytes) -> None:
    """And neither what waits of another scope, nor what is finished."""
    start, stop = keys.waiting_range(scope)
    for each in (scope, other):
        is_meant = each == scope and generation == keys.WAITING_GENERATION
        assert (start <= keys.pack_index_prefix(generation, each) + mid < stop) == is_meant


# -- outbox and events -------------------------------------------------------------------------------------------------

records = st.lists(st.tuples(u64, u64, st.binary(max_size=80)), min_size=1, max_size=6)


def block_of(boot: int, at_ms: int, made: list[tuple[int, int, bytes]]) -> bytes:
    parts = [
        part for entry, offset, event in made for part in (outbox.pack_record_head(len(event), entry, offset), event)
    ]
    return outbox.encode_block(boot, at_ms, len(made), parts)


@given(u32, u64, st.integers(1, 2**63), records)
def test_outbox_rows(boot: int, at_ms: int, first: int, made: list[tuple[int, int, bytes]]) -> None:
    """Every event with the sequence its place gives it."""
    value = block_of(boot, at_ms, made)
    assert outbox.block_count(value) == len(made)
    assert list(outbox.decode_block(keys.pack_u64(first), value)) == [
        outbox.OutboxRecord(first + place, boot, at_ms, entry, offset, event)
        for place, (entry, offset, event) in enumerate(made)
    ]


@given(u64, u64, u64)
def test_outbox_figures(first: int, following: int, stored: int) -> None:
    """Absolute figures; none yet means that nothing was ever recorded."""
    state = outbox.OutboxState(first, following, stored)
    assert outbox.decode_state(outbox.encode_state(state)) == state
    assert outbox.decode_state(None) == outbox.OutboxState(1, 1, 0)


@given(event_kinds, u32, u32, u16, u16, u64, short)
def test_events(kind: events.EventKind, topic: int, group: int, queue: int, attempt: int, at: int, mid: bytes) -> None:
    """All fields, of every kind."""
    encoded = events.encode_event(kind, topic, group, queue, attempt, at, mid)
    assert events.decode_event(encoded) == events.AuditEvent(kind, topic, group, queue, attempt, at, mid)


@given(u64, u64)
def test_gaps(first: int, count: int) -> None:
    """A gap says which events are missing."""
    event = events.decode_event(events.gap_event(first, count))
    assert (event.kind, event.time_ms, events.gap_count(event)) == (events.EventKind.GAP, first, count)


# -- receipt handles ---------------------------------------------------------------------------------------------------

HANDLES = receipt.ReceiptHandles(Identity(7, bytes(range(32))), 1)
handles = st.builds(receipt.ReceiptHandle, u32, u32, u16, u64, u64, u16, st.booleans(), short)


@given(handles)
def test_receipt_handles(given_out: receipt.ReceiptHandle) -> None:
    """They describe themselves, in text that any client carries."""
    handle = HANDLES.encode(given_out)
    assert HANDLES.decode(handle) == given_out
    assert handle.isascii()
    assert not set(handle) & set("+/= \n")


@given(handles, st.data())
def test_a_changed_receipt_handle_is_refused(given_out: receipt.ReceiptHandle, data: st.DataObject) -> None:
    """One character changed, cut off or put in: never taken for another message's, never another exception.

    Base64 has spare bits at its end, so that a changed last character may still mean the same bytes.
    """
    handle = HANDLES.encode(given_out)
    place = data.draw(st.integers(0, len(handle) - 1))
    other = data.draw(st.characters())
    for changed in (
        handle[:place] + other + handle[place + 1 :],
        handle[:place],
        handle[:place] + other + handle[place:],
    ):
        with suppress(Refused):
            assert HANDLES.decode(changed) == given_out


@given(st.text())
def test_no_text_crashes_the_reader_of_handles(handle: str) -> None:
    """Whatever a client sends."""
    with pytest.raises(Refused):
        HANDLES.decode(handle)


# -- damage ------------------------------------------------------------------------------------------------------------

BODY = record.encode_body(b"\1" + bytes(16), b"tag", b"group", b"payload")
WIDE_BODY = record.encode_body(b"\1" + bytes(16), b"tag" * 100, b"group", b"payload")
HISTORY = record.History(1, 2, 3, 4, 5, 6, 7)
BLOCK = block_of(1, 2, [(3, 4, b"event one"), (5, 6, b"event two")])
EVENT = events.encode_event(1, 2, 3, 4, 5, 6, b"id")


def read_block(value: bytes) -> object:
    return list(outbox.decode_block(keys.pack_u64(1), value))


# what reads it, a whole value, and how many bytes may be missing without being noticed (free text at the end)
READERS: list[tuple[Callable[[bytes], object], bytes, int]] = [
    (record.decode_waiting, record.encode_waiting(1, 2, 3, 4, 5, 6, BODY), len(BODY)),
    (record.decode_queued, record.encode_queued(1, 2, 3, BODY), len(b"payload")),
    (
        record.decode_queued,
        record.encode_queued(1, 2, 0, record.encode_history(HISTORY) + BODY, has_history=True),
        len(b"payload"),
    ),
    (lambda value: record.decode_history(value, 0), record.encode_history(HISTORY), 0),
    (lambda value: record.decode_history(value, 5), bytes(5) + record.encode_history(HISTORY), 0),
    (record.body_facts, BODY, len(b"payload")),
    (record.body_facts, WIDE_BODY, len(b"payload")),
    (lambda value: record.body_id(value, 1), b"?" + WIDE_BODY, len(b"tag" * 100 + b"group" + b"payload")),
    (record.decode_queued, record.encode_queued(1, 2, 3, WIDE_BODY), len(b"payload")),
    (index.decode_index, index.encode_index_waiting(1, 2), 0),
    (index.decode_index, index.encode_index_finished(EntryState.QUEUED, 1, 2, 3, 4), 0),
    (read_block, BLOCK, 0),
    (outbox.block_count, BLOCK, len(BLOCK) - 17),
    (outbox.decode_state, outbox.encode_state(outbox.OutboxState(1, 2, 3)), 0),
    (events.decode_event, EVENT, len(b"id")),
    (keys.unpack_u64, keys.pack_u64(1), 0),
    (keys.unpack_pair, keys.pack_pair(1, 2), 0),
    (keys.unpack_mark, keys.pack_timeline_key(1, 2), 0),
]
NAMES = [
    "waiting",
    "queued",
    "copy",
    "history",
    "history further on",
    "body",
    "body with a long tag",
    "id of a body",
    "queued with a long tag",
    "index waiting",
    "index finished",
    "outbox",
    "count",
    "figures",
    "event",
    "u64",
    "pair",
    "mark",
]


@pytest.mark.parametrize(("read", "value", "free"), READERS, ids=NAMES)
def test_a_short_value_is_damage(read: Callable[[bytes], object], value: bytes, free: int) -> None:
    """Cut anywhere before the free text at its end: ``StoreCorrupt``, and no other exception."""
    read(value)
    for size in range(len(value) - free):
        with pytest.raises(StoreCorrupt):
            read(value[:size])


def test_a_short_outbox_row_yields_whole_events_only() -> None:
    """Before it raises: half an event is none."""
    for size in range(len(BLOCK)):
        rest = outbox.decode_block(keys.pack_u64(1), BLOCK[:size])
        with suppress(StoreCorrupt):
            assert next(rest).event == b"event one"
            assert next(rest).event == b"event two"
            raise AssertionError("the whole row was yielded")


@pytest.mark.parametrize(("read", "value", "free"), READERS, ids=NAMES)
def test_a_flipped_value_is_read_or_damage(read: Callable[[bytes], object], value: bytes, free: int) -> None:
    """Every bit, one at a time: checksums are RocksDB's affair, so it may be read as another value, but never crash."""
    for place in range(len(value)):
        for bit in range(8):
            changed = bytearray(value)
            changed[place] ^= 1 << bit
            with suppress(StoreCorrupt):
                read(bytes(changed))


@given(st.binary(max_size=60))
def test_no_bytes_crash_a_reader(value: bytes) -> None:
    """Whatever stands there: read, or ``StoreCorrupt``."""
    for read, _, _ in READERS:
        with suppress(StoreCorrupt):
            read(value)


@pytest.mark.parametrize(("read", "value"), [(read, value) for read, value, _ in READERS[:2]] + [(read_block, BLOCK)])
def test_another_version_is_not_read(read: Callable[[bytes], object], value: bytes) -> None:
    """Values that begin with a version are not guessed at."""
    for version in (0, 2, 255):
        with pytest.raises(StoreCorrupt, match="version"):
            read(bytes([version]) + value[1:])


def test_a_withdrawn_entry_never_has_a_place() -> None:
    """What is remembered of it is short; a row that puts it into a queue is damage."""
    kept = index.decode_index(index.encode_index_withdrawn(7, 1_000))
    assert (kept.state, kept.sequence, kept.at_ms, kept.queue_offset) == (EntryState.WITHDRAWN, 7, 1_000, -1)
    with pytest.raises(StoreCorrupt):
        index.decode_index(bytes([EntryState.WITHDRAWN]) + bytes(26))


@pytest.mark.parametrize(
    ("encode", "arguments"),
    [
        (keys.pack_timeline_key, (2**64, 1)),
        (keys.pack_queue_key, (1, 2**16, 1)),
        (record.encode_body, (bytes(256), b"", b"", b"")),
        (index.failed_id, (b"id", HISTORY, 2**16)),
        (outbox.pack_record_head, (2**16, 1, 1)),
    ],
)
def test_numbers_that_do_not_fit_are_not_cut(encode: Callable[..., bytes], arguments: tuple[object, ...]) -> None:
    """An encoder refuses what would wrap around."""
    with pytest.raises(struct.error):
        encode(*arguments)
