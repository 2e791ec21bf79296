"""``explain`` over small trails written by hand: the timeline, gaps, snapshots, and what became of the message."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.forges.trail.damage import change_column

from dmq.trail.events import EventKind
from spark_audit import explain
from spark_audit.report.message import files
from spark_audit.report.message.files import packed_forms
from spark_audit.report.message.words import event_in_words

T = 1_795_219_200_000  # 2026-11-21 00:00 UTC
ID = "01" + "AB" * 16
PACKED = bytes.fromhex(ID)
Row = dict[str, Any]


def _schema(columns: list[tuple[str, Any]]) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns])


EVENT = _schema(
    [
        ("sequence", pa.int64()), ("boot", pa.int32()), ("kind", pa.dictionary(pa.int32(), pa.string())),
        ("at_ms", pa.int64()), ("topic", pa.dictionary(pa.int32(), pa.string())), ("group", pa.string()),
        ("queue_id", pa.int32()), ("queue_offset", pa.int64()), ("attempt", pa.int32()), ("due_ms", pa.int64()),
        ("detail", pa.int64()), ("entry", pa.int64()), ("message_id", pa.binary()),
    ]
)  # fmt: skip
ENTRY = _schema(
    [
        ("entry", pa.int64()), ("kind", pa.string()), ("topic", pa.string()), ("group", pa.string()),
        ("message_id", pa.binary()), ("due_ms", pa.int64()), ("attempt", pa.int32()), ("is_stranded", pa.bool_()),
    ]
)  # fmt: skip
PROGRESS = _schema(
    [
        ("group", pa.string()), ("topic", pa.string()), ("queue_id", pa.int32()), ("floor", pa.int64()),
        ("done", pa.list_(pa.int64())), ("hidden", pa.list_(pa.int64())), ("cursor", pa.int64()),
    ]
)  # fmt: skip
QUEUE = _schema(
    [
        ("topic", pa.string()), ("group", pa.string()), ("queue_id", pa.int32()), ("first_offset", pa.int64()),
        ("end_offset", pa.int64()),
    ]
)  # fmt: skip


def event(sequence: int, kind: str, **columns: Any) -> Row:  # noqa: ANN401 - any column
    """An event of the message, one second per number."""
    told = {"boot": 1, "at_ms": T + sequence * 1000, "topic": "orders", "attempt": 0, "message_id": PACKED}
    return told | {"sequence": sequence, "kind": kind} | columns


def write(trail: Path, *rows: Row, cell: str = "shop", is_listed: bool = True) -> Path:
    """One file of events with these rows, and its line in the manifest."""
    first, last = rows[0]["sequence"], rows[-1]["sequence"]
    path = trail / f"events/cell={cell}/date=2026-11-21/hour=00/{first:020}-{last:020}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), EVENT), path)
    if is_listed:
        line = {
            "path": str(path.relative_to(trail)), "first_sequence": first, "last_sequence": last,
            "first_at_ms": rows[0]["at_ms"], "last_at_ms": rows[-1]["at_ms"],
        }  # fmt: skip
        manifest = trail / f"manifest/cell={cell}/2026-11-21.jsonl"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        with manifest.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
    return path


def snapshot(
    trail: Path,
    sequence: int,
    entries: Sequence[Row] = (),
    progress: Sequence[Row] = (),
    queues: Sequence[Row] = (),
) -> None:
    """A snapshot of the cell ``shop``."""
    folder = trail / f"snapshots/cell=shop/{sequence:020}"
    folder.mkdir(parents=True)
    for name, rows, schema in (
        ("entries", entries, ENTRY), ("progress", progress, PROGRESS), ("queues", queues, QUEUE),
    ):  # fmt: skip
        pq.write_table(pa.Table.from_pylist(list(rows), schema), folder / f"{name}.parquet")
    (folder / "manifest.json").write_text(json.dumps({"sequence": sequence, "taken_ms": T + sequence * 1000}))


def said(trail: Path, message_id: str = ID, code: int = 0, **options: Any) -> str:  # noqa: ANN401 - of `main`
    out = io.StringIO()
    assert explain.main(message_id, trail, out=out, progress=io.StringIO(), **options) == code
    return out.getvalue()


def outcomes(trail: Path, **options: Any) -> list[tuple[str | None, str]]:  # noqa: ANN401 - of `main`
    told = json.loads(said(trail, as_json=True, **options))
    return [(outcome["group"], outcome["verdict"]) for outcome in told["outcomes"]]


SCHEDULED = event(1, "SCHEDULED", due_ms=T + 5000, entry=7)
DELIVERED = event(2, "DELIVERED", at_ms=T + 5003, due_ms=T + 5000, entry=7, queue_id=2, queue_offset=17)
OTHER = event(9, "HEARTBEAT", message_id=None, topic=None)


def test_the_way_to_a_cluster_in_plain_words(tmp_path: Path) -> None:
    """Sent without an answer, sent again, there; one that the cluster refuses, with its code."""
    place = {"group": "dmq-forwarder", "queue_id": 2, "queue_offset": 17}
    doubt = event(3, "FORWARD_IN_DOUBT", attempt=1, **place)
    there = event(4, "FORWARDED", attempt=2, detail=1234, **place)
    write(tmp_path, SCHEDULED, DELIVERED, doubt, there, event(5, "FETCHED", attempt=1, detail=3))
    told = said(tmp_path)
    assert "sent to the cluster without an answer: it may be there, and is sent again" in told
    assert "the cluster has it at offset 1,234 of a queue there, from queue 2 at offset 17, sent 2 times" in told
    assert "taken from the inner topic of the cluster at offset 3 of a queue there" in told
    assert "brought it to the cluster" in told


def test_refusals_of_a_cluster_in_plain_words(tmp_path: Path) -> None:
    """It is a dead letter of the forwarder."""
    refused = event(3, "FORWARD_REFUSED", group="dmq-forwarder", queue_id=2, attempt=40014, detail=5)
    write(tmp_path, SCHEDULED, DELIVERED, refused)
    told = said(tmp_path)
    assert "the cluster refuses it with code 40014: from queue 2 to %DLQ%dmq-forwarder at offset 5" in told


def test_a_timeline_in_plain_words(tmp_path: Path) -> None:
    """Every event with time, cell, run, number and file, in the order of the trail; a line per end, with its rule."""
    nacked = event(3, "NACKED", at_ms=T + 6000, group="billing", attempt=2, due_ms=T + 9000, queue_id=2, entry=8)
    dead = event(
        4, "DEAD_EXHAUSTED", at_ms=T + 9000, boot=2, group="billing", attempt=3, queue_id=-1, detail=5, topic="orders"
    )
    write(tmp_path, SCHEDULED, DELIVERED)
    write(
        tmp_path, nacked, dead, event(5, "ACKED", at_ms=T + 9500, group="mail", queue_id=2, queue_offset=17, attempt=1)
    )
    lines = said(tmp_path).splitlines()
    lane = "from its retry lane to %DLQ%billing at offset 5"
    assert lines[0] == f"message {ID}, 5 events in 2 files of 1 cell; all times are UTC"
    assert lines[2:12:2] == [
        "2026-11-21 00:00:01      accepted, to be delivered at 2026-11-21 00:00:05 UTC",
        "2026-11-21 00:00:05.003  handed over 3 ms late to queue 2 at offset 17",
        "2026-11-21 00:00:06      group billing failed attempt 2, a copy waits until 2026-11-21 00:00:09 UTC",
        f"2026-11-21 00:00:09      group billing: dead letter after attempt 3, no attempts left; {lane}",
        "2026-11-21 00:00:09.500  group mail finished attempt 1, queue 2 at offset 17",
    ]
    assert lines[9].strip() == (
        "orders; DEAD_EXHAUSTED, cell shop, run 2, sequence 4, events/cell=shop/date=2026-11-21/hour=00/"
        "00000000000000000003-00000000000000000005.parquet"
    )
    assert lines[-3:] == [
        "orders: was handed over 3 ms late [rule: DELIVERED ends the waiting]",
        "orders, group billing: has it as a dead letter in %DLQ%billing [rule: DEAD_EXHAUSTED is an exit]",
        "orders, group mail: finished it [rule: ACKED is an end]",
    ]


@pytest.mark.parametrize(
    ("rows", "said_of_it", "outcome"),
    [
        (
            (SCHEDULED, event(2, "REPLACED", due_ms=T + 5000, entry=7)),
            "cancelled, since a message with the same own key took its place",
            "was replaced by a message with its own key [rule: REPLACED ends the waiting]",
        ),
        (
            (event(2, "ABSORBED", due_ms=T + 5000, entry=6),),
            "not stored: another message with its own key waits until 2026-11-21 00:00:05 UTC",
            "was not stored, since another message waited under its own key [rule: ABSORBED ends the waiting]",
        ),
    ],
)
def test_effects_of_own_keys_in_plain_words(tmp_path: Path, rows: Sequence[Row], said_of_it: str, outcome: str) -> None:
    """A replaced message waited, an absorbed one never did; neither is missing."""
    write(tmp_path, *rows)
    lines = said(tmp_path).splitlines()
    assert any(line.endswith(said_of_it) for line in lines), lines
    assert lines[-1] == f"orders: {outcome}"


@pytest.mark.parametrize("content", ["{", "[]", '{"retired_sequence": "7"}', "\udcff"])
def test_control_files_that_cannot_be_read_hide_no_event(tmp_path: Path, content: str) -> None:
    """A cell's file, a line of its manifest, and the head of its snapshot: named, and the rest is told."""
    write(tmp_path, SCHEDULED, DELIVERED)
    snapshot(tmp_path, 2)
    broken = content.encode("utf-8", "surrogateescape")
    (tmp_path / "cells").mkdir()
    for path in ("cells/shop.json", f"snapshots/cell=shop/{2:020}/manifest.json"):
        (tmp_path / path).write_bytes(broken)
    with (tmp_path / "manifest/cell=shop/2026-11-21.jsonl").open("ab") as lines:
        lines.write(broken + b"\n")
    told = said(tmp_path)
    assert "handed over 3 ms late" in told
    assert "NOT READ: manifest/cell=shop/2026-11-21.jsonl: line 2 cannot be read" in told
    is_object = content.startswith("{") and content.endswith("}")
    assert ("NOT READ: cells/shop.json: cannot be read" in told) is not is_object


