"""The two rules of the marks, under every interleaving hypothesis can think of, and under real threads.

``World`` plays writer, reader and clock one step at a time around the real ``Marks``: whatever can happen between two
lines of the writer's or the reader's code can happen here between two steps. Rows are (time, sequence) marks; every
third one is grouped, and none of those passes another; every third one is of a scope that may flood.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT, SEED
from support.rigs.store.rows import SCOPE, all_rows, counted, hand_over, packed_id, recount, schedule

from broker_adapter.runtime.clock import ManualClock
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family, timeline_key, timeline_mark
from dmq.store.schema.messages.record import decode_queued
from dmq.store.store import Store, StoreOptions
from dmq.store.writer import marks as marks_module
from dmq.store.writer.marks import Claim, Cursor, Marks
from dmq.store.writer.operations import Done

pytestmark = pytest.mark.property
START_MS = 1_000
LAG_MS = 5  # instead of BACKLOG_LAG_MS: times lie dense, so that everything meets everything
BUSY_LAG_MS = 1


def is_grouped(row: int) -> bool:
    """Whether a row has to wait behind the backlog."""
    return row % 3 == 0


def is_flood(row: int) -> bool:
    """Whether a row is left to the backlog if it does not come alone."""
    return row % 3 == 1


class World:
    """One writer, one reader, one clock. Methods are the steps; each asserts what must hold where it matters."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.sequence = 0
        self.durable: set[int] = set()
        self.durable_done = 0
        self.waiting_units: list[list[int]] = []  # delivery times of schedules that nobody has taken yet
        self.start(Marks(0))

    def start(self, marks: Marks) -> None:
        self.marks = marks
        self.visible = set(self.durable)
        self.done = self.durable_done
        self.taken: set[int] = set()
        # writer
        self.writer = "idle"
        self.writer_now_ms = 0
        self.times: list[int] = []
        self.new: list[int] = []
        self.hand_over: tuple[list[int], int] | None = None  # what the reader submitted: rows and done
        self.in_batch: tuple[list[int], int] | None = None
        # reader
        self.reader = "idle"
        self.reader_now_ms = 0
        self.is_behind = False
        self.claim = Claim(Cursor.LIVE, 0, 0)
        self.cursors: dict[Cursor, list[int]] = {}
        self.durable_before: set[int] = set()
        self.last_read: list[int] = []
        self.is_cut = False

    # -- the writer: take, assemble (clock, reserve), write, sync, release --------------------------------------------

    def take(self) -> None:
        assert self.writer == "idle"
        self.times = [time_ms for unit in self.waiting_units for time_ms in unit]
        self.waiting_units.clear()
        self.in_batch, self.hand_over = self.hand_over, None
        self.writer_now_ms = self.now_ms
        self.writer = "took" if self.times or self.in_batch is not None else "idle"

    def assemble(self) -> None:
        in_hand = self.taken & self.visible | (set(self.last_read) if self.reader.startswith("read ") else set())
        assert max(in_hand, default=-1) < self.marks.high(), "in the reader's hand, and the writer does not know"
        self.new = []
        if self.times:
            floor_ms, lowered = self.marks.reserve(min(self.times), self.writer_now_ms, self.sequence + 1)
            if lowered is not None:
                self.done = min(self.done, lowered)
            for time_ms in self.times:
                self.sequence += 1
                self.new.append(timeline_mark(max(time_ms, floor_ms), self.sequence))
        if self.in_batch is not None:
            self.done = min(self.in_batch[1], self.marks.low())
        self.writer = "assembled"

    def write(self) -> None:
        self.visible.update(self.new)
        if self.in_batch is not None:
            self.visible.difference_update(self.in_batch[0])
        self.writer = "written"

    def sync(self) -> None:
        self.durable, self.durable_done = set(self.visible), self.done
        assert all(row >= self.durable_done for row in self.durable), "done exceeds a row that is not finished"
        self.writer = "synced"

    def release(self) -> None:
        self.marks.release()
        if self.in_batch is not None:
            self.in_batch, self.reader = None, "idle"
        self.writer = "idle"

    # -- the reader: look at the clock; claim, read, retreat for each cursor; leave grouped rows; commit ---------------

    def turn(self) -> None:
        self.reader_now_ms = self.now_ms
        self.marks.split_backlog(self.now_ms, BUSY_LAG_MS if self.is_behind else None)
        self.is_behind = False
        self.cursors = {Cursor.LIVE: [], Cursor.BACKLOG: []}
        self.durable_before = set(self.durable)
        self.reader = "live"

    def claim_of(self, which: Cursor) -> None:
        self.claim = self.marks.claim(which, self.reader_now_ms)
        self.reader = f"claimed {which.value}"

    def read(self, limit: int) -> None:
        found = sorted(row for row in self.visible if self.claim.start <= row < self.claim.stop)
        self.last_read, self.is_cut = found[:limit], len(found) > limit
        self.reader = f"read {self.claim.which.value}"

    def sort_out(self) -> None:
        unsynced = self.marks.unsynced()
        in_hand = self.cursors[Cursor.LIVE]
        rows = [row for row in self.last_read if row < unsynced]
        self.is_cut &= bool(rows)
        self.last_read = rows
        rows = [row for row in rows if row not in in_hand]  # the backlog may go on over them
        for row in rows:
            assert row not in self.taken, "read twice"
            assert row >> 64 <= self.reader_now_ms, "read before its time"
            assert row in self.durable, "handed out before it is durable"
            self.taken.add(row)
        self.cursors[self.claim.which] = sorted(self.cursors[self.claim.which] + rows)
        self.reader = f"sorted {self.claim.which.value}"

    def retreat(self) -> None:
        if self.is_cut and self.last_read:
            self.marks.retreat(self.claim.which, self.last_read[-1] + 1)
        self.is_behind |= self.is_cut and self.claim.which is Cursor.LIVE
        self.reader = "floods" if self.claim.which is Cursor.LIVE else "left"

    def leave_floods(self) -> None:
        """Leave rows of the live cursor to the backlog, if there are too many, and look what is behind them."""
        floods = (
            [row for row in self.cursors[Cursor.LIVE] if is_flood(row)] if len(self.cursors[Cursor.LIVE]) > 1 else []
        )
        self.leave(floods)
        self.reader = "live" if floods and self.is_cut else "grouped"

    def leave_grouped(self) -> None:
        """Leave grouped rows of the live cursor where they are, if any of the backlog is still to come."""
        self.reader = "left"
        if self.marks.has_backlog():
            self.leave([row for row in self.cursors[Cursor.LIVE] if is_grouped(row)])
            self.reader = "backlog"

    def leave(self, left: list[int]) -> None:
        if left:
            self.marks.defer(left[0], left[-1])
            self.taken.difference_update(left)
            self.cursors[Cursor.LIVE] = [row for row in self.cursors[Cursor.LIVE] if row not in left]

    def commit(self) -> None:
        rows = self.cursors[Cursor.LIVE] + self.cursors[Cursor.BACKLOG]
        grouped = [row for row in rows if is_grouped(row)]
        assert grouped == sorted(grouped)
        last = max((row for row in rows if is_grouped(row)), default=0)
        passed = [row for row in self.durable_before - self.taken if is_grouped(row) and row < last]
        assert not passed, "a grouped row was passed by another"
        if rows:
            self.hand_over = (rows, self.marks.low())
            self.reader = "waits"
        else:
            self.reader = "idle"

    # -- the world ----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """What is durable stays."""
        self.waiting_units.clear()
        self.start(Marks(self.durable_done))

    def step_writer(self) -> None:
        {"idle": self.take, "took": self.assemble, "assembled": self.write, "written": self.sync,
         "synced": self.release}[self.writer]()  # fmt: skip

    def step_reader(self, limit: int) -> None:
        if self.reader == "idle":
            self.turn()
        elif self.reader in {"live", "backlog"}:
            self.claim_of(Cursor(self.reader))
        elif self.reader.startswith("claimed"):
            self.read(limit)
        elif self.reader.startswith("read "):
            self.sort_out()
        elif self.reader.startswith("sorted"):
            self.retreat()
        elif self.reader == "floods":
            self.leave_floods()
        elif self.reader == "grouped":
            self.leave_grouped()
        elif self.reader == "left":
            self.commit()

    def step(self, what: str, how: list[int]) -> None:
        """One step of a kind for each element of ``how``: a sender's delay, a reader's limit, a jump of the clock."""
        if what == "send":
            self.waiting_units.append([self.now_ms + offset for offset in how])
        elif what == "writer":
            for _ in how:
                self.step_writer()
        elif what == "reader":
            for limit in how:
                if self.reader != "waits":
                    self.step_reader(limit)
        else:
            self.now_ms += sum(how)

    def drain(self) -> None:
        """Let writer and reader finish, after every time that was ever asked for: nothing may be left behind."""
        asked_ms = [time_ms for unit in self.waiting_units for time_ms in unit] + self.times
        self.now_ms = max([self.now_ms, *asked_ms, *(row >> 64 for row in self.visible)]) + 1_000
        quiet = 0
        while quiet < 3:
            before = len(self.taken)
            while self.writer != "idle" or self.waiting_units or self.hand_over is not None:
                self.step_writer()
            self.step_reader(3)
            while self.reader != "idle":
                if self.reader == "waits":
                    self.step_writer()
                else:
                    self.step_reader(3)
            quiet = quiet + 1 if len(self.taken) == before else 0
            self.now_ms += 1
        assert not self.visible, "left behind the reader"


