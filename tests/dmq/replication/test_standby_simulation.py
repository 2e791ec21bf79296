"""Histories of primaries, standbys and takeovers under a seeded scheduler, and planted bugs that they convict."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import cast
from unittest.mock import patch

import pytest
from support.effort import EFFORT, SEED
from support.models.replica.links import ReceivedRow, SimulatedReceived
from support.models.replica.simulation import Bugs, Simulation, simulated_modules

from dmq.replication.lease import Lease, LeaseWrite
from dmq.replication.link import LinkSender, StandbyLink
from dmq.replication.log import ReplicationLog, _Draft, _Sent

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

    def _find(self, draft: _Draft) -> _Sent | None:
        return draft.becomes


class ForgetfulReceived(SimulatedReceived):
    """Acknowledges batches that are not synced."""

    def sync(self, added: list[ReceivedRow]) -> None:
        """Do not sync."""


class LateLink(StandbyLink):
    """Not a fault: it writes its batches into the log when it takes over, not before."""

    def look(self) -> None:
        with patch.object(self, "put_tail"):
            super().look()


class SelfishLink(LateLink):
    """Takes over although the register names another standby."""

    def begin_takeover(self) -> int | None:
        self._receiver.close()
        self.put_tail()
        return self._follower.position.epoch


class UnsealedLink(LateLink):
    """Looks at the register, and does not seal it."""

    def begin_takeover(self) -> int | None:
        return None if self.reserved_for() else SelfishLink.begin_takeover(cast("SelfishLink", self))


class TaillessLink(LateLink):
    """Takes over without the batches that it has received."""

    def put_tail(self) -> None:
        """Put nothing."""


class NamelessSender(LinkSender):
    """Counts acknowledgements before the register names the standby."""

    def _make_member(self, member: str, address: str) -> None:
        """Write nothing."""


_LINKS = Bugs(has_links=True)
_LATE = Bugs(has_links=True, standby_link=LateLink)


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
    histories no primary notices the loss of its lease, and half have direct links.
    """
    first = SEED * 1_000_003
    numbers = range(HISTORIES * shard // _SHARDS, HISTORIES * (shard + 1) // _SHARDS)
    bugs = (Bugs(), _DEAF, _LINKS, replace(_DEAF, has_links=True))
    answered = sum(_run(first + number, bugs[number % 4]) for number in numbers)
    print(f"DMQ_TEST_SEED={SEED}: {len(numbers)} histories, {answered} answers")
    assert answered > 5 * len(numbers)


@pytest.mark.parametrize("seed", [9_001_034_507, 9_001_039_759])
def test_a_standby_that_was_stopped_at_its_promotion_replaces_no_primary(seed: int) -> None:
    """It finds segments of its successor, and is not the directory that wrote them. Histories of a long run."""
    assert _run(seed, Bugs())


@pytest.mark.parametrize(
    ("bugs", "first"),
    [
        pytest.param(Bugs(log=EagerLog), 0, id="answers first"),
        pytest.param(Bugs(has_no_fence=True), 0, id="no fence"),
        pytest.param(replace(_DEAF, log=CredulousLog), 0, id="no nonce"),
        pytest.param(Bugs(lease=LeaseFromAnswer), 0, id="term from the answer"),
        pytest.param(Bugs(lease=HastyLease), 0, id="hasty lease"),
        pytest.param(replace(_LATE, received=ForgetfulReceived), 18, id="acknowledgement before the sync"),
        pytest.param(replace(_LATE, standby_link=SelfishLink), 0, id="not the member"),
        pytest.param(replace(_DEAF, has_links=True, standby_link=UnsealedLink), 39, id="no seal"),
        pytest.param(replace(_LATE, standby_link=TaillessLink), 0, id="no received batches"),
        pytest.param(replace(_LATE, sender=NamelessSender), 21, id="no register"),
    ],
)
def test_planted_bugs_are_convicted(bugs: Bugs, first: int) -> None:
    """Each bug breaks a promise within some histories; from the ``first`` one on, within few."""
    for seed in range(first, first + _CONVICTED_WITHIN):
        try:
            _run(seed, bugs)
        except AssertionError:
            return
    pytest.fail(f"no history of {_CONVICTED_WITHIN} convicts {bugs}")
