"""A spool against a small model, through clock steps, closes, kills, power losses and storage errors.

Each machine plays one history on one spool whose reader is driven by hand. After each step the figures equal a recount
of the rows, and the rows are those of the model: nothing lost, nothing twice, attempts and dead set exact. Whatever is
taken was due, in nobody's hands, and the first of its key; at the end everything is taken, in the order of its keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.effort import EFFORT
from support.rigs.broker.rig import End
from support.rigs.producer.spool import PATIENCE_S, SpoolRig, an_entry, number_of, recount, small_parts

from retry.sink import Death, Entry, Held, SinkUnavailable

pytestmark = pytest.mark.property

TYPES = ("orders", "mails")
KEYS = ("", "", "a", "b")
picks = st.integers(0, 10**6)
delays = st.sampled_from((-500, 0, 0, 1, 700, 5_000, 90_000))


@dataclass(slots=True)
class Entries:
    """What the model knows of an entry that was kept."""

    entry: Entry
    place: int  # in the order of arrival
    held: Held | None = None


class SpoolMachine(RuleBasedStateMachine):
    """One history."""

    on_disk: ClassVar[bool]
    ends: ClassVar[tuple[End, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(small_parts())
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.rig = SpoolRig(Path(folder), on_disk=self.on_disk)
        self.waiting: dict[int, Entries] = {}
        self.dead: dict[int, Entry] = {}
        self.next = 0
        self.now_ms = self.rig.clock.now_ms()  # by the spool's clock, which never goes back
        self.done: list[Held] = []

    @initialize()
    def begin(self) -> None:
        self.rig.open()
        for each in TYPES:
            assert not self.rig.spool.take(each, 1, 0)

    # -- the model ----------------------------------------------------------------------------------------------------

    def is_first(self, number: int) -> bool:
        """Whether an entry has no key, or nothing of its key is in front of it."""
        mine = self.waiting[number]
        lane = (mine.entry.type_name, mine.entry.key)
        return not mine.entry.key or all(
            other.place >= mine.place
            for other in self.waiting.values()
            if (other.entry.type_name, other.entry.key) == lane
        )

    def held(self) -> list[tuple[int, Held]]:
        return [(number, each.held) for number, each in sorted(self.waiting.items()) if each.held is not None]

    def arrive(self, entry: Entry) -> Entries:
        self.next += 1
        entries = self.waiting[int.from_bytes(entry.uid, "big")] = Entries(entry, self.next)
        return entries

    def an_entry(self, type_name: str, key: str, delay_ms: int) -> Entry:
        number, now_ms = self.next * 10 + 1, self.now_ms
        return an_entry(number, type_name=type_name, key=key, created_at_ms=now_ms, due_at_ms=now_ms + delay_ms)

    def pass_by(self, ms: int) -> None:
        self.rig.clock.advance(ms)
        self.now_ms += ms

    def keep_clock(self) -> None:
        """Have a step written before anything else: no write that is to fail must be this one."""
        self.rig.spool.turn()
        self.rig.spool.entries.store.commit([])

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(type_name=st.sampled_from(TYPES), key=st.sampled_from(KEYS), delay_ms=delays, is_held=st.booleans())
    def put(self, type_name: str, key: str, delay_ms: int, is_held: bool) -> None:
        """Keep one entry; what is to be held is, unless others of its key wait."""
        entry = self.an_entry(type_name, key, delay_ms)
        has_waiting = self.rig.spool.has_waiting(type_name, key) if key else False
        held = self.rig.spool.put(entry, is_held=is_held).result(PATIENCE_S)
        entries = self.arrive(entry)
        assert has_waiting == (not self.is_first(int.from_bytes(entry.uid, "big")))
        assert (held is not None) == (is_held and not has_waiting)
        entries.held = held

    @rule(key=st.sampled_from(KEYS), count=st.integers(2, 9), delay_ms=delays)
    def put_many(self, key: str, count: int, delay_ms: int) -> None:
        """Keep several at once, before the first of them is durable."""
        answers: list[Future[Held | None]] = []
        for _ in range(count):
            entry = self.an_entry("orders", key, delay_ms)
            answers += [self.rig.spool.put(entry), self.rig.spool.put(entry)]  # the second one before the first is kept
            self.arrive(entry)
        assert [each.result(PATIENCE_S) for each in answers] == [None] * 2 * count

    @rule(pick=picks)
    @precondition(lambda self: self.waiting)
    def put_again(self, pick: int) -> None:
        """An entry that waits is kept once, however often it is put; nobody gets it into his hands by that."""
        entry = self.waiting[sorted(self.waiting)[pick % len(self.waiting)]].entry
        assert self.rig.spool.put(entry, is_held=pick % 2 == 0).result(PATIENCE_S) is None

    @rule(ms=st.sampled_from((1, 699, 5_000, 100_000)))
    def time_passes(self, ms: int) -> None:
        """Time passes."""
        self.pass_by(ms)

    @rule(ms=st.sampled_from((1, 600, 5_000, 3_600_000)))
    def clock_steps_back(self, ms: int) -> None:
        """The host's clock is set back; what waits is due when it was."""
        self.rig.clock.step_to(self.rig.clock.now_ms() - ms)

    @rule(ms=st.sampled_from((1, 600, 5_000, 300_000)))
    def clock_steps_forward(self, ms: int) -> None:
        """The host's clock is set ahead, by less than what is held."""
        self.rig.clock.step_to(self.rig.clock.now_ms() + ms)
        self.now_ms = max(self.now_ms, self.rig.clock.now_ms())
        self.keep_clock()

    @rule()
    def turn(self) -> None:
        """The reader looks."""
        self.rig.spool.turn()

    @rule(type_name=st.sampled_from(TYPES), limit=st.integers(1, 5))
    def take(self, type_name: str, limit: int) -> None:
        """Take a few."""
        self.rig.spool.turn()
        self.took(self.rig.spool.take(type_name, limit, 0), type_name)

    @rule(type_name=st.sampled_from(TYPES))
    def take_all(self, type_name: str) -> None:
        """Take all that is due: none is missing."""
        self.pass_by(1)  # what came overdue stands behind what the reader has read: in the next millisecond
        self.take_until_empty(type_name)
        for number, each in self.waiting.items():
            if each.entry.type_name == type_name and each.held is None and self.is_first(number):
                assert each.entry.due_at_ms > self.now_ms, number

    def take_until_empty(self, type_name: str) -> None:
        found: Sequence[Held] = self.rig.spool.take(type_name, 100, 0)  # asking makes the reader look for it at all
        self.took(found, type_name)
        is_more = True
        while is_more:
            self.rig.spool.turn()
            found = self.rig.spool.take(type_name, 100, 0)
            self.took(found, type_name)
            is_more = bool(found)

    def took(self, taken: Sequence[Held], type_name: str) -> None:
        for held in taken:
            number = number_of(held)
            entries = self.waiting[number]
            assert entries.held is None, "it is in somebody's hands"
            assert self.is_first(number), "another one of its key is in front of it"
            assert entries.entry.type_name == type_name
            assert entries.entry.due_at_ms <= self.now_ms, "too early"
            assert held.entry == entries.entry
            entries.held = held

    @rule(pick=picks, twice=st.booleans())
    @precondition(lambda self: self.held())
    def finish(self, pick: int, twice: bool) -> None:
        """It was sent; said twice, it counts once."""
        number, held = self.held()[pick % len(self.held())]
        answers = [self.rig.spool.finish(held) for _ in range(1 + twice)]
        for each in answers:
            each.result(PATIENCE_S)
        del self.waiting[number]
        self.done.append(held)

    @rule()
    @precondition(lambda self: self.held())
    def finish_all(self) -> None:
        """Everything that is held was sent, all at once."""
        held = self.held()
        for each in [self.rig.spool.finish(held) for _, held in held]:
            each.result(PATIENCE_S)
        for number, _ in held:
            del self.waiting[number]

    @rule(pick=picks, delay_ms=delays, is_counted=st.booleans(), is_uncertain=st.booleans())
    @precondition(lambda self: self.held())
    def again(self, pick: int, delay_ms: int, is_counted: bool, is_uncertain: bool) -> None:
        """It failed, and is to be tried again."""
        number, held = self.held()[pick % len(self.held())]
        due_at_ms = self.now_ms + delay_ms
        self.rig.spool.again(held, due_at_ms, is_counted=is_counted, error="refused", is_uncertain=is_uncertain).result(
            PATIENCE_S
        )
        entries = self.waiting[number]
        entries.held = None
        entries.entry = replace(
            entries.entry,
            due_at_ms=due_at_ms,
            attempts=entries.entry.attempts + is_counted,
            error="refused",
            is_uncertain=entries.entry.is_uncertain or is_uncertain,
        )

    @rule(pick=picks, is_counted=st.booleans())
    @precondition(lambda self: self.held())
    def bury(self, pick: int, is_counted: bool) -> None:
        """It is tried no more."""
        number, held = self.held()[pick % len(self.held())]
        self.rig.spool.bury(held, Death.EXHAUSTED, "enough", is_counted=is_counted).result(PATIENCE_S)
        entry = self.waiting.pop(number).entry
        self.dead[number] = replace(entry, attempts=entry.attempts + is_counted, error="enough")

    @rule(pick=picks, count=st.integers(1, 3), twice=st.booleans())
    @precondition(lambda self: self.dead)
    def requeue(self, pick: int, count: int, twice: bool) -> None:
        """Dead ones wait again; each named twice is one."""
        type_name = TYPES[pick % 2]
        numbers = [number for number, each in sorted(self.dead.items()) if each.type_name == type_name][:count]
        uids = [number.to_bytes(16, "big") for number in numbers]
        assert self.rig.spool.requeue(type_name, [*uids, *(uids if twice else ()), b"?" * 16]) == len(numbers)
        for number in numbers:
            self.arrive(replace(self.dead.pop(number), attempts=0, due_at_ms=self.now_ms))

    @rule(pick=picks)
    @precondition(lambda self: self.done)
    def finish_what_is_gone(self, pick: int) -> None:
        """What was finished long ago can be finished, and failed, once more: nothing happens."""
        held = self.done[pick % len(self.done)]
        self.rig.spool.finish(held).result(PATIENCE_S)
        self.rig.spool.again(held, 0, is_counted=True).result(PATIENCE_S)

    @rule(pick=picks, down_ms=st.sampled_from((0, 0, 3_000)))
    def restart(self, pick: int, down_ms: int) -> None:
        """The run ends; nothing is held in the next one."""
        self.pass_by(down_ms)
        self.rig.restart(self.ends[pick % len(self.ends)])
        if not self.waiting:  # then it may begin with the host's clock again
            self.now_ms = self.rig.spool.clock.now_ms()
        assert self.rig.spool.clock.now_ms() == self.now_ms
        self.keep_clock()
        for each in self.waiting.values():
            each.held = None
        self.done.clear()

    # -- at all times -------------------------------------------------------------------------------------------------

    @invariant()
    def rows_and_figures_agree(self) -> None:
        """The rows are the model's, and the figures are the rows'."""
        if not hasattr(self.rig, "spool"):
            return
        entries = self.rig.spool.entries
        counted = recount(entries)
        true = {number: replace(each.entry, due_at_ms=0) for number, each in self.waiting.items()}
        assert {number: replace(each, due_at_ms=0) for number, each in counted.waiting.items()} == true
        assert counted.dead == self.dead
        figures = {name: entries.totals.get(topic.topic_id) for name, topic in entries.names.topics.items()}
        assert {name: figure for name, figure in figures.items() if figure} == {
            name: figure for name, figure in counted.totals.items() if figures[name]
        }
        for name in TYPES:
            mine = [each for each in self.waiting.values() if each.entry.type_name == name]
            stats = self.rig.spool.stats(name)
            assert stats.held == sum(each.held is not None for each in mine)
            assert stats.waiting == len(mine) - stats.held
            assert stats.dead == sum(each.type_name == name for each in self.dead.values())
            assert [int.from_bytes(each.entry.uid, "big") for each in self.rig.spool.dead(name)] == sorted(
                number for number, each in self.dead.items() if each.type_name == name
            )
            free = [
                each.entry.created_at_ms
                for number, each in sorted(self.waiting.items())
                if each.entry.type_name == name and each.held is None and self.is_first(number)
            ]
            assert stats.oldest_at_ms == (free[0] if free else None)
        assert not self.rig.spool.damaged

    def teardown(self) -> None:
        """Whatever is left is taken, and the spool is empty."""
        try:
            if hasattr(self.rig, "spool") and self.rig.spool.entries.store.failure is None:
                self.drain()
                self.rig.spool.close()
        finally:
            self.stack.close()

    def drain(self) -> None:
        dues = [each.entry.due_at_ms for each in self.waiting.values()]
        self.pass_by(max([0, *(due - self.now_ms for due in dues)]))
        for _ in range(len(self.waiting) + 1):
            for each in TYPES:
                self.pass_by(1)
                self.take_until_empty(each)
            for number, held in self.held():
                self.rig.spool.finish(held).result(PATIENCE_S)
                del self.waiting[number]
        assert not self.waiting
        self.rows_and_figures_agree()


