"""An event must agree with what came before it, and a trail with its manifests; what does not is found without --exact.

Each scenario is a cell of one trail, as in ``test_verdict``; those about files have a trail of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.forges.cells.forge import forge
from support.forges.trail.disagreements import (
    absorbed,
    delivered,
    kept_back,
    made_anew,
    many_times,
    other_copies,
    other_places,
    other_times,
    transactions,
)
from support.forges.trail.files import CellWriter, files_of, read_manifest, write_manifest
from support.forges.trail.hand import START_MS, Hand

from dmq.trail.manifest import CellFile, Layout, write_cell
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome

pytestmark = pytest.mark.spark
Said = set[tuple[str, str, str]]


def said(outcome: AuditOutcome) -> Said:
    """Cell, kind and rule of all findings."""
    return {(each["cell"], each["kind"], each["rule"]) for each in outcome.findings}


SCENARIOS = {
    other_times: {("ILLEGAL", "ended with another delivery time than was set last"), ("EARLY", "fired early"),
                  ("LATE", "fired late")},
    other_places: {("ORPHAN", "left a place it was not at")},
    other_copies: {
        ("EARLY", "retried early"),
        ("ILLEGAL", "retried with another time than was set"),
        ("ILLEGAL", "retried with another attempt than follows"),
    },
    transactions: {
        ("ILLEGAL", "a transaction ended more than once"),
        ("LOST", "committed, and never accepted"),
        ("LOST", "a half message is not in the snapshot, and has no end"),
        ("ORPHAN", "a transaction ended without a beginning"),
    },
    absorbed: set(),
    made_anew: {("DUPLICATE_ACCEPT", "in one cell")},
    kept_back: {("OVERDUE", "in the snapshot after its time")},
    many_times: {("DUPLICATE_ACCEPT", "in one cell")},
}  # fmt: skip


def test_events_that_do_not_agree(engine: TableEngine, tmp_path: Path) -> None:
    """About due time, place, and the end of transactions; the same with a look at every message.

    What its topic keeps back, by events behind the snapshot, is not overdue. What is accepted anew by a topic that was
    removed meanwhile is no duplicate.
    """
    hands = {}
    for write in SCENARIOS:
        hands[write] = hand = Hand(tmp_path, write.__name__, of=f" of {write.__name__}")
        write(hand)
        hand.end(620_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    expected = {(hand.cell, *each) for write, hand in hands.items() for each in SCENARIOS[write]}
    assert said(outcome) == expected
    copies = sorted(each["message_id"].split(" ")[0] for each in outcome.findings if each["cell"] == "other_copies")
    assert copies == ["message-1", "message-2", "message-3"]
    strays = [each["message_id"].split(" ")[0] for each in outcome.findings if each["cell"] == "other_places"]
    assert strays == ["message-0", "message-1", "message-3"]
    overdue = sorted(each["message_id"].split(" ")[0] for each in outcome.findings if each["cell"] == "kept_back")
    assert overdue == ["message-3", "message-4", "message-5"]
    twice = [
        (each["message_id"].split(" ")[0], each["detail"]) for each in outcome.findings if each["cell"] == "made_anew"
    ]
    assert twice == [(f"message-{number}", "2 times, in cells: 1") for number in (2, 3, 4)]
    exact = run_audit(engine, str(tmp_path), Options(exact=True))
    assert (exact.report, exact.findings) == (outcome.report, outcome.findings)


def put_back(hand: Hand, to: int) -> None:
    """Go on with a store of which the next event would have been ``to``."""
    hand.add("TAIL_LOST", 500, detail=to, due_ms=hand.sequence + 1 - to)


def test_a_restored_store_accuses_no_message(engine: TableEngine, tmp_path: Path) -> None:
    """What happened since its backup did not happen to it; named are the messages that went with that, unfinished."""
    hand = Hand(tmp_path)
    hand.subscribed()
    for number in range(4):
        hand.scheduled(number, 400)
    hand.queued(9, 0)
    backup = hand.sequence + 1
    # what is undone: deliveries, a recall, a move, an acknowledgement, a reset, and messages that went with it
    for number in (0, 1):
        delivered(hand, number, 400, 400, number)
        hand.of_group("ACKED", number, queue_id=0, queue_offset=number)
    recalled: dict[str, Any] = {"topic": hand.topic, "entry": 2, "message_id": hand.id_of(2)}
    hand.add("RECALLED", 410, **recalled, due_ms=START_MS + 400)
    hand.add("RESCHEDULED", 410, topic=hand.topic, entry=3, message_id=hand.id_of(3), due_ms=START_MS + 900_000)
    hand.of_group("ACKED", 9, queue_id=0, queue_offset=0)
    hand.add("RESET", 420, topic=hand.topic, group=hand.group, queue_id=0, queue_offset=5, detail=0)
    hand.scheduled(20, 900_000)  # waits: went with it
    hand.queued(21, 6)  # went with it
    hand.queued(22, 7)  # was acknowledged
    hand.of_group("ACKED", 22, queue_id=0, queue_offset=7)
    hand.queued(23, 8)  # is sent again
    hand.queued(24, 9)  # nobody read it before retention removed it
    hand.add("EXPIRED", 450, topic=hand.topic, queue_id=0, queue_offset=9, message_id=hand.id_of(24))
    hand.snapshot([hand.held(20, 900_000)], floor=8, end=10)
    put_back(hand, backup)
    hand.of_group("ACKED", 9, queue_id=0, queue_offset=0)
    hand.queued(23, 1)
    hand.of_group("ACKED", 23, queue_id=0, queue_offset=1)
    for number in (2, 3):
        delivered(hand, number, 600, 400, number)
        hand.of_group("ACKED", number, queue_id=0, queue_offset=number)
    recalled = {"topic": hand.topic, "entry": 0, "message_id": hand.id_of(0)}
    hand.add("RECALLED", 600, **recalled, due_ms=START_MS + 400)
    hand.snapshot([hand.held(1, 400)], floor=4, end=4)
    hand.end(1_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    gone = "accepted, and its store was restored to an earlier state"
    assert said(outcome) == {("one", "INCONCLUSIVE", gone), ("one", "PUT_BACK", "the store was put back")}
    assert sorted(each["message_id"] for each in outcome.findings if each["kind"] == "INCONCLUSIVE") == [
        "message-20",
        "message-21",
    ]
    assert (outcome.exit_code, outcome.report["cells"][0]["gaps"]) == (30, [])
    assert all(each["history"] for each in outcome.findings if each["message_id"])
    exact = run_audit(engine, str(tmp_path), Options(exact=True))
    assert (exact.report, exact.findings) == (outcome.report, outcome.findings)


def test_a_store_is_put_back_and_that_is_undone(engine: TableEngine, tmp_path: Path) -> None:
    """First to one backup, then to a later one: what lies between the two is in the store again."""
    hand = Hand(tmp_path)
    first = hand.sequence + 1
    hand.scheduled(1, 900_000)
    second = hand.sequence + 1
    put_back(hand, first)
    hand.scheduled(2, 900_000)
    put_back(hand, second)
    hand.snapshot([hand.held(1, 900_000)])
    hand.end(1_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    gone = "accepted, and its store was restored to an earlier state"
    found = [(each["rule"], each["message_id"], each["detail"]) for each in outcome.findings]
    assert found == [(gone, "message-2", ""), ("the store was put back", None, "sequences 3 to 4")]


def test_a_backup_of_a_moment_ago_is_clean(engine: TableEngine, tmp_path: Path) -> None:
    """Nothing was accepted since then: the audit says that the store was put back, and that all is well."""
    hand = Hand(tmp_path)
    hand.scheduled(1, 900_000)
    backup = hand.sequence + 1
    hand.add("CLOSED", 100)
    put_back(hand, backup)
    hand.add("OPENED", 200, boot=2)
    hand.snapshot([hand.held(1, 900_000)])
    hand.end(1_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert (said(outcome), outcome.exit_code) == ({("one", "PUT_BACK", "the store was put back")}, 0)


def test_a_growing_trail_is_marked_when_its_store_was_restored(engine: TableEngine, tmp_path: Path) -> None:
    """What was taken in already counts for nothing then: the next step begins anew, and says what one run says."""
    trail, kept = tmp_path / "trail", str(tmp_path / "state")
    hand = Hand(trail)
    hand.scheduled(1, 400)
    backup = hand.sequence + 1
    delivered(hand, 1, 400, 400)
    hand.writer.close()
    assert run_audit(engine, str(trail), Options(), state=kept).exit_code == 0
    hand.writer = CellWriter(trail, hand.cell)
    put_back(hand, backup)
    delivered(hand, 1, 600, 400)
    hand.end(1_000)
    grown = run_audit(engine, str(trail), Options(), state=kept)
    assert said(grown) == {("one", "PUT_BACK", "the store was put back")}
    whole = run_audit(engine, str(trail), Options())
    assert (grown.report, grown.findings) == (whole.report, whole.findings)


def test_in_two_cells_one_of_which_removed_the_topic(engine: TableEngine, tmp_path: Path) -> None:
    """What another daemon accepts is a duplicate as long as the first one's topic is there."""
    one, other = Hand(tmp_path, "one"), Hand(tmp_path, "other")
    for number in (1, 2, 3):
        one.scheduled(number, 900_000, 100)
    other.scheduled(2, 900_000, 150)
    one.add("TOPIC_REMOVED", 200, topic=one.topic)
    for number in (1, 2, 3):
        ids = {"topic": one.topic, "entry": number, "message_id": one.id_of(number)}
        one.add("RECALLED", 200, **ids, due_ms=START_MS + 900_000)
    other.scheduled(1, 900_000, 300)
    for hand in (one, other):
        hand.end(1_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert said(outcome) == {("other", "DUPLICATE_ACCEPT", "in more than one cell")}
    assert [(each["message_id"], each["detail"]) for each in outcome.findings] == [
        ("message-2", "2 times, in cells: 2")
    ]
    assert sum(row["duplicated"] for row in outcome.report["scheduled"]) == 1


def test_an_altered_snapshot_accuses_no_message(engine: TableEngine, tmp_path: Path) -> None:
    """It is unproven, and the one before it is taken."""
    hand = Hand(tmp_path)
    hand.scheduled(1, 900_000)
    hand.snapshot([hand.held(1, 900_000)])
    sound = hand.sequence
    hand.scheduled(2, 900_000)
    hand.snapshot([hand.held(1, 900_000), hand.held(2, 900_000)])
    hand.end(1_000)
    older, newer = sorted((tmp_path / "snapshots" / "cell=one").iterdir())
    shutil.copy(older / "entries.parquet", newer / "entries.parquet")
    outcome = run_audit(engine, str(tmp_path), Options())
    assert said(outcome) == {("one", "UNPROVEN", "the snapshot was altered")}
    assert (outcome.exit_code, outcome.report["cells"][0]["snapshot_sequence"]) == (30, sound)


HEADS = {
    "sequence": "its head is of sequence 1",
    "cell": "its head is of cell other",
    "nameless": "entries.parquet, progress.parquet, queues.parquet",
    "short": "queues.parquet",
    "rows": "its head counts others: entries 2, queues 1",
}


def change_head(head: dict[str, Any], how: str) -> None:
    """Make a head contradict itself, or its snapshot."""
    if how == "short":
        head["files"]["queues.parquet"]["bytes"] = 1
    changes: dict[str, dict[str, Any]] = {"sequence": {"sequence": 1}, "cell": {"cell": "other"}}
    changes |= {"nameless": {"files": {}}, "rows": {"entries": 7, "queues": 0}}
    head |= changes.get(how, {})


@pytest.mark.parametrize("verify", [True, False])
def test_a_head_that_contradicts_its_snapshot_is_found(engine: TableEngine, tmp_path: Path, verify: bool) -> None:
    """In its name, in its files, in their number of rows: the snapshot before it is taken, without checksums too."""
    for cell in (*HEADS, "sound"):
        hand = Hand(tmp_path, cell, of=f" of {cell}")
        hand.scheduled(1, 900_000)
        hand.snapshot([hand.held(1, 900_000)])
        hand.scheduled(2, 900_000)
        hand.snapshot([hand.held(1, 900_000), hand.held(2, 900_000)])
        hand.end(1_000)
        path = max((tmp_path / "snapshots" / f"cell={cell}").iterdir()) / "manifest.json"
        head = json.loads(path.read_text(encoding="utf-8"))
        change_head(head, cell)
        path.write_text(json.dumps(head), encoding="utf-8")
    outcome = run_audit(engine, str(tmp_path), Options(verify=verify))
    rule = "the snapshot was altered"
    assert [(each["cell"], each["kind"], each["rule"], each["detail"]) for each in outcome.findings] == [
        (cell, "UNPROVEN", rule, f"snapshots/cell={cell}/{3:020}: {why}") for cell, why in sorted(HEADS.items())
    ]
    taken = {about["cell"]: about["snapshot_sequence"] for about in outcome.report["cells"]}
    assert taken == {**dict.fromkeys(HEADS, 2), "sound": 3}


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """A sound trail of several files."""
    path = tmp_path / "trail"
    forge(path, messages=150, seed=3, rows_per_file=100)
    return path


def test_without_manifests_nothing_is_proven(engine: TableEngine, trail: Path) -> None:
    """All of them gone, or some of a cell's."""
    assert said(run_audit(engine, str(trail), Options())) == set()
    shutil.rmtree(trail / "manifest" / "cell=daemon-0")
    path = trail / "manifest" / "cell=daemon-1"
    lines = read_manifest(trail, "daemon-1")
    write_manifest(trail, "daemon-1", [*lines[:1], *lines[2:]])
    outcome = run_audit(engine, str(trail), Options())
    assert said(outcome) == {
        ("daemon-0", "UNPROVEN", "no manifest names its files"),
        ("daemon-1", "UNPROVEN", "in no manifest, though later files are"),
    }
    assert outcome.exit_code == 30
    assert list(path.iterdir())


def test_a_line_that_was_forged_breaks_the_chain(engine: TableEngine, trail: Path) -> None:
    """Whatever is changed in a line, the next one does not continue it. Lines of earlier builds are told as such."""
    (path, *_) = sorted((trail / "manifest" / "cell=daemon-0").iterdir())
    lines = path.read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])
    lines[0] = json.dumps(first | {"first_at_ms": first["first_at_ms"] + 1})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for each in (trail / "manifest" / "cell=daemon-1").iterdir():
        made = [json.loads(line) for line in each.read_text(encoding="utf-8").splitlines()]
        for line in made:
            del line["previous"]
        each.write_text("".join(json.dumps(line) + "\n" for line in made), encoding="utf-8")
    outcome = run_audit(engine, str(trail), Options())
    assert said(outcome) == {
        ("daemon-0", "UNPROVEN", "its manifest does not continue the one before"),
        ("daemon-0", "UNPROVEN", "its manifest line has another value of first_at_ms"),
        ("daemon-1", "UNCHAINED", "its manifests are of a build that did not chain them"),
    }


