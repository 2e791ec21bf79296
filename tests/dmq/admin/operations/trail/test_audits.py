"""Audits in the admin service: reports that are damaged, huge or foreign, and runs without what they need."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from broker_adapter.contracts.errors import Refused
from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.trail.audits import HOURS_MAX, LISTED_MAX, AuditCalls
from dmq.recovery import PAGE, PAGE_BYTES_MAX, SUMMARY, SUMMARY_BYTES_MAX, AuditRuns

pytestmark = pytest.mark.unit

SMALL = {"format": 1, "verdict": "clean", "exit_code": 0, "range": {"watermark_ms": 7}, "newer": ["field"]}


class Folder:
    """A folder of reports, and the calls about it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = AuditCalls(AuditRuns(path, None, None, SystemClock()))

    def write(self, summary: object, name: str = SUMMARY) -> None:
        self.path.mkdir(exist_ok=True)
        part = self.path / "part"
        part.write_bytes(summary if isinstance(summary, bytes) else json.dumps(summary).encode())
        part.replace(self.path / name)

    def get(self) -> wire.GetAuditResponse:
        return asyncio.run(self.calls.get_audit(wire.GetAuditRequest()))

    def page(self) -> bytes:
        return asyncio.run(self.calls.read_audit_page(wire.ReadAuditPageRequest())).html


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "audits")


def test_a_folder_without_a_report_is_an_answer(folder: Folder) -> None:
    """No report, no problem, no run."""
    found = folder.get()
    assert (found.folder, found.HasField("report"), found.problem, found.HasField("run")) == (
        str(folder.path),
        False,
        "",
        False,
    )
    with pytest.raises(Refused, match="there is no report"):
        folder.page()


def test_a_report_is_read_again_when_it_is_replaced(folder: Folder) -> None:
    """Fields of a newer version are ignored."""
    folder.write(SMALL)
    first = folder.get().report
    assert (first.verdict, first.range.watermark_ms, first.folder) == ("clean", 7, str(folder.path))
    folder.write(SMALL | {"verdict": "lost", "exit_code": 20})
    assert (folder.get().report.verdict, folder.get().report.exit_code) == ("lost", 20)


@pytest.mark.parametrize(
    "summary",
    [
        b"",
        b"{",
        b'{"verdict": "clean"',
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        [],
        {},
        SMALL | {"exit_code": "no number"},
        SMALL | {"hours": [{"start_ms": 2**70}]},
        SMALL | {"hours": [{"start_ms": -1}]},
        SMALL | {"gaps": [{"after_ms": 10**15}]},
        SMALL | {"findings": "many"},
    ],
    ids=lambda summary: repr(summary)[:40],
)
def test_a_damaged_report_is_named(folder: Folder, summary: object) -> None:
    """With the file; the daemon answers all the same, and shows the next one."""
    folder.write(summary)
    found = folder.get()
    assert (found.HasField("report"), f"{folder.path / SUMMARY} is damaged" in found.problem) == (False, True)
    folder.write(SMALL)
    assert folder.get().report.verdict == "clean"


def test_a_huge_report_is_not_read(folder: Folder) -> None:
    """Neither its summary nor its page: both have a bound."""
    folder.write(b" " * SUMMARY_BYTES_MAX + b"{}")
    assert "and at most 1,048,576 are read" in folder.get().problem
    with (folder.path / PAGE).open("wb") as file:
        file.truncate(PAGE_BYTES_MAX + 1)
    with pytest.raises(Refused, match="and at most 16,777,216 are read"):
        folder.page()


def test_lists_of_a_report_are_cut(folder: Folder) -> None:
    """A summary of another program may have more than the page can show."""
    parts: dict[str, Any] = {name: [{}] * 1_000 for name in ("hours", "kinds", "findings", "gaps")}
    folder.write(SMALL | parts)
    found = folder.get().report
    sizes = [len(each) for each in (found.hours, found.kinds, found.findings, found.gaps)]
    assert sizes == [HOURS_MAX, LISTED_MAX, LISTED_MAX, LISTED_MAX]


def test_the_page_is_that_of_the_newest_report(folder: Folder) -> None:
    """As the file has it."""
    folder.write(b"<p>page", PAGE)
    folder.write(SMALL)
    assert folder.get().report.has_page
    assert folder.page() == b"<p>page"


def test_audits_that_are_off_are_refused(folder: Folder) -> None:
    """Without a folder there is nothing to show; without a trail nothing to audit."""
    off = AuditCalls(None)
    for call in (
        off.get_audit(wire.GetAuditRequest()),
        off.start_audit(wire.StartAuditRequest()),
        off.read_audit_page(wire.ReadAuditPageRequest()),
    ):
        with pytest.raises(Refused, match="audit_reports = off"):
            asyncio.run(call)
    with pytest.raises(Refused, match="the trail is off"):
        asyncio.run(folder.calls.start_audit(wire.StartAuditRequest()))