class MemoryMachine(SpoolMachine):
    """On the engine in memory, where power can fail, and writes."""

    on_disk = False
    ends = (End.CLOSE, End.KILL, End.POWER_LOSS)

    @rule(at_sync=st.booleans(), end=st.sampled_from((End.KILL, End.POWER_LOSS)), pick=picks, key=st.sampled_from(KEYS))
    def a_write_fails(self, at_sync: bool, end: End, pick: int, key: str) -> None:
        """One change is in doubt, and was made whole or not at all; what is held stays held, and the spool goes on."""
        held = self.held()
        choice = pick % 4 if held else 0
        number, mine = held[pick % len(held)] if held else (0, None)
        entry = self.an_entry("orders", key, 0)
        spool, due_at_ms = self.rig.spool, self.now_ms
        self.rig.next_end = end
        self.rig.memory.fail_next_sync, self.rig.memory.fail_next_write = at_sync, not at_sync
        answer: Future[Held | None] | Future[None]
        try:
            if mine is None or choice == 0:
                answer = spool.put(entry, is_held=pick % 2 == 0)
            elif choice == 1:
                answer = spool.finish(mine)
            elif choice == 2:
                answer = spool.again(mine, due_at_ms, is_counted=True)
            else:
                answer = spool.bury(mine, Death.PERMANENT, "no")
        except SinkUnavailable:  # a write of its own met the fault first: nothing was begun
            self.rig.mended()
            return
        with pytest.raises(SinkUnavailable):
            answer.result(PATIENCE_S)
        self.rig.mended()
        # The store's own thread may have met the fault with a write of its own: then this one was never made.
        counted = recount(self.rig.spool.entries)
        row = counted.waiting.get(number if choice else int.from_bytes(entry.uid, "big"))
        has_happened = {
            0: row is not None,
            1: row is None,
            2: row is not None and mine is not None and row.attempts > mine.entry.attempts,
            3: number in counted.dead,
        }[choice]
        assert not has_happened or (at_sync and end is End.KILL)
        if not has_happened:
            return
        if choice == 0:
            self.arrive(entry)
        elif choice == 2:
            was = self.waiting[number]
            was.held = None
            was.entry = replace(was.entry, attempts=was.entry.attempts + 1, due_at_ms=due_at_ms)
        else:
            was = self.waiting.pop(number)
            if choice == 3:
                self.dead[number] = replace(was.entry, attempts=was.entry.attempts + 1, error="no")


class DiskMachine(SpoolMachine):
    """On RocksDB, in a folder of its own."""

    on_disk = True
    ends = (End.CLOSE, End.KILL)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=30 * EFFORT, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=8 * EFFORT, stateful_step_count=30, suppress_health_check=list(HealthCheck))
