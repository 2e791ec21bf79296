"""Reports of audits in a folder: which one is the newest, and what is read of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dmq.recovery.audits.reports import SUMMARY, ReportUnreadable, newest_report, read_bounded

pytestmark = pytest.mark.unit


def write(folder: Path, at_s: int, text: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).write_text(text)
    os.utime(folder / SUMMARY, (at_s, at_s))
    return folder


def test_the_newest_report_is_found(tmp_path: Path) -> None:
    """In the folder itself or in a subfolder; one without a summary is not complete."""
    assert newest_report(tmp_path / "none") is None
    assert newest_report(tmp_path) is None
    (tmp_path / "running").mkdir()
    (tmp_path / "file").write_text("")
    nightly = write(tmp_path / "nightly", 2_000)
    write(tmp_path / "run-1", 1_000)
    found = newest_report(tmp_path)
    assert found is not None
    assert (found.folder, found.written_ms) == (nightly, 2_000_000)
    write(tmp_path, 3_000)
    assert newest_report(tmp_path) != found


def test_a_report_that_is_written_again_is_another_one(tmp_path: Path) -> None:
    """Also with the same time and size: a replaced file has another inode."""
    write(tmp_path, 1_000)
    before = newest_report(tmp_path)
    part = write(tmp_path / "part", 1_000) / SUMMARY
    part.replace(tmp_path / SUMMARY)
    assert newest_report(tmp_path) != before


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """A larger one is refused with its size."""
    (tmp_path / "page").write_bytes(b"x" * 10)
    assert read_bounded(tmp_path / "page", 10) == b"x" * 10
    with pytest.raises(ReportUnreadable, match="has 10 bytes, and at most 9 are read"):
        read_bounded(tmp_path / "page", 9)


def test_a_file_of_another_kind_is_not_read(tmp_path: Path) -> None:
    """Neither a pipe without a writer, which would block the thread, nor a folder, nor nothing."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReportUnreadable, match="not a regular file"):
        read_bounded(tmp_path / "pipe", 10)
    for name in ("", "none"):
        with pytest.raises(ReportUnreadable, match="cannot be read"):
            read_bounded(tmp_path / name, 10)
