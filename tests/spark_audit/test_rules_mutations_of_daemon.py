"""The audit of a real daemon's trail finds every lie that is told about it and all damage done to it, and no more."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.clients.load.delayed import consume, send_delayed
from support.effort import at_length
from support.forges.trail import mutations as trail_mutations
from support.forges.trail.damage import DAMAGERS
from support.forges.trail.mutations import MUTATORS
from support.models.trail.judge import audit_with, check_lies
from support.rigs.daemon.process import Daemon, run_command

from spark_audit.engines.table import TableEngine

pytestmark = [pytest.mark.spark, at_length]
_MESSAGES = 12_000
_LATE_AFTER_MS = 1_000  # the daemon ran for seconds only
_HALVES = (
    ("lose_hand_over", "double_delivery", "delay", "double_exit"),
    ("lose_exit", "double_accept", "hasten", "reorder"),
)
_TOLD = [(count, tuple(MUTATORS)) for count in (1, 2, 10)] + [(1_000, half) for half in _HALVES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a daemon left that sent and received under load, with a snapshot."""
    data = tmp_path_factory.mktemp("audited") / "data"
    with Daemon(data, env=os.environ | {"DMQ_TRAIL_EVERY": "1s"}) as daemon:
        send_delayed(daemon.address, _MESSAGES)
        consume(daemon.address, _MESSAGES)
        taken = run_command("-a", daemon.address, "audit", "snapshot")
        assert taken.returncode == 0, taken.stderr
        daemon.stop()
    return data / "trail"


@pytest.fixture
def trail(made: Path, tmp_path: Path) -> Path:
    """A copy to bend."""
    return shutil.copytree(made, tmp_path / "trail")


@pytest.fixture
def cell(made: Path) -> str:
    """The daemon's name in the trail."""
    (found,) = (made / "events").iterdir()
    return found.name.removeprefix("cell=")


def test_nothing_is_found_in_its_remains(engine: TableEngine, made: Path, tmp_path: Path) -> None:
    """Every message was handed over and acknowledged."""
    outcome = audit_with(engine, made, tmp_path / "out", late_after_ms=_LATE_AFTER_MS)
    assert (outcome.findings, outcome.exit_code) == ([], 0)
    assert sum(row["acked"] for row in outcome.report["fired"]) == _MESSAGES


@pytest.mark.parametrize(("count", "names"), _TOLD)
def test_every_mutation_is_found(
    engine: TableEngine,
    trail: Path,
    cell: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    names: tuple[str, ...],
) -> None:
    """So many of each kind, each about messages of its own."""
    monkeypatch.setattr(trail_mutations, "LATE_AFTER_MS", _LATE_AFTER_MS)
    told: set[str] = set()
    lies = []
    for name in names:
        lies.append(MUTATORS[name](trail, cell, count, count, told))
        told |= lies[-1].message_ids
    check_lies(audit_with(engine, trail, tmp_path / "out", late_after_ms=_LATE_AFTER_MS), lies)


@pytest.mark.parametrize("count", [1, 2, 10, 1_000])
def test_missing_records_are_named(engine: TableEngine, trail: Path, cell: str, tmp_path: Path, count: int) -> None:
    """As gaps; what they hide is inconclusive, and nothing is lost because of it."""
    damage = DAMAGERS["cut_records"](trail, cell, count, count)
    outcome = audit_with(engine, trail, tmp_path / "out")
    check_lies(outcome, [], [damage])
    assert outcome.exit_code == 30


def test_a_missing_file_is_named(engine: TableEngine, trail: Path, cell: str, tmp_path: Path) -> None:
    """By its path, and its records as a gap."""
    damage = DAMAGERS["remove_files"](trail, cell, 1, 1)
    outcome = audit_with(engine, trail, tmp_path / "out")
    check_lies(outcome, [], [damage])
    assert outcome.exit_code == 30
