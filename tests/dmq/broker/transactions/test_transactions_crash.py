"""Transactions through commits that break anywhere, kills and power losses.

Each example is one history of half messages, decisions, checks and broken commits. A call that was answered counts for
ever; one that was not is repeated. At the end everything is decided, and what must be there follows from the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.forges.messages.letters import Break, BreakingRig, broke, play_history, queued, told
from support.rigs.broker.rig import TOPIC, End, an_envelope
from support.rigs.store.rows import counted, half_bodies, recount, waiting_rows

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import pack_id, unpack_id
from broker_adapter.contracts.transactions import Check, Half
from dmq.broker.transactions.transaction_checks import GIVEN_UP_GROUP, CheckOptions
from dmq.store.schema.keys import half_scope
from dmq.store.schema.messages.record import DELAYED_KINDS, EntryKind, decode_waiting, is_half
from dmq.trail.events import EventKind

pytestmark = pytest.mark.property
CHECKS = CheckOptions(first_after_ms=6_000, every_ms=30_000, checks_max=2)
MESSAGES = 4
DELAY_MS = 20_000
DEAD = f"%DLQ%{GIVEN_UP_GROUP}"
ENDS = {
    "committed": EventKind.COMMITTED,
    "rolled back": EventKind.ROLLED_BACK,
    "given up": EventKind.TX_GIVEN_UP,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One call, or time that passes, and how the run ends in it if it does. Of odd messages the delivery is delayed."""

    what: str  # "prepare", "commit", "roll_back", "pass", "pass alone": without a producer
    number: int
    where: Break | None
    commits_before: int
    end: End


def histories(*ends: End) -> st.SearchStrategy[list[Step]]:
    """Some steps."""
    whats = st.sampled_from(("prepare", "prepare", "commit", "roll_back", "pass", "pass", "pass alone"))
    breaks = st.one_of(st.none(), st.sampled_from(Break))
    numbers = st.integers(0, MESSAGES - 1)
    return st.lists(
        st.builds(Step, whats, numbers, breaks, st.integers(0, 1), st.sampled_from(ends)), min_size=1, max_size=14
    )


