"""Taking a trail in by steps gives what one look at all of it gives, to the byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.effort import EFFORT, at_length
from support.forges.cells.forge import forge
from support.forges.trail.damage import DAMAGERS, vouch_for
from support.forges.trail.files import (
    Event,
    cells_of,
    files_of,
    read_file,
    read_manifest,
    table_of,
    write_manifest,
    write_table,
)
from support.forges.trail.mutations import MUTATORS

from spark_audit import session
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome, write_outcome

pytestmark = pytest.mark.spark
COMPARED = ("report.json", "findings.csv", "findings.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trail of many small files that lies about some messages."""
    path = tmp_path_factory.mktemp("whole") / "trail"
    forge(path, messages=500, seed=9, rows_per_file=150)
    told: set[str] = set()
    for name in sorted(MUTATORS):
        told |= MUTATORS[name](path, "daemon-1", 1, 3, told).message_ids
    return path


def written(outcome: AuditOutcome, out: Path) -> dict[str, bytes]:
    """Return the files that are compared."""
    write_outcome(outcome, out)
    return {name: (out / name).read_bytes() for name in COMPARED}


def grow(whole: Path, trail: Path, part: int, parts: int) -> None:
    """Make ``trail`` what the whole one was earlier: the first files of each cell, snapshots only at the end."""
    trail.mkdir(exist_ok=True)
    shutil.copytree(whole / "cells", trail / "cells", dirs_exist_ok=True)
    for cell in cells_of(whole):
        files = files_of(whole, cell)
        for path in files[: len(files) * part // parts]:
            target = trail / path.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    if part == parts:
        for name in ("snapshots", "manifest"):
            shutil.copytree(whole / name, trail / name)


def test_in_steps_and_at_once_are_the_same_to_the_byte(
    engine: TableEngine, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of new files only; in a long run then once more with nothing new. At once it is read as a long trail is."""
    steps = 3 if EFFORT > 1 else 2
    with monkeypatch.context() as patch:
        patch.setattr(session, "SMALL_BYTES", 0)
        expected = written(run_audit(engine, str(whole), Options()), tmp_path / "batch")
    trail, kept = tmp_path / "trail", str(tmp_path / "state")
    rows = []
    outcome: AuditOutcome | None = None
    for part in range(1, steps + 1):
        grow(whole, trail, part, steps)
        outcome = run_audit(engine, str(trail), Options(), state=kept)
        rows.append(outcome.figures["stages"][0]["rows"])
        if part < steps and EFFORT > 1:  # what a step says is what one look at the same files says
            alone = written(run_audit(engine, str(trail), Options()), tmp_path / f"alone-{part}")
            assert written(outcome, tmp_path / f"step-{part}") == alone
    assert outcome is not None
    assert written(outcome, tmp_path / "steps") == expected
    assert sum(rows) == sum(cell["events"] for cell in outcome.report["cells"])
    if EFFORT > 1:
        again = run_audit(engine, str(trail), Options(), state=kept)
        assert again.figures["stages"][0]["rows"] == 0
        assert written(again, tmp_path / "again") == expected


@at_length
def test_a_run_that_was_killed_has_taken_in_nothing(
    engine: TableEngine, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had written by then is not a version; the next run takes the same files in."""
    trail, kept = tmp_path / "trail", tmp_path / "state"
    grow(whole, trail, 1, 2)
    run_audit(engine, str(trail), Options(), state=str(kept))
    grow(whole, trail, 2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "write_text", _fail)
        with pytest.raises(KeyboardInterrupt):
            run_audit(engine, str(trail), Options(), state=str(kept))
    assert (kept / "v2" / "counts").is_dir()
    outcome = run_audit(engine, str(trail), Options(), state=str(kept))
    expected = written(run_audit(engine, str(whole), Options()), tmp_path / "batch")
    assert written(outcome, tmp_path / "steps") == expected
    assert outcome.figures["stages"][0]["rows"] > 0


def _fail(*arguments: object) -> None:
    raise KeyboardInterrupt


@at_length
def test_cached_messages_are_dropped_when_they_do_not_fit(engine: TableEngine, whole: Path, tmp_path: Path) -> None:
    """With another window, or when a file that was taken in is gone, everything is read again."""
    trail, kept = tmp_path / "trail", str(tmp_path / "state")
    grow(whole, trail, 2, 2)
    all_rows = run_audit(engine, str(trail), Options(), state=kept).figures["stages"][0]["rows"]
    said: list[str] = []
    other = Options(window_ms=60_000, say=said.append)
    assert run_audit(engine, str(trail), other, state=kept).figures["stages"][0]["rows"] == all_rows
    gone = files_of(trail, "daemon-0")[1]
    missing = str(gone.relative_to(trail))
    gone.unlink()
    outcome = run_audit(engine, str(trail), other, state=kept)
    assert any("starting over" in line and missing in line for line in said)
    assert json.dumps(outcome.report).count("file missing") == 1


def flip_a_bit(trail: Path) -> None:
    DAMAGERS["alter_files"](trail, "daemon-0", 1, 3)


def forge_events(trail: Path) -> None:
    """Write heartbeats in the place of acknowledgements, and manifests that vouch for that."""
    changed = set()
    for path in files_of(trail, "daemon-0"):
        events = read_file(path)
        forged = [
            Event(each.sequence, each.boot, "HEARTBEAT", each.at_ms) if each.kind == "ACKED" else each
            for each in events
        ]
        if forged != events:
            write_table(path, table_of(forged))
            changed.add(path)
    vouch_for(trail, "daemon-0", changed)


def forge_a_line(trail: Path) -> None:
    lines = read_manifest(trail, "daemon-0")
    lines[1]["sha256"] = "0" * 64
    write_manifest(trail, "daemon-0", lines)


def keep_out_of_reach(trail: Path) -> None:
    """Put a file in the place of another whose bytes cannot be read."""
    path = files_of(trail, "daemon-0")[1]
    path.unlink()
    path.symlink_to("/proc/self/mem")


def name_another_role(trail: Path) -> None:
    path = trail / "cells" / "spool-0.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"spool"', '"daemon"'), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "code"),
    [(flip_a_bit, 40), (forge_events, 20), (forge_a_line, 40), (keep_out_of_reach, 40), (name_another_role, 40)],
)
def test_changed_input_gives_the_verdict_of_a_full_run(
    engine: TableEngine, tmp_path: Path, change: Callable[[Path], None], code: int
) -> None:
    """A file, its line of the manifest or the role of its cell changed after the first run: both runs say the same.

    The run after that reads no event again.
    """
    trail, kept = tmp_path / "trail", str(tmp_path / "state")
    forge(trail, messages=60, seed=2, rows_per_file=60)
    assert run_audit(engine, str(trail), Options(), state=kept).exit_code == 0
    change(trail)
    whole = run_audit(engine, str(trail), Options())
    assert whole.exit_code == code
    expected = written(whole, tmp_path / "whole")
    for number in range(2):
        outcome = run_audit(engine, str(trail), Options(), state=kept)
        assert written(outcome, tmp_path / f"step-{number}") == expected
        assert (outcome.figures["stages"][0]["rows"] == 0) is (number == 1)