@pytest.mark.parametrize(("column", "kind"), [("entry", None), ("sequence", pa.string())])
def test_a_file_with_other_columns_is_not_read(tmp_path: Path, column: str, kind: pa.DataType | None) -> None:
    """It is named; the events of the other files are told."""
    write(tmp_path, SCHEDULED)
    change_column(write(tmp_path, DELIVERED), column, kind)
    told = said(tmp_path)
    assert "accepted, to be delivered" in told
    assert "its columns are not those of events" in told


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_late_delivery_names_the_stop(tmp_path: Path, is_killed: bool) -> None:
    """The daemon was down at the due time; a stop before or after the message's is not named."""
    none: Row = {"message_id": None, "topic": None}
    begin = event(1, "OPENED", at_ms=T - 9_000, **none)
    scheduled = event(2, "SCHEDULED", at_ms=T, due_ms=T + 60_000, entry=7)
    end = event(3, "HEARTBEAT" if is_killed else "CLOSED", at_ms=T + 50_500, **none)
    opened = event(4, "OPENED", at_ms=T + 131_900, boot=2, **none)
    delivered = event(5, "DELIVERED", at_ms=T + 132_000, boot=2, due_ms=T + 60_000, entry=7, queue_id=2, queue_offset=1)
    closed = event(6, "CLOSED", at_ms=T + 133_000, boot=2, **none)
    again = event(7, "OPENED", at_ms=T + 140_000, boot=3, **none)
    write(tmp_path, begin, scheduled, end)
    write(tmp_path, opened, delivered, closed, again)
    kill = ", counted from its last event before a kill" if is_killed else ""
    why = f"(the daemon was down 2026-11-21 00:00:50 to 00:02:11 UTC{kill})"
    lines = said(tmp_path).splitlines()
    assert [line for line in lines if "down" in line] == [
        f"2026-11-21 00:02:12      handed over 1 min 12 s late to queue 2 at offset 1 {why}",
        f"orders: was handed over 1 min 12 s late {why} [rule: DELIVERED ends the waiting]",
    ]