class Play:
    """One history on one broker; fits ``Checker``."""

    def __init__(self, rig: BreakingRig) -> None:
        self.rig = rig
        self.ids: dict[int, str] = {}  # of what was answered
        self.ended: dict[int, str] = {}  # how, as far as an answer said so
        self.is_there = True
        self.asked: Counter[str] = Counter()

    def is_live(self, topic: str) -> bool:
        return self.is_there and topic == TOPIC

    async def check(self, check: Check) -> bool:
        self.asked[check.message_id] += 1
        return True

    def begin(self) -> None:
        """Set up a run."""
        self.rig.broker.checks.options = CHECKS
        self.rig.broker.transactions.attach(self)

    async def run(self, steps: Sequence[Step]) -> None:
        """Play all of it, then decide what is open, and look."""
        self.begin()
        for step in steps:
            if step.where is not None:
                self.rig.engine.break_at(step.where, commits_before=step.commits_before)
            if await broke(self.rig, self._do(step), step.what, step.end):
                self.begin()
        await self.rig.restart(End.KILL)
        self.begin()
        self._look()
        await self._decide()
        for _ in range(2):
            self._look()
            assert set(self.ended) == set(self.ids)
            assert not self._waiting({EntryKind.TRANSACTION})
            await self.rig.restart(End.KILL)
            self.begin()

    async def _do(self, step: Step) -> None:
        if step.what == "prepare":
            await self._prepare(step.number)
        elif step.what.startswith("pass"):
            self.is_there = step.what == "pass"
            await self.rig.pass_ms(CHECKS.every_ms)
        elif step.number in self.ids:
            await self._end(step.number, commits=step.what == "commit")

    async def _prepare(self, number: int) -> None:
        half = Half(an_envelope(_name(number)), DELAY_MS if number % 2 else 0)
        (receipt,) = await self.rig.broker.transactions.prepare([half])
        assert self.ids.setdefault(number, receipt.transaction_id) == receipt.transaction_id
        if receipt.ended:
            self._hear(number, receipt.ended)

    async def _end(self, number: int, *, commits: bool) -> None:
        transactions = self.rig.broker.transactions
        try:
            await (transactions.commit if commits else transactions.roll_back)(TOPIC, self.ids[number])
        except Refused as refused:
            if refused.rule is not Rule.TRANSACTION_ID:
                raise
            self._hear(number, refused.why)
        else:
            self._hear(number, "committed" if commits else "rolled back")

    def _hear(self, number: int, text: str) -> None:
        (how,) = [each for each in ENDS if each in text]
        assert self.ended.setdefault(number, how) == how

    async def _decide(self) -> None:
        """Repeat what was not answered: everything gets an answer now, and what was delayed is delivered."""
        for number in range(MESSAGES):
            if number in self.ids or self._told(number, EventKind.HALF):
                await self._prepare(number)
                await self._end(number, commits=number < MESSAGES // 2)
        await self.rig.pass_ms(DELAY_MS)

    # -- what must be there -------------------------------------------------------------------------------------------

    def _told(self, number: int, *kinds: EventKind) -> list[int]:
        return [each.attempt for each in told(self.rig, *kinds) if each.message_id == pack_id(_name(number))]

    def _waiting(self, kinds: Collection[EntryKind]) -> list[str]:
        found = []
        for _, value in waiting_rows(self.rig.store):
            if decode_waiting(value).kind in kinds:
                found.append(next(_name(number) for number in range(MESSAGES) if pack_id(_name(number)) in value))
        return found

    def _look(self) -> None:
        """Check rows, events and counts against each other, and against every answer."""
        rig = self.rig
        topics = rig.broker.names.topics
        ends = {how: [_name(n) for n in range(MESSAGES) if self._told(n, kind)] for how, kind in ENDS.items()}
        begun = [_name(number) for number in range(MESSAGES) if self._told(number, EventKind.HALF)]
        visible, given_up = (
            [unpack_id(record.message_id) for _, _, record in queued(rig, topic)] if topic in topics else []
            for topic in (TOPIC, DEAD)
        )
        waiting = self._waiting(DELAYED_KINDS)
        open_ones = self._waiting({EntryKind.TRANSACTION})
        rows = waiting_rows(rig.store)
        numbers = [int.from_bytes(key[8:], "big") for key, value in rows if is_half(value)]
        assert sorted(numbers) == half_bodies(rig.store), "a half message and its body come and go together"
        assert {_name(number) for number in self.ids} <= set(begun)
        assert sorted(visible + waiting) == ends["committed"]
        assert sorted(given_up) == ends["given up"]
        assert sorted(open_ones + ends["committed"] + ends["rolled back"] + ends["given up"]) == begun
        for number, how in self.ended.items():
            assert _name(number) in ends[how]
        for number in range(MESSAGES):
            checks = self._told(number, EventKind.TX_CHECKED)
            assert checks == list(range(1, len(checks) + 1))
            assert self._told(number, EventKind.TX_GIVEN_UP) in ([], [CHECKS.checks_max])
            assert len(checks) == CHECKS.checks_max or _name(number) not in given_up
            assert self.asked[_name(number)] <= len(checks) <= CHECKS.checks_max
            assert len(self._told(number, *ENDS.values())) <= 1
        if TOPIC in topics:
            scopes = [topics[TOPIC].topic_id, half_scope(topics[TOPIC].topic_id)]
            assert counted(rig.store, scopes) == recount(rig.store)


def _name(number: int) -> str:
    return f"m-{number}"


def check(history: Sequence[Step], *, on_disk: bool) -> None:
    """Play a history on a new broker."""
    play_history(lambda rig: Play(rig).run(history), on_disk=on_disk)


@settings(max_examples=75 * EFFORT)
@given(history=histories(End.KILL, End.POWER_LOSS))
def test_each_transaction_has_one_outcome_in_memory(history: list[Step]) -> None:
    """Wherever it breaks, and whether or not what was written and not synced is lost."""
    check(history, on_disk=False)


@settings(max_examples=8 * EFFORT)
@given(history=histories(End.KILL))
def test_each_transaction_has_one_outcome_on_rocksdb(history: list[Step]) -> None:
    """The same where a kill is a copy of the directory of a store that was never closed."""
    check(history, on_disk=True)
