"""RPCs of ``AdminService`` about audits of the trail. Files are read in another thread, with bounds."""

from __future__ import annotations

import asyncio
from typing import Final

from google.protobuf.json_format import Parse, ParseError
from google.protobuf.message import Message

from broker_adapter.contracts.errors import Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import filled
from dmq.recovery import (
    PAGE,
    PAGE_BYTES_MAX,
    SUMMARY,
    SUMMARY_BYTES_MAX,
    AuditRun,
    AuditRuns,
    FoundReport,
    ReportUnreadable,
    newest_report,
    read_bounded,
)

HOURS_MAX: Final = 14 * 24
LISTED_MAX: Final = 100
_MS_MAX: Final = 253_402_300_799_999  # the year 9999, the last one that is shown


class AuditCalls:
    """RPCs of audits. Raise ``Refused`` for invalid input, and if audits are off."""

    def __init__(self, runs: AuditRuns | None) -> None:
        self._runs = runs
        self._read: tuple[FoundReport, wire.AuditReport | str] | None = None  # the newest report, or why it is not read

    async def get_audit(self, _request: wire.GetAuditRequest) -> wire.GetAuditResponse:
        """Return the newest report, and the state of the last audit."""
        return await asyncio.to_thread(self._answer, self._known_runs())

    async def start_audit(self, _request: wire.StartAuditRequest) -> wire.StartAuditResponse:
        """Start an audit."""
        return wire.StartAuditResponse(run=_shown(await self._known_runs().start()))

    async def read_audit_page(self, _request: wire.ReadAuditPageRequest) -> wire.ReadAuditPageResponse:
        """Return the page of the newest report."""
        return await asyncio.to_thread(self._page, self._known_runs())

    def _known_runs(self) -> AuditRuns:
        if self._runs is None:
            raise Refused(Rule.REQUEST, "this daemon has no folder of audit reports (audit_reports = off)")
        return self._runs

    def _answer(self, runs: AuditRuns) -> wire.GetAuditResponse:
        response = wire.GetAuditResponse(folder=str(runs.folder))
        if runs.last is not None:
            response.run.CopyFrom(_shown(runs.last))
        newest = newest_report(runs.folder)
        if newest is None:
            return response
        read = self._read
        if read is None or read[0] != newest:
            read = self._read = newest, _report_of(newest)
        if isinstance(read[1], str):
            response.problem = read[1]
        else:
            response.report.CopyFrom(read[1])
        return response

    @staticmethod
    def _page(runs: AuditRuns) -> wire.ReadAuditPageResponse:
        newest = newest_report(runs.folder)
        if newest is None or not (newest.folder / PAGE).exists():
            raise Refused(Rule.NOT_FOUND, "there is no report with a page")
        try:
            return wire.ReadAuditPageResponse(html=read_bounded(newest.folder / PAGE, PAGE_BYTES_MAX))
        except ReportUnreadable as error:
            raise Refused(Rule.REQUEST, str(error)) from error


def _shown(run: AuditRun) -> wire.AuditRun:
    return filled(wire.AuditRun, run, folder=str(run.folder), progress=run.last_line())


def _report_of(found: FoundReport) -> wire.AuditReport | str:
    """Return a report, or why it cannot be read."""
    path = found.folder / SUMMARY
    try:
        report = Parse(read_bounded(path, SUMMARY_BYTES_MAX), wire.AuditReport(), ignore_unknown_fields=True)
    except ReportUnreadable as error:
        return str(error)
    except (ParseError, UnicodeError, RecursionError) as error:
        return f"{path} is damaged: {' '.join(str(error).split())[:200]}"
    for listed, most in ((report.hours, HOURS_MAX), (report.kinds, LISTED_MAX), (report.findings, LISTED_MAX)):
        del listed[most:]
    del report.gaps[LISTED_MAX:]
    if not report.verdict or not _has_times(report):
        return f"{path} is damaged: it has no verdict, or an impossible time"
    report.folder, report.written_at_ms = str(found.folder), found.written_ms
    report.has_page = (found.folder / PAGE).is_file()
    return report


def _has_times(report: wire.AuditReport) -> bool:
    """Return True if all times can be shown."""
    parts: list[Message] = [report.range, *report.hours, *report.findings, *report.gaps]
    return all(
        0 <= value <= _MS_MAX for part in parts for field, value in part.ListFields() if field.name.endswith("_ms")
    )