_OFFSETS = st.lists(st.integers(-15, 15), min_size=1, max_size=3)
_STEPS = st.one_of(
    st.tuples(st.just("send"), _OFFSETS),
    st.tuples(st.just("writer"), st.lists(st.just(0), min_size=1, max_size=5)),
    st.tuples(st.just("reader"), st.lists(st.integers(1, 3), min_size=1, max_size=9)),
    st.tuples(st.just("clock"), st.lists(st.integers(-20, 20), min_size=1, max_size=1)),
)
_LIVES = st.lists(st.lists(_STEPS, min_size=10, max_size=60), min_size=1, max_size=3)


def run(overdue: list[int], lives: list[list[tuple[str, list[int]]]]) -> None:
    """Start with rows that wait, some of them overdue; let each life but the last end in a crash, the last in peace."""
    world = World()
    for before_ms in overdue:
        world.sequence += 1
        world.durable.add(timeline_mark(START_MS - before_ms, world.sequence))
    with patch.object(marks_module, "BACKLOG_LAG_MS", LAG_MS):
        for steps in lives:
            world.crash()
            for what, how in steps:
                world.step(what, how)
        world.drain()


@settings(max_examples=75 * EFFORT)
@given(overdue=st.lists(st.integers(0, 30), max_size=6), lives=_LIVES)
def test_no_interleaving_loses_repeats_or_hurries_a_row(
    overdue: list[int], lives: list[list[tuple[str, list[int]]]]
) -> None:
    """Histories that hypothesis makes, and makes small when one fails."""
    run(overdue, lives)


