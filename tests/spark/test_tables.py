"""Reading a trail: what is there, and clear words about what is not as it should be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.trail_files import cells_of, files_of
from support.trail_forge import forge

from spark_audit.frames.table import Engine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.schema import EVENTS, TrailError
from spark_audit.tables import list_trail, read_events

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """A small trail."""
    path = tmp_path / "a trail"
    forge(path, messages=40, seed=2, rows_per_file=100)
    return path


def test_what_is_there(engine: Engine, trail: Path) -> None:
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


def test_a_line_without_its_end_is_not_there_yet(engine: Engine, trail: Path) -> None:
    """The last line of a manifest counts only with its newline; its file is taken all the same."""
    path = next((trail / "manifest" / "cell=daemon-0").iterdir())
    before = list_trail(engine, str(trail))
    path.write_bytes(path.read_bytes()[:-1])
    after = list_trail(engine, str(trail))
    assert len(after.lines) == len(before.lines) - 1
    assert after.files == before.files


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda trail: (trail / "cells" / "daemon-0.json").write_text('{"version": 2}'), "not of version 1"),
        (lambda trail: (trail / "cells" / "daemon-0.json").write_text("{"), "not JSON"),
        (lambda trail: (trail / "cells" / "daemon-0.json").write_text('{"version": 1}'), "a field is missing"),
        (
            lambda trail: shutil.copy(trail / "cells" / "daemon-1.json", trail / "cells" / "daemon-0.json"),
            "of another cell",
        ),
        (
            lambda trail: files_of(trail, "daemon-0")[0].rename(files_of(trail, "daemon-0")[0].parent / "x.parquet"),
            "not named",
        ),
    ],
)
def test_what_cannot_be_a_trail_is_refused(engine: Engine, trail: Path, break_it: object, words: str) -> None:
    """The error names the file and says what is wrong with it."""
    assert callable(break_it)
    break_it(trail)
    with pytest.raises(TrailError, match=words):
        list_trail(engine, str(trail))


def test_there_must_be_a_trail(engine: Engine, tmp_path: Path) -> None:
    """Neither a directory that is not there nor one of other things is an empty trail."""
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TrailError):
            list_trail(engine, str(path))


@pytest.mark.parametrize(("column", "kind"), [("sequence", pa.string()), ("attempt", pa.int64()), ("entry", None)])
def test_columns_of_another_kind_are_refused(
    engine: Engine, trail: Path, column: str, kind: pa.DataType | None
) -> None:
    """A column that is missing or of another type is named, before anything is counted."""
    for path in files_of(trail, "daemon-0"):
        table = pq.read_table(path, partitioning=None)
        at = table.column_names.index(column)
        changed = table.remove_column(at)
        if kind is not None:
            changed = changed.add_column(at, column, table[column].cast(kind))
        pq.write_table(changed, path)
    shutil.rmtree(trail / "manifest")  # it would say that the files are not those that were written
    with pytest.raises(TrailError, match=f"column {column} is"):
        run_audit(engine, str(trail), Options(verify=False))


def test_local_tables_hold_what_they_are_given(engine: Engine) -> None:
    """Nulls, long numbers, nested lists and odd text come back; an empty one keeps its columns."""
    rows = [("a'\"\\n é", 2**62, [{"first": 1, "last": 2}]), (None, None, [])]
    fields = (("name", "string"), ("number", "bigint"), ("gaps", "array<struct<first: bigint, last: bigint>>"))
    found = engine.local_table(rows, fields).collect()
    assert found[0] == {"name": rows[0][0], "number": 2**62, "gaps": [{"first": 1, "last": 2}]}
    assert found[1] == {"name": None, "number": None, "gaps": []}
    assert engine.local_table([], fields).collect() == []
    assert engine.local_table([], fields).columns == ("name", "number", "gaps")


def test_the_schema_is_the_formats() -> None:
    """The columns that docs/TRAIL.md lists, in their order."""
    text = (Path(__file__).parents[2] / "docs" / "TRAIL.md").read_text(encoding="utf-8")
    table = text.split("## Events", 1)[1].split("`cell`, `date`", 1)[0]
    listed = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    types = {"int64": "bigint", "int32": "int", "string": "string", "binary": "binary"}
    expected = [(name.strip(" `"), types[kind.strip().split(",")[0]]) for name, kind in listed]
    assert list(EVENTS) == expected