def test_a_message_that_was_open_in_a_retired_cell(tmp_path: Path) -> None:
    """Its store is gone; what another cell did with the message stands. A cell with later events is not gone."""
    write(tmp_path, SCHEDULED)
    write(tmp_path, SCHEDULED, DELIVERED, cell="other")
    (tmp_path / "retired").mkdir()
    for last, verdict in ((1, "retired"), (0, "pending")):
        (tmp_path / "retired" / "shop.json").write_text(json.dumps({"last_sequence": last}))
        told = json.loads(said(tmp_path, as_json=True))
        assert [(each["cell"], each["verdict"]) for each in told["outcomes"]] == [("other", "done"), ("shop", verdict)]


OF_NO_MESSAGE = {
    EventKind.OPENED, EventKind.CLOSED, EventKind.HEARTBEAT, EventKind.GAP, EventKind.TAIL_LOST, EventKind.PROMOTED,
    EventKind.CLOCK_CHANGED, EventKind.CLOCK_ACCEPTED, EventKind.OPERATED, EventKind.SCHEDULE_CHANGED,
    EventKind.TOPIC_CREATED, EventKind.TOPIC_CHANGED, EventKind.TOPIC_REMOVED, EventKind.GROUP_CREATED,
    EventKind.GROUP_CHANGED, EventKind.GROUP_REMOVED, EventKind.SUBSCRIBED, EventKind.RESET, EventKind.OFFSET_SET,
}  # fmt: skip


