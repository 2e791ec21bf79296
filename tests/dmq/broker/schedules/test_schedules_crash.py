"""Schedules through commits that break anywhere, kills and power losses: no occurrence is left out, none comes twice.

Each example is one history of time that passes, operators' calls and broken commits. An independent walk over the
rule's times says what must have been sent; what an operator's call that got no answer did is read from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.forges.messages.letters import Break, BreakingRig, broke, play_history, told
from support.forges.messages.schedules import check_rows, occurrences, wanted
from support.rigs.broker.rig import TOPIC, End
from support.rigs.store.rows import counted, recount

from broker_adapter.contracts.errors import Refused
from dmq.store.schema.keys import recurring_scope
from dmq.store.schema.messages.recurring import CatchUp, Phase
from dmq.trail.events import EventKind

pytestmark = pytest.mark.property
EVERY_MS = {"all": 1_000, "one": 1_700, "skip": 30_000, "count": 1_300}
POLICY = {"all": CatchUp.ALL, "one": CatchUp.ONE, "skip": CatchUp.SKIP, "count": CatchUp.ALL}


@dataclass(frozen=True, slots=True)
class Step:
    """Time that passes or a call, and how the run ends in it if it does."""

    what: str  # "pass", "pause", "resume", "again": made once more, as it is
    name: str
    ms: int
    where: Break | None
    commits_before: int
    end: End


def histories(*ends: End) -> st.SearchStrategy[list[Step]]:
    """Some steps."""
    return st.lists(
        st.builds(
            Step,
            st.sampled_from(("pass", "pass", "pass", "pause", "resume", "again")),
            st.sampled_from(sorted(EVERY_MS)),
            st.sampled_from((1, 500, 1_000, 3_000, 100_000)),
            st.one_of(st.none(), st.sampled_from(Break)),
            st.integers(0, 1),
            st.sampled_from(ends),
        ),
        min_size=1,
        max_size=12,
    )


def asked(name: str) -> object:
    count = 7 if name == "count" else 0
    return wanted(name, every_ms=EVERY_MS[name], catch_up=POLICY[name], count=count)


class Play:
    """One history on one broker."""

    def __init__(self, rig: BreakingRig) -> None:
        self.rig = rig
        self.seen: dict[str, list[tuple[int, int]]] = {name: [] for name in EVERY_MS}
        self.paused: set[str] = set()  # that ever were: of these, numbers are looked at alone
        self.began_ms = 0

    async def run(self, steps: Sequence[Step]) -> None:
        """Play all of it, looking after each step."""
        self.began_ms = self.rig.clock.now_ms()
        for name in EVERY_MS:
            await self.rig.broker.schedules.add(asked(name))  # type: ignore[arg-type]
        for step in steps:
            if step.where is not None:
                self.rig.engine.break_at(step.where, commits_before=step.commits_before)
            await broke(self.rig, self._do(step), step.what, step.end)
            self._look()
        await self.rig.restart(End.KILL)
        await self._drain()
        self._look()
        for name in EVERY_MS.keys() - self.paused:
            self._is_complete(name)

    async def _do(self, step: Step) -> None:
        schedules = self.rig.broker.schedules
        if step.what == "pass":
            self.rig.clock.advance(step.ms)
            await self._drain()
            return
        try:
            if step.what == "again":
                assert not (await schedules.add(asked(step.name)))[1]  # type: ignore[arg-type]
                return
            self.paused.add(step.name)
            status = await (schedules.pause if step.what == "pause" else schedules.resume)(step.name)
        except Refused:
            assert check_rows(self.rig)[step.name] is Phase.ENDED
        else:
            expected = {Phase.PAUSED} if step.what == "pause" else {Phase.WAITING, Phase.ENDED}
            assert status.progress.phase in expected
            assert check_rows(self.rig)[step.name] in expected

    async def _drain(self) -> None:
        for _ in range(12):  # what is to be caught up comes in turns
            await self.rig.settle()
            self.rig.clock.advance(1)

    def _look(self) -> None:
        """What was sent stays sent, numbers have no gaps, times increase, and the rows, counts and events agree."""
        rig = self.rig
        check_rows(rig)
        for name, before in self.seen.items():
            found = occurrences(rig, name)
            assert found[: len(before)] == before
            assert [number for number, _ in found] == list(range(1, len(found) + 1))
            times = [at for _, at in found]
            assert times == sorted(set(times))
            assert all(at <= rig.clock.now_ms() and (at - self.began_ms) % EVERY_MS[name] == 0 for at in times)
            self.seen[name] = found
        topic_id = rig.broker.names.topics[TOPIC].topic_id
        assert counted(rig.store, [recurring_scope(topic_id)]) == recount(rig.store)
        total = sum(map(len, self.seen.values()))
        for kind in (EventKind.SCHEDULED, EventKind.DELIVERED, EventKind.OCCURRED):
            assert len({each.message_id for each in told(rig, kind)}) == len(told(rig, kind)) == total

    def _is_complete(self, name: str) -> None:
        """Of one that went on all the time everything is there that its policy says."""
        steps = [(at - self.began_ms) // EVERY_MS[name] for _, at in self.seen[name]]
        passed = (self.rig.clock.now_ms() - self.began_ms) // EVERY_MS[name]
        if name == "all":
            assert steps == list(range(1, passed + 1))
        elif name == "count":
            assert steps == list(range(1, min(passed, 7) + 1))
        elif name == "one":
            assert not passed or steps[-1] == passed


def check(history: Sequence[Step], *, on_disk: bool) -> None:
    """Play a history on a new broker."""
    play_history(lambda rig: Play(rig).run(history), on_disk=on_disk)


@settings(max_examples=30 * EFFORT)
@given(history=histories(End.KILL, End.POWER_LOSS))
def test_no_occurrence_is_left_out_or_doubled_in_memory(history: list[Step]) -> None:
    """Wherever it breaks, and whether or not what was written and not synced is lost."""
    check(history, on_disk=False)


@settings(max_examples=4 * EFFORT)
@given(history=histories(End.KILL))
def test_no_occurrence_is_left_out_or_doubled_on_rocksdb(history: list[Step]) -> None:
    """The same where a kill is a copy of the directory of a store that was never closed."""
    check(history, on_disk=True)
