"""Retention of the trail accuses no healthy trail: a cut between any two dates leaves the verdict as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.effort import EFFORT, SEED
from support.forges.cells.forge import forge
from support.forges.trail.cut import Cuts, midnights
from support.models.broker.histories import RecordedHistory

from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options

pytestmark = pytest.mark.spark
TRAILS, CUTS = EFFORT, 8
# Histories jump in time, so their messages are late; that is not what is asked here.
OPTIONS = Options(late_after_ms=10**9, grace_ms=10**9)
print(f"DMQ_TEST_SEED={SEED}")


def forged(trail: Path, seed: int) -> None:
    """Write a forged trail of two daemons and a spool."""
    forge(trail, messages=120, seed=seed, rows_per_file=100)


def recorded(trail: Path, seed: int) -> None:
    """Write the trail of a real broker with operators, transactions and failing consumers."""
    history = RecordedHistory(seed)
    history.play(80)
    history.write(trail)


def at_random(cuts: Cuts, random: Random) -> dict[str, int]:
    """Choose a cut of each cell."""
    return {cell: random.choice(midnights(events)) for cell, events in cuts.events.items()}


@pytest.mark.parametrize("write", [forged, recorded])
@pytest.mark.parametrize("number", range(TRAILS))
def test_a_cut_of_a_healthy_trail_is_healthy(
    engine: TableEngine, tmp_path: Path, write: Callable[[Path, int], None], number: int
) -> None:
    """Cuts at random places have no finding, as the whole trail, and a look at every message finds none either."""
    random = Random(f"{SEED}/{number}")
    write(tmp_path / "whole", random.randrange(10**6))
    cuts, trail = Cuts(tmp_path / "whole"), tmp_path / "cuts"
    cuts.write(trail, "-whole", dict.fromkeys(cuts.events, 0))
    for each in range(CUTS):
        cuts.write(trail, f"-{each}", at_random(cuts, random))
    outcome = run_audit(engine, str(trail), OPTIONS)
    assert (outcome.findings, outcome.exit_code) == ([], 0)
    exact = run_audit(engine, str(trail), replace(OPTIONS, exact=True))
    assert exact.report == outcome.report


@pytest.mark.parametrize("write", [forged, recorded])
def test_a_cut_between_two_incremental_runs_is_healthy(
    engine: TableEngine, tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    """The second run finds nothing, although the first one took in files that retention removed since."""
    random = Random(SEED)
    write(tmp_path / "whole", random.randrange(10**6))
    cuts, trail, kept = Cuts(tmp_path / "whole"), tmp_path / "trail", str(tmp_path / "state")
    after = at_random(cuts, random)
    upto = {cell: max(after[cell], sequence) for cell, sequence in at_random(cuts, random).items()}
    cuts.write_steps(trail, tmp_path / "later", after, upto)
    run_audit(engine, str(trail), OPTIONS, state=kept)
    shutil.rmtree(trail)
    (tmp_path / "later").rename(trail)
    told: list[str] = []
    outcome = run_audit(engine, str(trail), replace(OPTIONS, say=told.append), state=kept)
    assert (outcome.findings, outcome.exit_code) == ([], 0)
    restarts = [each for each in told if "starting over" in each]
    assert write is recorded or not restarts  # a reset group reads old messages again
