"""Compares what an audit found with the lies told and the damage done: all of it must be there, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.forges.cells.forge import Truth, same_ledger
from support.forges.trail.damage import Damage, ranges_of
from support.forges.trail.mutations import LATE_AFTER_MS, Lie

if TYPE_CHECKING:
    from spark_audit.engines.table import TableEngine

_OF_TRAIL = {"TRAIL_GAP", "FILE_MISSING", "FILE_ALTERED", "RECORD_REPEATED"}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an audit left in its directory."""

    exit_code: int
    report: Mapping[str, Any]
    findings: Sequence[Row]

    @property
    def about_messages(self) -> set[tuple[str, str | None, str]]:
        """Kind, group and id of everything that was found about messages."""
        rows = [row for row in self.findings if row["kind"] not in _OF_TRAIL]
        return {(row["kind"], row["group"] or None, row["message_id"] or "") for row in rows}


def read_outcome(out: Path, exit_code: int) -> Outcome:
    """Read what an audit wrote into ``out``."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    lines = (out / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    outcome = Outcome(exit_code, report, [json.loads(line) for line in lines])
    assert report["exit_code"] == exit_code
    assert report["findings"]["total"] == len(outcome.findings)
    return outcome


def audit_with(engine: TableEngine, trail: Path, out: Path, late_after_ms: int = LATE_AFTER_MS) -> Outcome:
    """Audit a trail in this process, and return what was written into ``out``."""
    from spark_audit.jobs.audit import run_audit
    from spark_audit.jobs.options import Options
    from spark_audit.jobs.outcome import write_outcome

    done = run_audit(engine, str(trail), Options(late_after_ms=late_after_ms))
    write_outcome(done, out)
    return read_outcome(out, done.exit_code)


def check_clean(outcome: Outcome, truth: Truth) -> None:
    """Fail unless nothing was found, and every ledger is the truth."""
    assert outcome.findings == []
    assert (outcome.exit_code, outcome.report["verdict"]) == (0, "clean")
    check_ledgers(outcome, truth)


def check_ledgers(outcome: Outcome, truth: Truth) -> None:
    """Fail unless the ledgers, the ladder, the dead letters, the histogram and the cells are the truth."""
    report = outcome.report
    assert report["range"]["watermark_ms"] == truth.watermark_ms
    for name, keys in (
        ("scheduled", ("window_start_ms", "topic")),
        ("fired", ("topic", "group")),
        ("spooled", ("cell", "type")),
        ("retries", ("topic", "group", "attempt")),
        ("dead", ("topic", "group", "reason")),
        ("lateness", ("topic", "upper_ms")),
    ):
        assert same_ledger(getattr(truth, name), report[name], keys) == [], name
    for row in report["scheduled"]:
        late = truth.lateness_ms.get((row["window_start_ms"], row["topic"]))
        assert row["lateness_max_ms"] == (max(late) if late else None)
    told = {about["cell"]: about for about in report["cells"]}
    for about in truth.cells:
        assert {name: told[about["cell"]][name] for name in about} == about


def check_lies(outcome: Outcome, lies: Iterable[Lie], beside: Iterable[Damage] = ()) -> None:
    """Fail unless exactly the lies and the damage were found.

    Messages of damaged records may be called INCONCLUSIVE, none of them anything else.
    """
    expected = set().union(*(lie.findings for lie in lies))
    damages = list(beside)
    touched: set[str] = set().union(*(damage.touched for damage in damages))
    found = outcome.about_messages
    missing = sorted(expected - found, key=str)
    assert not missing, f"{len(missing)} not found: {missing[:10]}"
    extra = {each for each in found - expected if each[0] != "INCONCLUSIVE" or each[2] not in touched}
    assert not extra, f"{len(extra)} found, but not told: {sorted(extra, key=str)[:10]}"
    seen = [row for row in outcome.findings if row["kind"] not in _OF_TRAIL and row["kind"] != "INCONCLUSIVE"]
    assert len(seen) == len(expected), "found more than once"
    check_damage(outcome, damages)


def check_damage(outcome: Outcome, damages: Iterable[Damage]) -> None:
    """Fail unless exactly these gaps, files and records were found, each with its cell."""
    damages = list(damages)
    told = {(about["cell"], *gap) for about in outcome.report["cells"] for gap in _gaps_of(about)}
    assert told == {(damage.cell, *gap) for damage in damages for gap in damage.gaps}
    for kind, expected in (
        ("FILE_MISSING", {(damage.cell, path) for damage in damages for path in damage.missing}),
        ("FILE_ALTERED", {(damage.cell, path) for damage in damages for path in damage.altered}),
    ):
        assert {(row["cell"], row["detail"]) for row in _of(outcome, kind)} == expected, kind
    repeated = {(damage.cell, sequence) for damage in damages for sequence in damage.repeated}
    rows = _of(outcome, "RECORD_REPEATED")
    assert {(row["cell"], int(_numbers(row["detail"])[0])) for row in rows} == repeated
    assert len(rows) == len(repeated)


def _gaps_of(about: Row) -> Iterable[tuple[int, int]]:
    """Return the gaps of a cell as ranges, whatever their causes."""
    return ranges_of(number for gap in about["gaps"] for number in range(gap["first"], gap["last"] + 1))


def _of(outcome: Outcome, kind: str) -> list[Row]:
    return [row for row in outcome.findings if row["kind"] == kind]


def _numbers(text: str) -> list[str]:
    return re.findall(r"[0-9]+", text)
