"""A whole audit of forged trails: the truth, and the same bytes whichever way it is asked."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.effort import at_length
from support.forges.cells.forge import Truth, forge, same_ledger
from support.forges.trail.bend import Bent
from support.forges.trail.mutations import LATE_AFTER_MS, MUTATORS

from spark_audit import session
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome, write_outcome

pytestmark = pytest.mark.spark
COMPARED = ("report.json", "findings.csv", "findings.jsonl")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A small trail with a bit of everything, small files and two snapshots."""
    return forge(tmp_path_factory.mktemp("jobs") / "trail", messages=600, seed=4, rows_per_file=300, snapshots=2)


@pytest.fixture(scope="module")
def bent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trail that lies about some messages, of each kind."""
    path = tmp_path_factory.mktemp("bent") / "trail"
    forge(path, messages=600, seed=5, rows_per_file=300)
    told: set[str] = set()
    for name in sorted(MUTATORS):
        told |= MUTATORS[name](path, "daemon-0", 2, 7, told).message_ids
    return path


def written(outcome: AuditOutcome, out: Path) -> dict[str, bytes]:
    """Return the files that are compared."""
    write_outcome(outcome, out)
    return {name: (out / name).read_bytes() for name in COMPARED}


@at_length
def test_a_clean_trail_is_clean_and_its_ledgers_are_the_truth(engine: TableEngine, truth: Truth) -> None:
    """Nothing is found, and most windows of messages need no look at single ones."""
    outcome = run_audit(engine, str(truth.path), Options())
    assert outcome.findings == []
    assert (outcome.report["verdict"], outcome.exit_code) == ("clean", 0)
    assert same_ledger(truth.scheduled, outcome.report["scheduled"], ("window_start_ms", "topic")) == []
    assert same_ledger(truth.fired, outcome.report["fired"], ("topic", "group")) == []
    assert same_ledger(truth.spooled, outcome.report["spooled"], ("cell", "type")) == []
    assert outcome.figures["windows_skipped"] > 0.5 * outcome.figures["windows"] > 0


@at_length
@pytest.mark.parametrize("changed", [{"exact": True}, {"key_bits": 5}, {"verify": False}, {}])
def test_how_it_is_asked_changes_no_byte(
    engine: TableEngine, bent: Path, tmp_path: Path, changed: dict[str, object]
) -> None:
    """A look at every message, keys so short that messages collide, no checksums, or a second run: all the same."""
    first = written(run_audit(engine, str(bent), Options()), tmp_path / "first")
    options = dataclasses.replace(Options(), **changed)  # type: ignore[arg-type]
    second = written(run_audit(engine, str(bent), options), tmp_path / "second")
    assert first["findings.csv"].count(b"\n") > len(MUTATORS)
    assert first == second


@at_length
def test_a_pause_is_the_reason_why_a_delivery_is_late(engine: TableEngine, truth: Truth, tmp_path: Path) -> None:
    """Of what its topic kept back; what came late without one, or after another topic's, is late and no more."""
    trail = shutil.copytree(truth.path, tmp_path / "trail")
    lie = MUTATORS["delay"](trail, "daemon-0", 6, 7, set())
    bent = Bent(trail, "daemon-0")
    late = {life.message_id: life for life in bent.lives() if life.message_id in lie.message_ids}
    topics = sorted({life.scheduled.topic or "" for life in late.values()})
    begin = bent.events[0]

    def change(topic: str, said: str, at_ms: int) -> None:
        text = b"\0" + said.encode()
        bent.add(begin, begin._replace(kind="TOPIC_CHANGED", topic=topic, at_ms=at_ms, message_id=text, detail=None))

    def fired_ms(topic: str) -> list[int]:
        return sorted(life.delivered.at_ms for life in late.values() if life.scheduled.topic == topic)

    why = dict.fromkeys(topics, "fired late")
    change("elsewhere", "paused", begin.at_ms)
    if len(topics) > 1:
        change(topics[1], "deliver_rate=5", begin.at_ms)
        why[topics[1]] = "fired late: its topic has a delivery rate"
    change(topics[0], "paused", begin.at_ms)
    change(topics[0], "resumed", fired_ms(topics[0])[-1])
    why[topics[0]] = "fired late: its topic was paused"
    bent.save()
    outcome = run_audit(engine, str(trail), Options(late_after_ms=LATE_AFTER_MS))
    found = {each["message_id"]: each["rule"] for each in outcome.findings if each["kind"] == "LATE"}
    assert found == {name: why[life.scheduled.topic or ""] for name, life in late.items()}


@at_length
def test_a_session_is_left_as_it_was(spark: SparkSession) -> None:
    """What is set for a small trail does not slow down a long one after it; a long one is not set for at all."""

    def settings() -> dict[str, str]:
        return dict(spark.conf.getAll)

    before = settings()
    with session.set_for(spark, session.SMALL_BYTES):
        assert spark.conf.get("spark.sql.adaptive.enabled") == "false"
    assert settings() == before
    with session.set_for(spark, session.SMALL_BYTES + 1):
        assert settings() == before


@at_length
def test_a_range_chooses_windows(engine: TableEngine, truth: Truth) -> None:
    """With a range only its windows are in the ledger of what was scheduled."""
    starts = sorted({row["window_start_ms"] for row in truth.scheduled})
    low, high = starts[2], starts[5]
    outcome = run_audit(engine, str(truth.path), Options(from_ms=low, to_ms=high))
    assert {row["window_start_ms"] for row in outcome.report["scheduled"]} == set(starts[2:5])
    expected = [row for row in truth.scheduled if low <= row["window_start_ms"] < high]
    assert same_ledger(expected, outcome.report["scheduled"], ("window_start_ms", "topic")) == []


@at_length
def test_no_more_findings_are_listed_than_asked_for(engine: TableEngine, bent: Path) -> None:
    """All are counted, the first are listed, with their histories."""
    everything = run_audit(engine, str(bent), Options())
    some = run_audit(engine, str(bent), Options(findings_max=3))
    assert some.findings == everything.findings[:3]
    assert some.report["findings"]["total"] == everything.report["findings"]["total"] > 3
    assert some.report["verdict"] == everything.report["verdict"]
    assert all(each["history"] for each in some.findings)
