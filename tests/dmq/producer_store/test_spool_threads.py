"""Many threads on one spool, and its end in the middle of it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.rigs.producer.spool import PATIENCE_S, QUIET, an_entry, number_of, recount

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.spool import Spool, SpoolOptions
from retry.sink import Held, SinkClosed, SinkError, SinkUnavailable

pytestmark = pytest.mark.fault
CLOCK = SystemClock()
PUTTING, TAKING = 16, 4


class Crowd:
    """Threads that put and take until the spool is closed, and what they were answered."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.lock = threading.Lock()
        self.answered: set[int] = set()
        self.doubtful: set[int] = set()
        self.given: Counter[int] = Counter()
        self.finished: set[int] = set()
        self.out: set[int] = set()
        self.wrong: list[str] = []
        self.threads = [threading.Thread(target=self.put, args=(number,)) for number in range(PUTTING)]
        self.threads += [threading.Thread(target=self.take, args=(number,)) for number in range(TAKING)]
        for each in self.threads:
            each.start()

    def put(self, thread: int) -> None:
        """Put, with a key and without, held and not."""
        for number in range(thread + 1, 10**6, PUTTING):
            entry = an_entry(number, key=("", f"{thread}")[number // PUTTING % 2], created_at_ms=CLOCK.now_ms())
            try:
                held = self._spool.put(entry, is_held=number % 5 == 0).result(PATIENCE_S)
                with self.lock:
                    self.answered.add(number)
                if held is not None:
                    self.hold(held)
                    self.finish(held)
            except SinkClosed:
                return
            except SinkUnavailable:
                with self.lock:
                    self.doubtful.add(number)
                return

    def take(self, thread: int) -> None:
        """Take; send again, or finish."""
        rng = random.Random(thread)
        while True:
            try:
                taken = self._spool.take("orders", 20, PATIENCE_S)
                if not taken:
                    return
                for held in taken:
                    self.hold(held)
                for held in taken:
                    if rng.random() < 0.3 and held.entry.attempts < 3:
                        with self.lock:
                            self.out.discard(number_of(held))
                        self._spool.again(held, CLOCK.now_ms() + rng.randrange(3), is_counted=True).result(PATIENCE_S)
                    else:
                        self.finish(held)
            except SinkError:
                return

    def hold(self, held: Held) -> None:
        """It is in somebody's hands."""
        number = number_of(held)
        with self.lock:
            if number in self.out:
                self.wrong.append(f"{number} was given out twice at a time")
            if number in self.finished:
                self.wrong.append(f"{number} was given out after it was finished")
            self.out.add(number)

    def finish(self, held: Held) -> None:
        """It was sent."""
        self._spool.finish(held).result(PATIENCE_S)
        with self.lock:
            self.finished.add(number_of(held))
            self.out.discard(number_of(held))


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_close_in_the_middle_of_it_loses_nothing(tmp_path: Path, durability: str) -> None:
    """Each put that was answered is there afterwards, or was finished; nobody hangs, nothing came to two at a time."""
    options = replace(QUIET, durability=durability)  # type: ignore[arg-type]
    spool = Spool(tmp_path, options=options)
    crowd = Crowd(spool)
    while len(crowd.finished) < 1_500:
        threading.Event().wait(0.005)
        assert any(each.is_alive() for each in crowd.threads)
    spool.close()
    for each in crowd.threads:
        each.join(PATIENCE_S)
    assert not [each for each in crowd.threads if each.is_alive()]
    assert crowd.wrong == []
    with Spool(tmp_path, options=QUIET) as again:
        counted = recount(again.entries)
        assert counted.totals["orders"] == again.entries.totals[1]
        there = set(counted.waiting)
        assert crowd.answered - crowd.finished - there == set()
        assert there & crowd.finished == set()
        print(len(crowd.answered), "answered,", len(there), "left")


def test_close_while_puts_wait_for_room(tmp_path: Path) -> None:
    """Sixteen threads wait for room that never comes: ``close`` ends them all."""
    options = SpoolOptions(adopt_every_s=0, entries_max=10, overflow="block", block_s=3_600)
    spool = Spool(tmp_path, options=options)
    errors: list[str] = []

    def put(first: int) -> None:
        try:
            for number in range(first, first + 100):
                spool.put(an_entry(number)).result(PATIENCE_S)
        except SinkError as error:
            errors.append(type(error).__name__)

    threads = [threading.Thread(target=put, args=(1 + 100 * number,)) for number in range(PUTTING)]
    for each in threads:
        each.start()
    while spool.stats().waiting < 10:
        threading.Event().wait(0.001)
    closer = threading.Thread(target=spool.close)
    closer.start()
    for each in (closer, *threads):
        each.join(PATIENCE_S)
        assert not each.is_alive()
    assert errors == ["SinkClosed"] * PUTTING
    with Spool(tmp_path, options=QUIET) as again:
        assert again.stats().waiting == 10
