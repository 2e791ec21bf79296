"""An event must agree with what came before it, and a trail with its manifests; what does not is found without --exact.

Each scenario is a cell of one trail, as in ``test_verdict``; those about files have a trail of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.trail_disagreements import other_copies, other_places, other_times, transactions
from support.trail_files import files_of, read_manifest, write_manifest
from support.trail_forge import forge
from support.trail_hand import Hand

from spark_audit.frames.table import Engine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import Outcome

pytestmark = pytest.mark.timeout(120)
Said = set[tuple[str, str, str]]


def said(outcome: Outcome) -> Said:
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
}  # fmt: skip


def test_events_that_do_not_agree(engine: Engine, tmp_path: Path) -> None:
    """About due time, place, and the end of transactions; the same with a look at every message."""
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
    exact = run_audit(engine, str(tmp_path), Options(exact=True))
    assert (exact.report, exact.findings) == (outcome.report, outcome.findings)


def test_a_snapshot_that_is_not_what_was_written_accuses_nobody(engine: Engine, tmp_path: Path) -> None:
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
    assert said(outcome) == {("one", "UNPROVEN", "the snapshot is not what was written")}
    assert (outcome.exit_code, outcome.report["cells"][0]["snapshot_sequence"]) == (30, sound)


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """A sound trail of several files."""
    path = tmp_path / "trail"
    forge(path, messages=150, seed=3, rows_per_file=100)
    return path


def test_without_manifests_nothing_is_proven(engine: Engine, trail: Path) -> None:
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


def test_a_line_that_was_forged_breaks_the_chain(engine: Engine, trail: Path) -> None:
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
        ("daemon-1", "UNCHAINED", "its manifests are of a build that did not chain them"),
    }


def test_files_that_were_exchanged_are_found(engine: Engine, trail: Path) -> None:
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