def test_a_failure_has_its_reason_in_words() -> None:
    """The error and the client; a client that reported none is named; a trail of an earlier build tells nothing."""
    failed = event(1, "NACKED")
    plain = event_in_words(failed)
    assert event_in_words({**failed, "error": "E: x", "client": "c"}) == f"{plain}; error: E: x (c)"
    silent = event_in_words({**failed, "error": None, "client": "c"})
    assert silent == f"{plain}; reason not reported by the client (c)"


@pytest.mark.parametrize("kind", sorted(set(EventKind) - OF_NO_MESSAGE))
def test_each_kind_of_event_has_words(kind: EventKind) -> None:
    """Danger: a person who follows a message is told of an unknown event."""
    assert "unknown kind" not in event_in_words(event(1, kind.name))


HALF = event(1, "HALF", due_ms=T + 6000, entry=7)
COMMITTED = event(3, "COMMITTED", attempt=1, entry=7)
UNDECIDED = {"group": "unresolved-transactions", "attempt": 15, "detail": 3, "entry": 7}


@pytest.mark.parametrize(
    ("rows", "said_of_it", "outcome"),
    [
        (
            (event(2, "TX_CHECKED", attempt=1, due_ms=T + 9000, entry=7), COMMITTED,
             event(4, "QUEUED", queue_id=2, queue_offset=17, entry=7)),
            ["its producers are asked for its outcome, check 1; the next one is at 2026-11-21 00:00:09 UTC",
             "its transaction was committed", "accepted, at once in queue 2 at offset 17"],
            ["was in its queue at once [rule: QUEUED needs no waiting]"],
        ),
        (
            (COMMITTED, event(4, "SCHEDULED", due_ms=T + 99_000, entry=8)),
            ["its transaction was committed", "accepted, to be delivered at 2026-11-21 00:01:39 UTC"],
            ["was committed [rule: COMMITTED ends the waiting]",
             "waits, by its last event [rule: it is not due yet, with grace]"],
        ),
        (
            (COMMITTED, event(4, "ABSORBED", due_ms=T + 5000, entry=6)),
            ["its transaction was committed",
             "not stored: another message with its own key waits until 2026-11-21 00:00:05 UTC"],
            ["was not stored, since another message waited under its own key [rule: ABSORBED ends the waiting]",
             "was committed [rule: COMMITTED ends the waiting]"],
        ),
        (
            (event(3, "ROLLED_BACK", entry=7),),
            ["its transaction was rolled back"],
            ["was rolled back [rule: ROLLED_BACK ends the waiting]"],
        ),
        (
            (event(3, "TX_GIVEN_UP", **UNDECIDED),),
            ["its transaction was not decided, after check 15: to %DLQ%unresolved-transactions at offset 3"],
            ["is a dead letter in %DLQ%unresolved-transactions [rule: TX_GIVEN_UP ends the waiting]"],
        ),
        (
            (event(3, "TX_TOO_OLD", **UNDECIDED),),
            ["its transaction was not decided in time: to %DLQ%unresolved-transactions at offset 3"],
            ["is a dead letter in %DLQ%unresolved-transactions [rule: TX_TOO_OLD ends the waiting]"],
        ),
    ],
)  # fmt: skip
def test_a_transaction_in_plain_words(
    tmp_path: Path, rows: Sequence[Row], said_of_it: list[str], outcome: list[str]
) -> None:
    """From the half message to its one end, and to what it becomes."""
    write(tmp_path, HALF, *rows)
    lines = said(tmp_path).splitlines()
    half = "accepted as a half message: invisible; its producers are asked at 2026-11-21 00:00:06 UTC"
    assert [line[25:] for line in lines[2 : 4 + 2 * len(rows) : 2]] == [half, *said_of_it]
    assert lines[-len(outcome) :] == [f"orders: {each}" for each in outcome]