def test_files_that_were_exchanged_are_found(engine: TableEngine, trail: Path) -> None:
    """Even with manifests that were forged to match, and chained anew."""
    one, other = files_of(trail, "daemon-0")[:2]
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    lines = read_manifest(trail, "daemon-0")
    for name in ("bytes", "sha256"):
        lines[0][name], lines[1][name] = lines[1][name], lines[0][name]
    write_manifest(trail, "daemon-0", lines)
    found = said(run_audit(engine, str(trail), Options()))
    assert ("daemon-0", "FILE_ALTERED", "holds other records than its name says") in found


def _say_retired(trail: Path, cell: str, sequence: int) -> None:
    path = trail / "cells" / f"{cell}.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(told | {"retired_sequence": sequence}), encoding="utf-8")


def test_a_cell_without_files_is_reported_missing(engine: TableEngine, trail: Path) -> None:
    """Events and manifests removed, its own file and snapshots left: there were events, and now there are none."""
    for name in ("events", "manifest"):
        shutil.rmtree(trail / name / "cell=daemon-0")
    outcome = run_audit(engine, str(trail), Options())
    gone = ("daemon-0", "TRAIL_GAP", "no file of events is left")
    assert said(outcome) == {gone}
    assert outcome.exit_code == 30
    for name in ("events", "manifest"):
        shutil.rmtree(trail / name)
    outcome = run_audit(engine, str(trail), Options())
    assert gone in said(outcome)
    assert {each[1] for each in said(outcome)} == {"TRAIL_GAP"}
    assert outcome.exit_code == 30


