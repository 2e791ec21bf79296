"""A cell whose store is gone, declared by an operator, after its messages were given to another daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.forges.trail.hand import START_MS, Hand

from spark_audit.engines.spark import SparkEngine
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome, write_outcome
from spark_audit.tables import UnknownCell, retire_cell

pytestmark = pytest.mark.spark
RULE = "open when its cell was retired, and not accepted again"


def deliver(hand: Hand, entry: int, number: int, offset: int, due_ms: int, at_ms: int) -> None:
    """Deliver a message that waited, and acknowledge it."""
    place: dict[str, Any] = {"queue_id": 0, "queue_offset": offset}
    ids: dict[str, Any] = {"topic": hand.topic, "entry": entry, "message_id": hand.id_of(number)}
    hand.add("DELIVERED", at_ms, **ids, due_ms=START_MS + due_ms, **place)
    hand.of_group("ACKED", number, at_ms, **place)


def replayed(trail: Path, *, up_to: int = 4) -> Hand:
    """Write two cells: one that died with three messages open, and one that was given messages 2 to ``up_to``."""
    dead = Hand(trail, "dead")
    dead.subscribed()
    for number in range(1, 5):
        dead.scheduled(number, 1_000 if number == 1 else 300_000)
    deliver(dead, 1, 1, 0, 1_000, 1_000)
    dead.snapshot([dead.held(number, 300_000) for number in (2, 3, 4)], floor=1, end=1)
    dead.end(60_000)
    new = Hand(trail, "new")
    new.subscribed()
    for number in range(2, up_to + 1):
        ids: dict[str, Any] = {"topic": new.topic, "entry": 10 + number, "message_id": new.id_of(number)}
        new.add("SCHEDULED", 90_000, due_ms=START_MS + 300_000, **ids)
    for number in range(2, up_to + 1):
        deliver(new, 10 + number, number, number - 2, 300_000, 300_000)
    new.end(400_000)
    return dead


def audited(engine: TableEngine, trail: Path, **options: Any) -> AuditOutcome:  # noqa: ANN401 - of `run_audit`
    return run_audit(engine, str(trail), Options(), **options)


def said(outcome: AuditOutcome) -> list[tuple[str, str, str | None]]:
    return [(each["kind"], each["cell"], each["message_id"]) for each in outcome.findings]


def test_a_retired_cell_holds_nothing_back(engine: TableEngine, tmp_path: Path) -> None:
    """Once it is declared gone the trail is clean, up to the last event of the others, also in runs after that one."""
    replayed(tmp_path / "trail")
    state = str(tmp_path / "state")
    before = audited(engine, tmp_path / "trail", state=state)
    assert before.report["range"]["watermark_ms"] == START_MS + 60_000
    assert {kind for kind, *_ in said(before)} == {"DUPLICATE_ACCEPT"}
    retire_cell(engine, str(tmp_path / "trail"), "dead")
    for number, options in enumerate(({"state": state}, {"state": state}, {})):
        outcome = audited(engine, tmp_path / "trail", **options)
        assert said(outcome) == [("RETIRED_CELL", "dead", None)]
        assert (outcome.exit_code, outcome.report["range"]["watermark_ms"]) == (0, START_MS + 400_000), number


def test_messages_of_a_retired_cell_that_were_not_accepted_again_are_named(engine: TableEngine, tmp_path: Path) -> None:
    """Message 4 was open in the retired cell and in no other: inconclusive, as its end may not have been exported."""
    replayed(tmp_path, up_to=3)
    retire_cell(engine, str(tmp_path), "dead")
    retire_cell(engine, str(tmp_path), "dead")
    outcome = audited(engine, tmp_path)
    assert said(outcome) == [("INCONCLUSIVE", "dead", "message-4"), ("RETIRED_CELL", "dead", None)]
    assert outcome.findings[0]["rule"] == RULE
    assert [event["kind"] for event in outcome.findings[0]["history"]] == ["SCHEDULED"]
    assert outcome.exit_code == 30


def test_a_cell_with_later_events_is_not_gone(engine: TableEngine, tmp_path: Path) -> None:
    """Its disk was found and it runs again: it is judged as any other, in a run with state too."""
    trail, state = tmp_path / "trail", str(tmp_path / "state")
    dead = replayed(trail)
    retire_cell(engine, str(trail), "dead")
    audited(engine, trail, state=state)
    dead.end(400_000)
    outcomes = [audited(engine, trail, state=state), audited(engine, trail)]
    assert said(outcomes[0]) == said(outcomes[1])
    for outcome in outcomes:
        assert ("RETIRED_CELL", "dead", None) in said(outcome)
        assert "DUPLICATE_ACCEPT" in {kind for kind, *_ in said(outcome)}


def test_both_engines_give_the_same_findings(engine: TableEngine, spark: SparkSession, tmp_path: Path) -> None:
    """Spark records the cell, and both write the same bytes."""
    trail = tmp_path / "trail"
    replayed(trail, up_to=3)
    other = SparkEngine(spark)
    retire_cell(other, str(trail), "dead")
    assert json.loads((trail / "retired" / "dead.json").read_text(encoding="utf-8")) == {
        "version": 1,
        "cell": "dead",
        "last_sequence": 9,
    }
    for each in (engine, other):
        write_outcome(audited(each, trail), tmp_path / each.name)
    for name in ("report.json", "findings.csv", "report.html"):
        assert (tmp_path / engine.name / name).read_bytes() == (tmp_path / "spark" / name).read_bytes()


def test_a_retired_cell_must_be_there(engine: TableEngine, tmp_path: Path) -> None:
    """The error names the cells of the trail."""
    replayed(tmp_path)
    with pytest.raises(UnknownCell, match="no cell 'daed'; it has: dead, new"):
        retire_cell(engine, str(tmp_path), "daed")