def test_where_a_message_comes_from_is_no_outcome(tmp_path: Path) -> None:
    """Danger: what a schedule sent, or an inner topic, was said to have no beginning. Alone it has none indeed."""
    occurred = event(3, "OCCURRED", entry=3, detail=1)
    write(tmp_path, SCHEDULED, DELIVERED, occurred, event(4, "FETCHED", attempt=1, detail=3))
    assert outcomes(tmp_path) == [(None, "done")]
    write(tmp_path / "alone", occurred)
    assert outcomes(tmp_path / "alone") == [(None, "inconsistent")]


@pytest.mark.parametrize(("following", "verdict"), [(4, "lost"), (6, "inconclusive")])
def test_a_committed_message_that_was_never_accepted_is_lost(tmp_path: Path, following: int, verdict: str) -> None:
    """As in the audit: that it was committed is no end by itself. Where a gap follows, its accept may be in there."""
    write(tmp_path, HALF, OTHER | {"sequence": 2}, COMMITTED)
    write(tmp_path, OTHER | {"sequence": following})
    assert outcomes(tmp_path) == [(None, verdict)]


@pytest.mark.parametrize(
    ("sequence", "held", "verdict"),
    [(1, [], "pending"), (9, [{"kind": "TRANSACTION", "entry": 7}], "pending"), (9, [], "lost")],
)
def test_a_half_message_waits_until_it_is_decided(tmp_path: Path, sequence: int, held: list[Row], verdict: str) -> None:
    """However long that takes; one that a newer snapshot does not hold is lost."""
    write(tmp_path, HALF | {"sequence": 2}, *(OTHER | {"sequence": number} for number in range(3, 9)), LATER)
    snapshot(tmp_path, sequence, [HELD | {"is_stranded": False} | each for each in held])
    assert outcomes(tmp_path) == [(None, verdict)]


def test_a_redriven_message_is_followed_for_its_group_alone(tmp_path: Path) -> None:
    """Others that read the topic have nothing to do with it."""
    made = {"group": "billing", "queue_id": -1, "queue_offset": 3}
    began = event(1, "SUBSCRIBED", message_id=None, group="mail", queue_id=0, queue_offset=0)
    came = event(2, "QUEUED_FOR_GROUP", attempt=1, entry=7, detail=5, **made)
    write(tmp_path, began, came)
    assert outcomes(tmp_path) == [("billing", "open")]
    assert "made of the dead letter in %DLQ%billing at offset 5, for group billing alone" in said(tmp_path)
    write(tmp_path, event(3, "ACKED", attempt=1, **made))
    assert outcomes(tmp_path) == [("billing", "done")]


def test_a_dead_letter_and_its_new_message_name_each_other(tmp_path: Path) -> None:
    """Of a redrive for one group; another letter at this offset of a later group of the name is another one."""
    old = {"group": "billing", "detail": 5, "message_id": b"\0old"}
    new = {**old, "attempt": 1, "entry": 7, "queue_id": -1, "queue_offset": 3, "message_id": b"\0new"}
    later = {"message_id": b"\0later"}
    write(
        tmp_path,
        event(1, "QUEUED_FOR_GROUP", **new),
        event(2, "REDRIVEN", **old),
        event(3, "QUEUED_FOR_GROUP", **new | later),
        event(4, "REDRIVEN", **old | {"message_id": b"\0other"}),
    )
    line = "redrive for group billing: dead letter old, new message new"
    for message_id in ("old", "new"):
        assert line in said(tmp_path, message_id)
        assert "later" not in said(tmp_path, message_id)
        assert json.loads(said(tmp_path, message_id, as_json=True))["redrives"] == [
            {"from": "old", "to": "new", "group": "billing", "at_ms": T + 2000}
        ]