def test_a_daemon_that_has_just_started_is_not_reported_missing(engine: TableEngine, tmp_path: Path) -> None:
    """Its file is there before its first events are."""
    write_cell(Layout(tmp_path, "one"), CellFile(cell="one", role="daemon", host="here"))
    outcome = run_audit(engine, str(tmp_path), Options())
    assert (outcome.findings, outcome.exit_code) == ([], 0)


@pytest.mark.parametrize("where", ["inside of a file", "behind a file", "at the end", "behind the end"])
def test_more_is_not_retired_than_retention_removes(engine: TableEngine, trail: Path, where: str) -> None:
    """What is said to be retired hides nothing that is there, and nothing that is lost."""
    lines = read_manifest(trail, "daemon-0")
    assert len({line["path"].split("/")[2] for line in lines}) == 1
    (trail / lines[2]["path"]).unlink()
    write_manifest(trail, "daemon-0", [*lines[:2], *lines[3:]])
    lost = said(run_audit(engine, str(trail), Options()))
    last = {
        "inside of a file": lines[3]["first_sequence"],
        "behind a file": lines[2]["last_sequence"],
        "at the end": lines[-1]["last_sequence"],
        "behind the end": 10**15,
    }
    _say_retired(trail, "daemon-0", last[where])
    outcome = run_audit(engine, str(trail), Options())
    assert said(outcome) == lost | {("daemon-0", "UNPROVEN", "more is said to be retired than retention removes")}
    assert outcome.exit_code >= 30


