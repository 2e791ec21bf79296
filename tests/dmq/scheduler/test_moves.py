"""Which delays a step of the clock back moves, and what is recorded of it."""

from __future__ import annotations

import pytest
from support.rigs.broker.scheduler_cell import Cell
from support.rigs.store.rows import events

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreCorrupt
from dmq.scheduler.moves import moved
from dmq.store.schema.cell.clock import Move, decode_moves
from dmq.store.schema.keys import pack_timeline_key
from dmq.store.schema.messages.record import (
    EntryKind,
    HalfMessageState,
    Terms,
    WaitingEntry,
    decode_waiting,
    encode_body,
    encode_half,
    encode_waiting,
)
from dmq.store.writer.operations import IfKnown, Reschedule
from dmq.trail.events import NO_QUEUE, EventKind, decode_event, encode_event

NOW_MS, STEP_MS = 1_000_000, 10_000
KEY = pack_timeline_key(NOW_MS, 7)
HOUR_MS = 3_600_000


def delay(deliver_at_ms: int, accepted_at_ms: int, kind: EntryKind = EntryKind.DELAYED_FOR) -> bytes:
    body = encode_body(b"id", b"", b"", b"wire")
    return encode_waiting(int(kind), 3, 4, 5, NOW_MS + deliver_at_ms, NOW_MS + accepted_at_ms, body)


def half(deliver_at_ms: int, accepted_at_ms: int) -> bytes:
    entry = WaitingEntry(int(EntryKind.TRANSACTION), 3, 4, 5, NOW_MS + deliver_at_ms, NOW_MS + accepted_at_ms)
    return encode_half(entry, HalfMessageState(Terms(0, 0), 0, 0, 1), b"id")


def times(value: bytes) -> tuple[int, int] | None:
    """When an entry is due and was accepted once it was moved, from now; ``None`` if it stays."""
    op = moved(KEY, value, STEP_MS, NOW_MS)
    if op is None:
        return None
    before, after = decode_waiting(value), decode_waiting(op.record)
    assert after == before._replace(deliver_at_ms=after.deliver_at_ms, accepted_at_ms=after.accepted_at_ms)
    assert op.record[28:] == value[28:], "the rest is as it was"
    told = b""
    if before.kind == EntryKind.DELAYED_FOR:  # nothing else says until when a message waits
        told = encode_event(EventKind.RESCHEDULED, 4, 0, NO_QUEUE, 0, after.deliver_at_ms, b"id")
    expected = Reschedule(
        KEY, 5, b"id", before.deliver_at_ms, after.deliver_at_ms, op.record, told, if_gone=IfKnown.ANSWER
    )
    assert op == expected
    return after.deliver_at_ms - NOW_MS, after.accepted_at_ms - NOW_MS


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (delay(25_000, 5_000), (15_000, -5_000)),  # by the step
        (delay(25_000, 20_000), (5_000, 0)),  # to its own delay from now, which is less
        (delay(8_000, 5_000), (1, -2_999)),  # would be due already
        (delay(25_000, 1), (15_000, -9_999)),
        (delay(25_000, 0), None),  # accepted by the clock as it is
        (delay(25_000, -5_000), None),
        (delay(1, 1), None),  # due anyway
        (delay(25_000, 5_000, EntryKind.DELAYED), None),  # a delivery timestamp that somebody gave
    ],
    ids=["step", "own delay", "over", "1 ms ahead", "not ahead", "behind", "due", "timestamp"],
)
def test_a_delay_that_began_while_the_clock_was_ahead_is_moved(value: bytes, expected: tuple[int, int] | None) -> None:
    """By the step, at most to its own delay from now, and to no time that is over."""
    assert times(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (half(STEP_MS, 5_000), None),
        (half(STEP_MS + 1, 5_000), (1, 0)),
        (half(STEP_MS + 700, -5_000), (700, -5_000)),
    ],
    ids=["near", "1 ms further", "far"],
)
def test_a_check_that_was_set_while_the_clock_was_ahead_is_moved(
    value: bytes, expected: tuple[int, int] | None
) -> None:
    """One that is no further away than the step may have been set before it, and comes."""
    assert times(value) == expected


def test_a_step_is_recorded_as_an_event_of_the_cell() -> None:
    """With what happened, by how much, and why, if somebody said; in words that trails have."""
    clock = ManualClock()
    cell = Cell(clock=clock)
    cell.scheduler.turn()
    clock.step_to(clock.now_ms() - HOUR_MS)
    cell.store.clock.now_ms()
    stepped_ms = clock.now_ms()
    cell.store.clock.accept("set by hand")
    cell.scheduler.turn()
    found = [decode_event(record.event) for record in events(cell.store)]
    told = [each for each in found if each.kind in {EventKind.CLOCK_CHANGED, EventKind.CLOCK_ACCEPTED}]
    assert [(each.kind, each.message_id[1:].decode()) for each in told] == [
        (EventKind.CLOCK_CHANGED, f"clock_stepped step_ms=-{HOUR_MS} moved_ms=-{HOUR_MS}"),
        (EventKind.CLOCK_ACCEPTED, "clock_accepted step_ms=0 moved_ms=0 why=set by hand"),
    ]
    for each in told:
        assert (each.topic_id, each.group_id, each.queue_id, each.attempt) == (0, 0, NO_QUEUE, 0)
        assert each.time_ms == stepped_ms
    cell.close()


@pytest.mark.parametrize("length", [1, 23, 25])
def test_a_row_of_steps_that_cannot_be_read_is_damage(length: int) -> None:
    with pytest.raises(StoreCorrupt, match=f"has {length} bytes"):
        decode_moves(bytes(length))


def test_a_row_of_steps_is_read_as_it_was_written() -> None:
    """How far each went, and how far the timeline was gone through for it."""
    value = bytes((*[0] * 7, 5, *[0] * 7, 1, *[0] * 7, 2, *[0] * 7, 6, *[0] * 16))
    assert decode_moves(value) == [Move(5, 1 << 64 | 2), Move(6, 0)]