@pytest.mark.parametrize(
    ("packed", "asked"),
    [
        (PACKED, ID), (PACKED, ID.lower()), (b"\0order-1", "order-1"), (b"\0" + "größe".encode(), "größe"),
        (b"\0" + ID.lower().encode(), ID), (b"\0" + ID.lower().encode(), ID.lower()),
    ],
)  # fmt: skip
def test_an_id_is_found_however_it_is_written(tmp_path: Path, packed: bytes, asked: str) -> None:
    """34 hex digits in any case, packed or not, and any text."""
    write(tmp_path, SCHEDULED | {"message_id": packed}, OTHER | {"sequence": 2})
    assert "1 event" in said(tmp_path, asked)


def test_a_text_id_in_another_case_is_another_id(tmp_path: Path) -> None:
    """Only hex digits mean the same in both cases."""
    write(tmp_path, SCHEDULED | {"message_id": b"\0order-1"})
    said(tmp_path, "Order-1", code=3)
    assert packed_forms("order-1") == [b"\0order-1"]


def test_an_unknown_id_lists_the_searched_places(tmp_path: Path) -> None:
    """So that a wrong trail is seen at once."""
    write(tmp_path, SCHEDULED)
    write(tmp_path, SCHEDULED, cell="pay")
    text = said(tmp_path, "nobody", code=3)
    assert "not found in 2 files of 2 cells" in text
    assert "cells searched: pay, shop" in text


@pytest.mark.parametrize("message_id", ["", ID])
def test_a_folder_that_is_no_trail_is_a_wrong_use(tmp_path: Path, message_id: str) -> None:
    """Not the same as not found."""
    assert said(tmp_path, message_id, code=2).startswith("explain: ")


def test_a_gap_stands_where_something_may_be_missing(tmp_path: Path) -> None:
    """Between the events around it, with its numbers and the times of its neighbours; earlier gaps do not matter."""
    write(tmp_path, OTHER | {"sequence": 1}, OTHER | {"sequence": 2})
    write(tmp_path, SCHEDULED | {"sequence": 5})
    write(tmp_path, event(8, "DELIVERED", due_ms=T + 5000, entry=7))
    lines = said(tmp_path).splitlines()
    assert [line for line in lines if "GAP" in line] == [lines[4]]
    times = "between 2026-11-21 00:00:01 and 2026-11-21 00:00:08"
    assert lines[4].strip() == f"GAP in cell shop: 2 events, 6 to 7, {times}: in no file, and in no manifest"
    assert "accepted" in lines[2]
    assert "handed over" in lines[5]


def test_one_missing_number_is_a_gap(tmp_path: Path) -> None:
    """The smallest hole is a hole."""
    write(tmp_path, SCHEDULED)
    write(tmp_path, DELIVERED | {"sequence": 3})
    assert "GAP in cell shop: 1 event, 2 to 2" in said(tmp_path)


def test_a_missing_file_is_a_gap_that_names_it(tmp_path: Path) -> None:
    """The manifest knows what was there."""
    write(tmp_path, SCHEDULED)
    path = write(tmp_path, OTHER | {"sequence": 2}, OTHER | {"sequence": 3})
    path.unlink()
    assert f"in the manifest, but not there: {path.relative_to(tmp_path)}" in said(tmp_path)


def test_a_gap_event_is_written(tmp_path: Path) -> None:
    """The trail says itself what was dropped before it was exported."""
    gap = event(6, "GAP", detail=2, due_ms=4, message_id=None, topic=None)
    write(tmp_path, SCHEDULED)
    write(tmp_path, gap)
    assert "2 to 5" in said(tmp_path)
    assert "dropped before export" in said(tmp_path)


def test_a_range_removed_by_retention_is_no_gap(tmp_path: Path) -> None:
    """A cell's trail may begin late."""
    write(tmp_path, SCHEDULED | {"sequence": 500})
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells/shop.json").write_text(json.dumps({"retired_sequence": 499}))
    trail = files.TrailFiles(tmp_path, io.StringIO())
    assert trail.gaps("shop") == []
    (tmp_path / "cells/shop.json").unlink()
    assert [(gap.first, gap.last) for gap in trail.gaps("shop")] == [(1, 499)]


HELD = {"entry": 7, "kind": "DELAYED", "topic": "orders", "message_id": PACKED, "due_ms": T + 5000, "attempt": 0}
LATER = OTHER | {"at_ms": T + 500_000}