@pytest.mark.parametrize("left", ["all", "a part", "manifest", "files", "nothing"])
def test_any_remains_of_retention_after_a_kill_are_sound(engine: TableEngine, tmp_path: Path, left: str) -> None:
    """It says what goes, and removes the manifest of the date, then its files; recovery removes files first."""
    hand = Hand(tmp_path)
    for number in range(4):
        hand.queued(number, number, at_ms=number * 3_600_000)  # a file each
    for number in range(4, 8):
        hand.queued(number, number, at_ms=86_400_000)
    hand.snapshot([], end=8)
    hand.end(86_401_000)
    old, *_ = sorted((tmp_path / "manifest" / "cell=one").iterdir())
    upto = max(json.loads(line)["last_sequence"] for line in old.read_text(encoding="utf-8").splitlines())
    files = sorted((tmp_path / "events" / "cell=one" / f"date={old.stem}").rglob("*.parquet"))
    assert len(files) == 4
    _say_retired(tmp_path, "one", upto)
    if left in {"files", "nothing"}:
        old.unlink()
    for path in {"all": [], "a part": files[1:2], "files": files[:2]}.get(left, files):
        path.unlink()
    outcome = run_audit(engine, str(tmp_path), Options())
    assert (said(outcome), outcome.exit_code) == (set(), 0)