def test_no_random_interleaving_does_either() -> None:
    """Many more histories than hypothesis has time for; `DMQ_TEST_SEED` repeats them."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)

    def steps() -> Iterator[tuple[str, list[int]]]:
        for _ in range(rng.randint(10, 60)):
            kind = rng.choice(["send", "writer", "reader", "clock"])
            if kind == "send":
                yield kind, [rng.randint(-15, 15) for _ in range(rng.randint(1, 3))]
            elif kind == "writer":
                yield kind, [0] * rng.randint(1, 5)
            elif kind == "reader":
                yield kind, [rng.randint(1, 3) for _ in range(rng.randint(1, 9))]
            else:
                yield kind, [rng.randint(-20, 20)]

    for _ in range(1_200 * EFFORT):
        run([rng.randint(0, 30) for _ in range(rng.randint(0, 6))], [list(steps()) for _ in range(rng.randint(1, 3))])


# -- real threads ------------------------------------------------------------------------------------------------------


def read_one_turn(store: Store) -> int:
    """What the scheduler does in a turn, with small limits."""
    now_ms, marks = store.clock.now_ms(), store.marks
    cursors = [Cursor.LIVE, Cursor.BACKLOG] if marks.split_backlog(now_ms) else [Cursor.LIVE]
    taken: list[tuple[bytes, bytes]] = []
    for cursor in cursors:
        claim = marks.claim(cursor, now_ms)
        found = store.scan(Family.TIMELINE, timeline_key(claim.start), timeline_key(claim.stop), limit=5)
        unsynced = marks.unsynced()
        rows = [row for row in found.rows if int.from_bytes(row[0], "big") < unsynced]
        if rows and not found.is_complete:
            marks.retreat(cursor, int.from_bytes(rows[-1][0], "big") + 1)
        taken += rows
    if taken:
        store.commit([*(hand_over(key, value) for key, value in taken), Done(marks.low())], is_urgent=True)
    return len(taken)


def test_threads_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Senders, a reader and a clock that jumps to and fro, all at once, on the real engine."""
    clock = ManualClock(START_MS)
    store = Store(RocksEngine(tmp_path / "db"), clock, StoreOptions())
    senders, each = 3, 300 * EFFORT
    sending = threading.Semaphore(0)

    def send(first: int) -> None:
        rng = random.Random(SEED + first)
        for number in range(first, first + each):
            store.commit([schedule(number, clock.now_ms() + rng.randint(-30, 60))])
        sending.release()

    with patch.object(marks_module, "BACKLOG_LAG_MS", LAG_MS):
        threads = [threading.Thread(target=send, args=(number * each,)) for number in range(senders)]
        for thread in threads:
            thread.start()
        rng = random.Random(SEED)
        ended = 0
        while ended < senders:
            clock.step_to(clock.now_ms() + rng.randint(-40, 50))
            read_one_turn(store)
            ended += sending.acquire(blocking=False)
        for thread in threads:
            thread.join()
        clock.advance(1_000_000)
        while read_one_turn(store):
            pass
    stored = [decode_queued(value).message_id for _, value in all_rows(store, Family.QUEUE)]
    assert sorted(stored) == [packed_id(number) for number in range(senders * each)]
    assert all_rows(store, Family.TIMELINE) == []
    assert counted(store, [SCOPE]) == recount(store) == ({}, {})
    store.close()