@pytest.mark.parametrize(
    ("now", "held", "verdict"),
    [
        (OTHER, [HELD | {"is_stranded": False}], "pending"), (LATER, [HELD | {"is_stranded": False}], "overdue"),
        (LATER, [HELD | {"kind": "HELD", "is_stranded": False}], "pending"),
        (OTHER, [HELD | {"is_stranded": True}], "lost"), (LATER, [], "lost"), (OTHER, [], "lost"),
    ],
)  # fmt: skip
def test_pending_messages_are_judged_by_the_newest_snapshot(
    tmp_path: Path, now: Row, held: list[Row], verdict: str
) -> None:
    """Held: it waits, or is overdue when the cell's time is past due and grace. Not held, and no end: lost."""
    others = [OTHER | {"sequence": number} for number in range(2, 9)]
    write(tmp_path, SCHEDULED, *others, now)
    snapshot(tmp_path, 3, [HELD | {"is_stranded": False}])
    snapshot(tmp_path, 9, held)
    assert outcomes(tmp_path) == [(None, verdict)]


@pytest.mark.parametrize(("now", "verdict"), [(OTHER, "pending"), (LATER, "inconclusive")])
def test_without_a_newer_snapshot_nothing_is_proven(tmp_path: Path, now: Row, verdict: str) -> None:
    """One that was taken before the message was accepted says nothing of it."""
    write(tmp_path, OTHER | {"sequence": 1}, OTHER | {"sequence": 2})
    write(tmp_path, SCHEDULED | {"sequence": 3}, now | {"sequence": 4})
    snapshot(tmp_path, 2)
    assert outcomes(tmp_path) == [(None, verdict)]


def test_a_gap_makes_a_loss_inconclusive(tmp_path: Path) -> None:
    """Its end could be in the gap."""
    write(tmp_path, SCHEDULED)
    write(tmp_path, OTHER)
    snapshot(tmp_path, 9)
    assert outcomes(tmp_path) == [(None, "inconclusive")]


def put_back(sequence: int, to: int) -> Row:
    return event(sequence, "TAIL_LOST", detail=to, due_ms=sequence - to, message_id=None, topic=None)


def test_events_that_a_store_forgot_count_for_nothing(tmp_path: Path) -> None:
    """It was delivered, and the store was put back to before that: it waits, whatever a snapshot of then says."""
    write(tmp_path, SCHEDULED, DELIVERED, put_back(3, to=2), OTHER)
    snapshot(tmp_path, 1, [HELD | {"is_stranded": False}])
    snapshot(tmp_path, 2)
    assert outcomes(tmp_path) == [(None, "pending")]
    assert said(tmp_path).count("UNDONE") == 1
    assert "GAP" not in said(tmp_path)


def test_messages_lost_with_a_forgetful_store_are_reported(tmp_path: Path) -> None:
    """It was accepted after the backup to which the store was put back; an earlier putting back that was undone counts
    for nothing either.
    """
    write(tmp_path, OTHER | {"sequence": 1}, OTHER | {"sequence": 2}, SCHEDULED | {"sequence": 3}, put_back(4, to=2))
    assert outcomes(tmp_path) == [(None, "undone")]
    write(tmp_path, put_back(5, to=4), OTHER)
    assert outcomes(tmp_path) == [(None, "pending")]


PLACE = {"topic": "orders", "queue_id": 2, "floor": 10, "done": [], "hidden": [], "cursor": None}


@pytest.mark.parametrize(
    ("progress", "end", "verdict"),
    [
        ({}, 20, "unread"), ({"floor": 18}, 20, "lost"), ({"done": [17]}, 20, "lost"),
        ({"hidden": [17]}, 20, "in flight"), ({"cursor": 18}, 20, "in flight"),
        ({"cursor": 17}, 20, "unread"), ({}, 17, "lost"),
    ],
)  # fmt: skip
def test_an_open_place_of_a_group_is_judged_by_its_progress(
    tmp_path: Path, progress: Row, end: int, verdict: str
) -> None:
    """A group that subscribed before and left no event: what the snapshot says of its place."""
    subscribed = event(1, "SUBSCRIBED", group="billing", queue_id=2, queue_offset=0, message_id=None)
    late = event(2, "SUBSCRIBED", group="late", queue_id=2, queue_offset=18, message_id=None)
    write(tmp_path, subscribed, late, SCHEDULED | {"sequence": 3}, DELIVERED | {"sequence": 4})
    queue = {"topic": "orders", "queue_id": 2, "first_offset": 0, "end_offset": end}
    snapshot(tmp_path, 4, progress=[PLACE | {"group": "billing"} | progress], queues=[queue])
    assert outcomes(tmp_path) == [(None, "done"), ("billing", verdict)]


