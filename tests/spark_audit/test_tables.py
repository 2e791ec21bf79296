"""Reading a trail: what is there, and clear words about what is not as it should be."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from support.forges.cells.forge import forge
from support.forges.trail.damage import change_column, vouch_for
from support.forges.trail.files import HOUR_MS, cells_of, files_of, read_file, read_manifest, write_manifest
from support.forges.trail.hand import Hand

from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.schema import EVENTS, TrailError
from spark_audit.tables import list_trail, read_events

pytestmark = pytest.mark.spark


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """A small trail."""
    path = tmp_path / "a trail"
    forge(path, messages=40, seed=2, rows_per_file=100)
    return path


def test_existing_messages(engine: TableEngine, trail: Path) -> None:
    """All files, cells and snapshots are listed, hidden ones are not; rows come with their cell."""
    expected = sorted(str(path.relative_to(trail)) for cell in cells_of(trail) for path in files_of(trail, cell))
    some = files_of(trail, "daemon-0")[0]
    (some.parent / "00000000000000009999-00000000000000009999.parquet.tmp").write_bytes(b"torn")
    (some.parent / "_unexpected-x.parquet").write_bytes(b"")
    (trail / "snapshots" / "cell=daemon-0" / ".half").mkdir()
    (trail / "snapshots" / "cell=daemon-0" / ".half" / "manifest.json").write_text("{")
    listing = list_trail(engine, str(trail))
    assert set(listing.cells) == set(cells_of(trail))
    assert [file.path for file in listing.files] == expected
    rows = read_events(engine, listing, listing.files)
    assert rows.count() == sum(line.rows for line in listing.lines)
    assert {row["cell"] for row in rows.select("cell").distinct().collect()} == set(cells_of(trail))


def test_a_line_without_its_end_is_not_there_yet(engine: TableEngine, trail: Path) -> None:
    """The last line of a manifest counts only with its newline; its file is taken all the same."""
    path = next((trail / "manifest" / "cell=daemon-0").iterdir())
    before = list_trail(engine, str(trail))
    path.write_bytes(path.read_bytes()[:-1])
    after = list_trail(engine, str(trail))
    assert len(after.lines) == len(before.lines) - 1
    assert after.files == before.files


Break = Callable[[Path], object]


def replace_in(trail: Path, path: str, old: str, new: str) -> None:
    """Replace text in the only file that a pattern matches."""
    (file,) = trail.glob(path)
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("break_it", "cell", "words"),
    [
        (
            lambda trail: (trail / "cells" / "daemon-0.json").write_text('{"version": 2}'),
            "daemon-0",
            "not of version 1",
        ),
        (lambda trail: (trail / "cells" / "daemon-0.json").write_text("{"), "daemon-0", "not JSON"),
        (lambda trail: (trail / "cells" / "daemon-0.json").write_text("[" * 5_000), "daemon-0", "not JSON"),
        (lambda trail: (trail / "cells" / "spool-0.json").write_text('{"version": 1}'), "spool-0", "it is of another"),
        (
            lambda trail: shutil.copy(trail / "cells" / "daemon-1.json", trail / "cells" / "spool-0.json"),
            "spool-0",
            "cells/spool-0.json: it is of another cell, 'daemon-1'",
        ),
        (lambda trail: replace_in(trail, "cells/spool-0.json", '"spool"', '"spoon"'), "spool-0", "role is 'spoon'"),
        (lambda trail: replace_in(trail, "cells/daemon-0.json", ": 0", ': "0"'), "daemon-0", "retired_sequence is '0'"),
        (
            lambda trail: replace_in(trail, "manifest/cell=daemon-0/*", '{"version"', '"version"'),
            "daemon-0",
            ".jsonl, line 1: not JSON",
        ),
        (
            lambda trail: replace_in(trail, "manifest/cell=daemon-0/*", '"rows": ', f'"rows": {2**63}'),
            "daemon-0",
            "not an integer of 63 bits",
        ),
        (
            lambda trail: replace_in(trail, "manifest/cell=daemon-0/*", '"cell": "daemon-0"', '"cell": "daemon-1"'),
            "daemon-0",
            "it is of another cell",
        ),
        (
            lambda trail: replace_in(trail, "manifest/cell=daemon-0/*", '"first_sequence": 1,', '"first_sequence": 2,'),
            "daemon-0",
            "its file of others",
        ),
        (
            lambda trail: replace_in(trail, "snapshots/cell=daemon-0/*/manifest.json", '"entries"', '"entrees"'),
            "daemon-0",
            "its head cannot be read: entries is None",
        ),
        (
            lambda trail: replace_in(trail, "snapshots/cell=daemon-0/*/manifest.json", '"bytes"', '"bites"'),
            "daemon-0",
            "its head cannot be read: bytes is None",
        ),
        (
            lambda trail: files_of(trail, "daemon-0")[0].rename(files_of(trail, "daemon-0")[0].parent / "x.parquet"),
            "daemon-0",
            "its name is not that of an event file",
        ),
    ],
)
def test_a_damaged_file_is_a_finding_and_the_rest_is_audited(
    engine: TableEngine, trail: Path, break_it: Break, cell: str, words: str
) -> None:
    """The finding names the file and the reason; no cell is judged wrongly, and the others are judged as before."""
    break_it(trail)
    outcome = run_audit(engine, str(trail), Options())
    named = [each for each in outcome.findings if each["kind"] == "UNPROVEN" and words in each["detail"]]
    assert [each["cell"] for each in named] == [cell]
    assert {each["cell"] for each in outcome.findings} == {cell}
    assert {about["cell"]: about["role"] for about in outcome.report["cells"]} == ROLES
    assert outcome.exit_code == 30


@pytest.mark.parametrize("name", ["rows", "first_at_ms", "last_at_ms"])
def test_a_manifest_line_with_a_false_figure_is_a_finding(engine: TableEngine, trail: Path, name: str) -> None:
    """The line is chained and its checksum right: only the events contradict it."""
    lines = read_manifest(trail, "daemon-0")
    lines[0][name] += 1
    write_manifest(trail, "daemon-0", lines)
    outcome = run_audit(engine, str(trail), Options())
    (found,) = outcome.findings
    assert (found["kind"], found["detail"]) == ("UNPROVEN", lines[0]["path"])
    assert name in found["rule"]
    assert outcome.exit_code == 30


def test_a_clock_that_steps_back_within_a_file_is_no_finding(engine: TableEngine, tmp_path: Path) -> None:
    """The manifest line names the times of the first and the last event, and neither is the earliest."""
    hand = Hand(tmp_path)
    for number, at_ms in enumerate((900, 300, 1_200, 600)):
        hand.scheduled(number, HOUR_MS + 5_000, HOUR_MS + at_ms)
    hand.end(HOUR_MS + 700)
    line = read_manifest(tmp_path, "one")[-1]
    rows = read_file(files_of(tmp_path, "one")[-1])
    assert min(row.at_ms for row in rows) < rows[0].at_ms
    assert (line["first_at_ms"], line["last_at_ms"]) == (rows[0].at_ms, rows[-1].at_ms)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert [each for each in outcome.findings if each["kind"] == "UNPROVEN"] == []


def test_a_file_in_another_folder_is_a_finding(engine: TableEngine, trail: Path) -> None:
    """Its line names the new place, and its events are of another date."""
    path = files_of(trail, "daemon-0")[0]
    place = path.parents[1].with_name("date=2001-01-01") / path.parent.name
    place.mkdir(parents=True)
    path.rename(place / path.name)
    lines = read_manifest(trail, "daemon-0")
    lines[0]["path"] = (place / path.name).relative_to(trail).as_posix()
    write_manifest(trail, "daemon-0", lines)
    outcome = run_audit(engine, str(trail), Options())
    (found,) = outcome.findings
    assert (found["kind"], found["rule"]) == ("UNPROVEN", "holds events of another hour than its folder")
    assert outcome.exit_code == 30


ROLES = {"daemon-0": "daemon", "daemon-1": "daemon", "spool-0": "spool"}


@pytest.mark.parametrize("cell", sorted(ROLES))
def test_a_cell_without_its_file_has_the_role_of_its_events(engine: TableEngine, trail: Path, cell: str) -> None:
    """The file is missing, which proves nothing about messages: a spool is not judged as a daemon."""
    (trail / "cells" / f"{cell}.json").unlink()
    outcome = run_audit(engine, str(trail), Options())
    found = [(each["kind"], each["cell"], each["detail"]) for each in outcome.findings]
    assert found == [("FILE_MISSING", cell, f"cells/{cell}.json")]
    assert {about["cell"]: about["role"] for about in outcome.report["cells"]} == ROLES
    assert outcome.exit_code == 30


def test_a_spool_that_only_waits_is_one_without_its_file(engine: TableEngine, tmp_path: Path) -> None:
    """Nothing was sent yet: what it holds parked, without a number, is not lost."""
    hand = Hand(tmp_path, "one", "spool")
    hand.scheduled(1, 1_000)
    hand.snapshot([hand.held(1, 1_000, "PARKED") | {"entry": None}])
    hand.end(500_000)
    (tmp_path / "cells" / "one.json").unlink()
    outcome = run_audit(engine, str(tmp_path), Options())
    assert [each["kind"] for each in outcome.findings] == ["FILE_MISSING"]


def test_there_must_be_a_trail(engine: TableEngine, tmp_path: Path) -> None:
    """Neither a directory that is not there nor one of other things is an empty trail."""
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TrailError):
            list_trail(engine, str(path))


@pytest.mark.parametrize(("column", "kind"), [("sequence", pa.string()), ("attempt", pa.int64()), ("entry", None)])
def test_a_file_with_other_columns_is_a_finding(
    engine: TableEngine, trail: Path, column: str, kind: pa.DataType | None
) -> None:
    """A file in the middle of a cell, which its manifest vouches for: it is not read, by either engine."""
    path = files_of(trail, "daemon-0")[1]
    change_column(path, column, kind)
    vouch_for(trail, "daemon-0", {path})
    outcome = run_audit(engine, str(trail), Options())
    altered = [(each["rule"], each["detail"]) for each in outcome.findings if each["kind"] == "FILE_ALTERED"]
    ((rule, detail),) = altered
    assert rule.startswith(f"column {column} is ")
    assert detail == path.relative_to(trail).as_posix()
    assert {each["kind"] for each in outcome.findings} <= {"FILE_ALTERED", "INCONCLUSIVE"}
    (about,) = (each for each in outcome.report["cells"] if each["cell"] == "daemon-0")
    line = read_manifest(trail, "daemon-0")[1]
    span = {"first": line["first_sequence"], "last": line["last_sequence"], "why": "file cannot be read"}
    (gap,) = about["gaps"]
    assert gap.pop("after_ms") <= line["first_at_ms"] <= gap.pop("before_ms")
    assert gap == span
    assert outcome.exit_code == 40


@pytest.mark.parametrize("name", ["entries", "progress", "queues"])
def test_a_snapshot_with_other_columns_is_a_finding(engine: TableEngine, trail: Path, name: str) -> None:
    """A table of the newest snapshot lacks a column that its head vouches for: the snapshot is not used."""
    (head,) = trail.glob("snapshots/cell=daemon-0/*/manifest.json")
    path = head.with_name(f"{name}.parquet")
    change_column(path, "topic", None)
    about = json.loads(head.read_text(encoding="utf-8"))
    content = path.read_bytes()
    about["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    head.write_text(json.dumps(about), encoding="utf-8")
    outcome = run_audit(engine, str(trail), Options())
    named = [each["detail"] for each in outcome.findings if each["kind"] == "UNPROVEN"]
    assert len(named) == 1
    assert named[0].endswith(f"{name}.parquet: column topic is missing")
    assert outcome.exit_code == 30


def test_local_tables_hold_their_input(engine: TableEngine) -> None:
    """Nulls, long numbers, nested lists and odd text come back; an empty one keeps its columns."""
    rows = [("a'\"\\n é", 2**62, [{"first": 1, "last": 2}]), (None, None, [])]
    fields = (("name", "string"), ("number", "bigint"), ("gaps", "array<struct<first: bigint, last: bigint>>"))
    found = engine.local_table(rows, fields).collect()
    assert found[0] == {"name": rows[0][0], "number": 2**62, "gaps": [{"first": 1, "last": 2}]}
    assert found[1] == {"name": None, "number": None, "gaps": []}
    assert engine.local_table([], fields).collect() == []
    assert engine.local_table([], fields).columns == ("name", "number", "gaps")


def test_the_schema_is_the_formats() -> None:
    """The columns that docs/reference/trail.md lists, in their order."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "trail.md").read_text(encoding="utf-8")
    table = text.split("## Events", 1)[1].split("`cell`, `date`", 1)[0]
    listed = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    types = {"int64": "bigint", "int32": "int", "string": "string", "binary": "binary"}
    expected = [(name.strip(" `"), types[kind.strip().split(",")[0]]) for name, kind in listed]
    assert [*EVENTS, ("error", "string"), ("client", "string")] == expected  # the last two explain, and judge nothing
