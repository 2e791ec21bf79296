"""Operators and restored backups, crossed with consumers that fail and with kills, against what is owed to whom.

Groups are reset, removed and made anew, topics too; letters are redriven and purged, queues added, retention told to
remove; the store is backed up and the backup restored later, while clients go on with handles from before. Every
order may die in one of its commits. Whatever comes must be owed, and at the end all that is owed comes: nothing
finished comes again unless an operator said so, and nothing is lost.

``DMQ_TEST_EFFORT=20`` makes a long run of it; ``--hypothesis-seed`` with ``DMQ_TEST_SEED``'s number repeats one.
"""

from __future__ import annotations

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from support.effort import EFFORT, SEED
from support.models.broker.operator_machine import GROUPS, ROUND_MS, ROUNDS, TOPICS, OperatorRules, picks
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import End

pytestmark = pytest.mark.property
print(f"DMQ_TEST_SEED={SEED}")


class OperatorMachine(OperatorRules):
    """One history, and its end."""

    ends: tuple[End, ...]

    @rule(pick=picks, down_ms=st.sampled_from((0, 1_500, 61_000)))
    def restart(self, pick: int, down_ms: int) -> None:
        """The run ends, in order or not."""
        self.begin_again(self.ends[pick % len(self.ends)], down_ms)
        self.settle()

    def teardown(self) -> None:
        """Receive everything; then nothing is owed."""
        try:
            if (
                hasattr(self, "rig")
                and hasattr(self.rig, "broker")
                and self.is_sound
                and self.rig.store.failure is None
            ):  # else a rule failed, which is told
                self.drain()
                assert not self.strays, self.strays
                self.run(self.rig.close())
        finally:
            self.loop.close()
            self.folder.cleanup()

    def drain(self) -> None:
        """Nothing waits for longer than it was told to; all that is owed comes; the trail has no gap."""
        self.rig.broker.client_gone("client-1")
        for _ in range(ROUNDS):
            self.pass_time(ROUND_MS)
            for group in GROUPS:
                for topic in TOPICS:
                    while found := self.take(group, topic, 1_000):
                        for debt in found:
                            self.do("ack", group, topic, debt)
        assert not self.books.waiting, f"never came: {self.books.waiting}"
        owed = [each for each in self.books.debts() if not each[2].is_doubtful]
        assert not owed, f"lost: {owed}"
        for sequence, (record, _) in enumerate(read_outbox(self.rig.store), 1):
            assert record.sequence == sequence


class OnMemory(OperatorMachine):
    """On the engine in memory, where power can fail."""

    on_disk = False
    ends = (End.CLOSE, End.KILL, End.POWER_LOSS)


class OnRocksDB(OperatorMachine):
    """On RocksDB."""

    on_disk = True
    ends = (End.CLOSE, End.KILL)


_PACE = settings(stateful_step_count=30)

TestOperatorsOnMemory = seed(SEED)(OnMemory.TestCase)
TestOperatorsOnMemory.settings = settings(_PACE, max_examples=25 * EFFORT)
TestOperatorsOnRocksDB = seed(SEED)(OnRocksDB.TestCase)
TestOperatorsOnRocksDB.settings = settings(_PACE, max_examples=6 * EFFORT)


def test_a_clock_that_was_wrong_between_two_looks_at_the_ages_was_set() -> None:
    """What came while it was ahead has two ages, by what was known and by its row; the check of ages knows why."""
    history = OnMemory()
    history.open(jump_max_ms=None)
    for _ in range(5):
        history.accept()  # one look in four is at the ages
    history.live_through("workers", ["ack"] * 4)
    history.send(topic="orders", count=1, delay_ms=1_000)
    history.step_and_back(1_000, 0, is_forward=True)
    history.teardown()
