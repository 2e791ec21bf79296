"""Every row and file on disk keeps its bytes: those that earlier code made are in ``tests/golden``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.forges.store.golden_rows import CASES, GOLDEN, Case, kept

from dmq.errors import StoreCorrupt
from dmq.producer_store.directories.root import Root
from dmq.store.files.cell import Cell
from dmq.store.schema.keys import Family

ROWS = [(family, case) for family, cases in CASES.items() for case in cases]
each_row = pytest.mark.parametrize(
    ("family", "case"), ROWS, ids=[f"{family.name.lower()}: {case.name}" for family, case in ROWS]
)


@each_row
def test_a_row_is_written_with_the_bytes_it_always_had(family: Family, case: Case) -> None:
    """Key and value; other bytes are a new kind or a new version, and a row of its own here."""
    assert {"key": case.key.hex(), "value": case.value.hex()} == kept(family)[case.name]


@each_row
def test_a_row_is_read_by_its_kind(family: Family, case: Case) -> None:
    """From the bytes that are kept, not from those that were just made."""
    row = kept(family)[case.name]
    assert case.read(bytes.fromhex(row["key"]), bytes.fromhex(row["value"])) == case.plain


def test_no_row_is_forgotten() -> None:
    """Each one that is kept is made and read here."""
    assert {path.stem for path in GOLDEN.glob("*.json")} == {family.name.lower() for family in Family}
    for family, cases in CASES.items():
        assert list(kept(family)) == [case.name for case in cases]


def golden_file(name: str) -> str:
    return (GOLDEN / "files" / name).read_text(encoding="utf-8")


def test_the_files_of_a_cell_keep_their_form(tmp_path: Path) -> None:
    """The marker of a copy, that of an original, and what a clean end leaves; all of them are read back."""
    cell = Cell(tmp_path, copy_of="0123456789abcdef")
    cell.database.mkdir()
    (cell.database / "CURRENT").write_text("MANIFEST-000001\n", encoding="utf-8")
    (cell.database / "000004.sst").write_bytes(b"abc")
    cell.mark_created()
    cell.mark_closed()
    assert (tmp_path / "CELL").read_text(encoding="utf-8") == golden_file("CELL-of-a-copy")
    assert json.loads((tmp_path / "CLOSED").read_text(encoding="utf-8")) == json.loads(golden_file("CLOSED"))
    cell.close()
    cell = Cell(tmp_path)
    assert (cell.cell_id, cell.is_copy) == ("0123456789abcdef", True)
    cell.mark_original()
    assert (tmp_path / "CELL").read_text(encoding="utf-8") == golden_file("CELL")
    cell.close()
    (tmp_path / "CLOSED").write_text(golden_file("CLOSED").replace("3}", "4}"), encoding="utf-8")
    with pytest.raises(StoreCorrupt, match=r"000004\.sst has 3 of 4 bytes"):
        Cell(tmp_path)


def test_the_adopter_of_a_spools_directory_is_its_name(tmp_path: Path) -> None:
    (tmp_path / "ADOPTER").write_text(golden_file("ADOPTER"), encoding="utf-8")
    assert Root.adopter_of(tmp_path) == "spool-0123456789ab"
