"""Processes on two directories of one log, killed at every step: lease, puts, local writes, markers, promotions."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from support.effort import EFFORT, SEED
from support.rigs.replica.driver import PREFIX, STEPS, answered, open_copy, run_primary

from dmq.replication.lease import LEASE
from dmq.replication.restore import check, restore
from dmq.store.schema.keys import Family
from dmq.trail.snapshots.layout import open_quiet

pytestmark = pytest.mark.fault
KILLS = 25 * EFFORT  # 1,000 at an effort of 40
_OCCURRENCE_MEAN = 3
_LOST = 0.15  # of the directories


@pytest.mark.timeout(60 + 5 * KILLS)
def test_a_kill_at_any_step_loses_no_answered_row(tmp_path: Path) -> None:
    """Whichever host continues, and also if the other directory is deleted, it has every row that was answered. A start
    on the directory of the killed process waits for no lease.
    """
    print(f"DMQ_TEST_SEED={SEED} kills={KILLS}")
    rng, done = random.Random(SEED), Counter[str]()
    (tmp_path / "copy").mkdir()
    last = None
    while done.total() < KILLS:
        data = tmp_path / rng.choice(("first", "second"))
        is_lost = rng.random() < _LOST
        if is_lost:
            shutil.rmtree(data, ignore_errors=True)
        if is_lost or data != last:
            open_copy(tmp_path).delete([LEASE])  # its term has no end here
        last = data
        step, is_after = rng.choice(sorted(STEPS)), rng.random() < 0.5
        occurrence = 1 + int(rng.expovariate(1 / _OCCURRENCE_MEAN))
        ended = run_primary(
            tmp_path, data, seed=rng.getrandbits(32), step=step, occurrence=occurrence, is_after=is_after
        )
        assert ended.returncode in {0, -signal.SIGKILL}, ended.stderr
        if ended.returncode:
            done[f"{'after' if is_after else 'before'} {step}"] += 1
    print(f"{len(answered(tmp_path))} rows, {dict(done)}")
    for name in ("first", "second"):
        open_copy(tmp_path).delete([LEASE])
        ended = run_primary(tmp_path, tmp_path / name, seed=SEED)
        assert ended.returncode == 0, ended.stderr
    objects = open_copy(tmp_path)
    assert check(objects).faults == ()
    engine = open_quiet(restore(objects, tmp_path / "restored").path / "rocksdb")
    try:
        rows = engine.scan(Family.META, PREFIX, b"\xff", limit=1_000_000).rows
    finally:
        engine.close()
    assert answered(tmp_path) <= {key[len(PREFIX) :] for key, _ in rows}


@pytest.mark.parametrize(
    ("step", "is_after", "is_new"),
    [
        ("lease", True, False),
        ("put", False, False),
        ("put", True, False),
        ("local write", True, False),
        ("put", True, True),
    ],
    ids=["lease", "before the fence", "after the fence", "after the local write", "after the fence of a new store"],
)
def test_a_start_after_a_kill_in_the_opening_waits_for_no_lease(
    tmp_path: Path, step: str, is_after: bool, is_new: bool
) -> None:
    """The directory proves that the process that holds the lease, and wrote the fence, is dead."""
    (tmp_path / "copy").mkdir()
    data = tmp_path / "data"
    if not is_new:
        assert run_primary(tmp_path, data, seed=1).returncode == 0
    killed = run_primary(tmp_path, data, seed=2, step=step, occurrence=1, is_after=is_after)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = run_primary(tmp_path, data, seed=3)
    assert ended.returncode == 0, ended.stderr
