"""The summary of a report: of bounded size, whatever the report has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spark_audit.report.summary import FINDINGS_MAX, GAPS_MAX, HOURS_MAX, summary

pytestmark = pytest.mark.unit

START_MS = 1_795_219_200_000  # 2026-11-21 00:00 UTC
HOUR_MS = 3_600_000
Data = dict[str, Any]


def report(*rows: Data, hours: int = 24, **others: Any) -> Data:  # noqa: ANN401 - parts of a report
    times = {"from_ms": START_MS, "to_ms": START_MS + hours * HOUR_MS, "watermark_ms": START_MS + hours * HOUR_MS - 1}
    return {"verdict": "late", "exit_code": 10, "range": times, "scheduled": list(rows)} | others


def row(start_ms: int, **counts: int) -> Data:
    return {"window_start_ms": start_ms, "topic": "orders"} | counts


def finding(kind: str, number: int, name: str = "orders") -> Data:
    return {"kind": kind, "topic": name, "message_id": f"M{number}", "detail": name, "due_ms": START_MS}


def test_windows_are_summed_by_hour() -> None:
    """Of all topics; the state of an hour is the worst in it, and the lateness the longest."""
    rows = [
        row(START_MS, scheduled=500, fired=500, lateness_max_ms=5),
        row(START_MS + HOUR_MS - 1, scheduled=500, fired=499, late=1, lateness_max_ms=70_000),
        row(START_MS + HOUR_MS, scheduled=10, pending=10),
        row(START_MS + 2 * HOUR_MS, scheduled=10, lost=1),
    ]
    found = summary(report(*rows), [])["hours"]
    assert [(each["start_ms"] - START_MS, each["state"]) for each in found] == [
        (0, "few_late"),
        (HOUR_MS, "waiting"),
        (2 * HOUR_MS, "lost"),
    ]
    assert (found[0]["scheduled"], found[0]["late"], found[0]["lateness_max_ms"]) == (1_000, 1, 70_000)


def test_the_worst_findings_come_first() -> None:
    """Some of each kind; all are counted by kind, the most severe kind first."""
    found = summary(
        report(findings={"total": 301, "by_kind": {"LATE": 300, "LOST": 1}}),
        [finding("LATE", number) for number in range(300)] + [finding("LOST", 301)],
    )
    assert [(each["kind"], each["level"], each["count"]) for each in found["kinds"]] == [
        ("LOST", "lost", 1),
        ("LATE", "late", 300),
    ]
    assert (found["findings_total"], len(found["findings"])) == (301, FINDINGS_MAX)
    assert found["findings"][0]["message_id"] == "M301"


def test_gaps_have_the_times_around_them() -> None:
    """As far as they are known."""
    gaps = [{"first": 3, "last": 5, "why": "no file", "after_ms": 7, "before_ms": None}]
    found = summary(report(cells=[{"cell": "c1", "events": 9, "gaps": gaps}]), [])
    assert found["gaps"] == [{"cell": "c1", **gaps[0]}]
    assert (found["gaps_total"], found["events"], found["cells"]) == (1, 9, 1)


def test_the_size_is_bounded() -> None:
    """Years of hours, a million gaps and the longest names: at most 512 KiB, up to the watermark."""
    hours = 2 * 365 * 24
    name = "\u202e\x07é" * 400
    rows = [row(START_MS + hour * HOUR_MS, scheduled=2**60, late=2**60) for hour in range(hours + 100)]
    gap = {"first": 2**60, "last": 2**60, "why": name}
    made = summary(
        report(
            *rows,
            hours=hours,
            cells=[{"cell": name, "gaps": [gap] * 10_000}],
            findings={"total": 2**60, "by_kind": {f"{number}{name}": 2**60 for number in range(1_000)}},
        ),
        [finding(f"KIND{number}", number, name) for number in range(1_000)],
    )
    assert len(json.dumps(made, ensure_ascii=False).encode()) <= 512 * 1024
    assert (len(made["hours"]), len(made["gaps"]), made["gaps_total"]) == (HOURS_MAX, GAPS_MAX, 10_000)
    assert made["hours"][-1]["start_ms"] == START_MS + (hours - 1) * HOUR_MS


def test_a_report_without_anything_has_a_summary() -> None:
    """Of an empty trail."""
    found = summary({"verdict": "clean", "exit_code": 0}, [])
    assert (found["verdict"], found["hours"], found["gaps"], found["findings"]) == ("clean", [], [], [])
