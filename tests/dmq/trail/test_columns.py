"""Outbox rows as columns: whatever goes in comes out, by the rules of docs/reference/trail.md."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.models.trail.read import HOUR_MS, expected_row, read_trail

from dmq.errors import StoreCorrupt
from dmq.store.schema.accounting.outbox import NOT_APPLICABLE, block_head, decode_block, encode_block, pack_record_head
from dmq.store.schema.keys import pack_u64
from dmq.trail.columns import to_columns
from dmq.trail.events import EventKind, decode_event, encode_event, with_reason
from dmq.trail.files import write_events
from dmq.trail.manifest import Layout, append
from dmq.trail.outbox_rows import Row, chunks_of, files_of
from retry.failure_reason import FailureReason

NAMES = {1: "orders", 2: "payments", 70_000: "workers", 2**32 - 1: "%RETRY%workers"}
COUNTED = (int(EventKind.GAP), int(EventKind.TAIL_LOST))
CELL = "cell-1"

small = st.integers(0, 2**62)
places = st.one_of(st.just(NOT_APPLICABLE), small)
ids = st.one_of(st.binary(min_size=17, max_size=17), st.binary(max_size=40))
name_ids = st.sampled_from((0, *NAMES))
queues = st.one_of(st.sampled_from((0xFFFF, 0xFFFE, 0)), st.integers(0, 0xFFFF))
kinds = st.integers(0, 255)
events = st.builds(encode_event, kinds, name_ids, name_ids, queues, st.integers(0, 0xFFFF), small, ids).map(
    lambda event: event[:21] + b"\0" * 7 + event[:1] if event[0] in COUNTED else event
)
usual = st.builds(
    encode_event,
    st.sampled_from([int(kind) for kind in EventKind if int(kind) not in COUNTED]),
    *(name_ids, name_ids, queues, st.integers(0, 9), small, st.binary(min_size=17, max_size=17)),
)
records = st.tuples(places, places, st.one_of(events, usual, usual))
hours = st.integers(0, 2)
blocks = st.lists(
    st.tuples(st.integers(1, 9), hours, st.lists(records, min_size=1, max_size=6)), min_size=1, max_size=8
)


def rows_of(made: list[tuple[int, int, list[tuple[int, int, bytes]]]], first: int) -> list[Row]:
    """Outbox rows, one after the other."""
    rows: list[Row] = []
    for boot, hour, content in made:
        joined = [
            part for entry, offset, event in content for part in (pack_record_head(len(event), entry, offset), event)
        ]
        at_ms = 1_700_000_000_000 + hour * HOUR_MS
        value = encode_block(boot, at_ms, len(content), joined)
        assert block_head(value) == (boot, at_ms, len(content))
        rows.append(Row(first, len(content), boot, at_ms, value))
        first = rows[-1].end
    return rows


@settings(max_examples=40 * EFFORT)
@given(blocks, st.integers(1, 2**60))
def test_events_come_out_as_they_went_in(made: list[tuple[int, int, list[tuple[int, int, bytes]]]], first: int) -> None:
    """Any kinds, ids, places and hours, and numbers nobody gave a meaning yet; each file is of one hour."""
    rows = rows_of(made, first)
    with TemporaryDirectory() as folder:
        layout = Layout(Path(folder), CELL)
        for part in files_of(rows):
            batches = [to_columns(chunk, NAMES.__getitem__) for chunk in chunks_of(part)]
            append(layout, write_events(layout, batches))
        found = read_trail(Path(folder), CELL)
    assert found == [
        expected_row(record, NAMES) for row in rows for record in decode_block(pack_u64(row.first_sequence), row.value)
    ]


def test_an_unknown_kind_is_kept() -> None:
    """A number of a later version is named by itself, and its time is not lost."""
    event = encode_event(99, 1, 0, 3, 1, 4_711, b"\1" * 17)
    (row,) = rows_of([(1, 0, [(1, 2, event)])], 1)
    (found,) = to_columns([row], NAMES.__getitem__).to_pylist()
    assert (found["kind"], found["due_ms"], found["queue_offset"]) == ("KIND_99", 4_711, 2)


@pytest.mark.parametrize("damage", [lambda value: value[:-1], lambda value: value + b"x", lambda value: value[:20]])
def test_a_row_that_does_not_add_up_is_refused(damage: object) -> None:
    """It is never read as something else."""
    (row,) = rows_of([(1, 0, [(1, 2, encode_event(2, 1, 0, 3, 1, 0, b"\1" * 17))] * 3)], 1)
    assert callable(damage)
    with pytest.raises(StoreCorrupt):
        to_columns([row._replace(value=damage(row.value))], NAMES.__getitem__)


@pytest.mark.parametrize("message_id", [b"\1" * 17, b"\0abc", b"\0" + b"x" * 255])
@pytest.mark.parametrize(
    ("error", "client"), [("E: no courier \u20ac", "c-1"), ("", "client"), ("E", ""), ("Err", "clie")]
)
def test_a_failure_has_its_reason_in_columns_of_its_own(message_id: bytes, error: str, client: str) -> None:
    """Whatever the lengths: among them one in which the id with its reason is as long as the usual id alone."""
    reason = FailureReason(error_text=error, client_id=client)
    plain = encode_event(EventKind.NACKED, 1, 2, 3, 1, 4_711, message_id)
    events = [plain, with_reason(plain, reason), plain]
    (row,) = rows_of([(1, 0, [(1, 2, event) for event in events])], 1)
    found = to_columns([row], NAMES.__getitem__).to_pylist()
    assert [each["message_id"] for each in found] == [message_id] * 3
    told = [(each["error"], each["client"]) for each in found]
    assert told == [(None, None), (error or None, client or None), (None, None)]
    assert decode_event(events[1]) == decode_event(plain)


def test_a_failure_of_which_nothing_is_known_is_written_as_before() -> None:
    """Its event has no reason, and the bytes of earlier builds."""
    plain = encode_event(EventKind.NACKED, 1, 2, 3, 1, 4_711, b"\1" * 17)
    assert with_reason(plain, None) == with_reason(plain, FailureReason()) == plain
