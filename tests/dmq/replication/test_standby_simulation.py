"""Histories of primaries, standbys and takeovers under a seeded scheduler, and planted bugs that they convict."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.effort import EFFORT, SEED
from support.models.replica_simulation import Bugs, Simulation, simulated_modules

from dmq.replication.lease import Lease, LeaseWrite
from dmq.replication.log import ReplicationLog

pytestmark = pytest.mark.property
HISTORIES = 100 if EFFORT == 1 else 5_000 * EFFORT  # 100,000 at an effort of 20
_SHARDS = 1 if EFFORT == 1 else max(os.cpu_count() or 1, 1)  # for the workers of a long run
_CONVICTED_WITHIN = 2_000
_HISTORY_MS = 12_000


class LeaseFromAnswer(Lease):
    """Counts its term from the answer of a write, which others saw before."""

    def note_answer(self, write: LeaseWrite, etag: str | None, now_ms: int) -> None:
        super().note_answer(LeaseWrite(write.record, write.etag, now_ms), etag, now_ms)


class HastyLease(Lease):
    """Takes over before the term has ended."""

    def is_free(self, now_ms: int) -> bool:
        return super().is_free(now_ms + self.term_ms // 2)


class DeafLease(Lease):
    """Does not notice that it is lost. The fence is enough for safety."""

    def is_lost(self, now_ms: int) -> bool:
        return False


_DEAF = Bugs(lease=DeafLease, has_two_holders=True)


class EagerLog(ReplicationLog):
    """Answers before the put is answered."""

    def _await(self, is_done: Callable[[], bool]) -> None:
        """Do not wait."""


class CredulousLog(ReplicationLog):
    """Takes any segment at its number for its own."""

    def _is_own(self, draft: object) -> bool:
        return True


def _run(seed: int, bugs: Bugs) -> int:
    simulation = Simulation(seed, bugs)
    try:
        with simulated_modules():
            simulation.run(2 + seed % 2, _HISTORY_MS)
    except AssertionError as broken:
        raise AssertionError(f"history {seed}: {broken}") from broken
    return len(simulation.answered)


@pytest.mark.timeout(60 + HISTORIES)
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_no_history_loses_an_acknowledged_batch(shard: int) -> None:
    """Every batch that was answered OK is in the log once, in order; directories are prefixes of it. In half of the
    histories no primary notices the loss of its lease.
    """
    first = SEED * 1_000_003
    numbers = range(HISTORIES * shard // _SHARDS, HISTORIES * (shard + 1) // _SHARDS)
    bugs = (Bugs(), _DEAF)
    answered = sum(_run(first + number, bugs[number % 2]) for number in numbers)
    print(f"DMQ_TEST_SEED={SEED}: {len(numbers)} histories, {answered} answers")
    assert answered > 5 * len(numbers)


@pytest.mark.parametrize("seed", [9_001_034_507, 9_001_039_759])
def test_a_standby_that_was_stopped_at_its_promotion_replaces_no_primary(seed: int) -> None:
    """It finds segments of its successor, and is not the directory that wrote them. Histories of a long run."""
    assert _run(seed, Bugs())


@pytest.mark.parametrize(
    "bugs",
    [
        Bugs(log=EagerLog),
        Bugs(has_no_fence=True),
        replace(_DEAF, log=CredulousLog),
        Bugs(lease=LeaseFromAnswer),
        Bugs(lease=HastyLease),
    ],
    ids=["answers first", "no fence", "no nonce", "term from the answer", "hasty lease"],
)
def test_planted_bugs_are_convicted(bugs: Bugs) -> None:
    """Each bug breaks a promise within some histories."""
    for seed in range(_CONVICTED_WITHIN):
        try:
            _run(seed, bugs)
        except AssertionError:
            return
    pytest.fail(f"no history of {_CONVICTED_WITHIN} convicts {bugs}")