@pytest.mark.parametrize(("group", "verdict"), [("billing", "pending"), ("mail", "lost")])
def test_a_waiting_copy_must_be_that_of_its_group(tmp_path: Path, group: str, verdict: str) -> None:
    """A copy that waits for another group proves nothing."""
    nacked = event(3, "NACKED", group="billing", attempt=1, due_ms=T + 90_000, queue_id=2, entry=8)
    write(tmp_path, SCHEDULED, DELIVERED, nacked)
    copy = HELD | {"kind": "RETRY", "entry": 8, "group": group, "due_ms": T + 90_000, "is_stranded": False}
    snapshot(tmp_path, 3, [copy])
    assert outcomes(tmp_path)[1] == ("billing", verdict)


def test_a_message_that_only_a_snapshot_has_is_found(tmp_path: Path) -> None:
    """The store has it and the trail does not: that is worth a line, not a `not found`."""
    write(tmp_path, OTHER | {"sequence": 1})
    snapshot(tmp_path, 1, [HELD | {"is_stranded": False}])
    assert said(tmp_path).splitlines()[-1].endswith("[rule: ORPHAN]")


def test_cells_stand_in_one_line_of_time(tmp_path: Path) -> None:
    """Each in its own order, also when its clock stepped back."""
    write(tmp_path, SCHEDULED, event(2, "SEND_FAILED", at_ms=T), event(3, "SENT", at_ms=T + 4000), cell="spool")
    write(tmp_path, event(1, "QUEUED", at_ms=T + 3000), cell="shop")
    told = json.loads(said(tmp_path, as_json=True))
    assert [each["kind"] for each in told["events"]] == ["SCHEDULED", "SEND_FAILED", "QUEUED", "SENT"]


def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    """One bad file must not hide what the rest can say."""
    write(tmp_path, SCHEDULED)
    bad = write(tmp_path, DELIVERED)
    bad.write_bytes(b"PAR1 is not enough")
    text = said(tmp_path)
    assert "1 event " in text
    assert f"NOT READ: {bad.relative_to(tmp_path)}" in text


def test_unfinished_files_are_no_part_of_the_trail(tmp_path: Path) -> None:
    """Whatever begins with a dot or an underscore or ends in .tmp."""
    path = write(tmp_path, SCHEDULED)
    for name in (f"_{path.name}", f".{path.name}", f"{path.name}.tmp"):
        (path.parent / name).write_bytes(path.read_bytes())
    (path.parent / "copy.tmp").mkdir()
    (path.parent / "copy.tmp" / path.name).write_bytes(path.read_bytes())
    assert "1 event in 1 file " in said(tmp_path)


def test_ids_cannot_command_a_terminal(tmp_path: Path) -> None:
    """What is in the trail is shown, not obeyed."""
    write(tmp_path, SCHEDULED | {"topic": "\x1b[2Jorders\n"})
    text = said(tmp_path)
    assert "\x1b" not in text
    assert "\\u001b[2Jorders\\u000a" in text


class Heard(io.StringIO):
    """Progress that tells when it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def write(self, text: str) -> int:
        self.told.set()
        return super().write(text)


def test_a_long_search_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first second is over; a short one is silent."""
    write(tmp_path, SCHEDULED)
    progress = Heard()
    explain.main(ID, tmp_path, out=io.StringIO(), progress=progress)
    assert progress.getvalue() == ""
    monkeypatch.setattr(files, "_TOLD_EVERY_S", 0.001)
    matching = files.TrailFiles.matching

    def slow(self: files.TrailFiles, *values: Any) -> list[Row]:  # noqa: ANN401 - passed on
        assert progress.told.wait(30)
        return matching(self, *values)

    monkeypatch.setattr(files.TrailFiles, "matching", slow)
    explain.main(ID, tmp_path, out=io.StringIO(), progress=progress)
    assert progress.getvalue().splitlines()[0] == "explain: looking for the id, 0 of 1 files read"
