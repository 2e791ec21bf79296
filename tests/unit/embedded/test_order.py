"""Message groups within one queue: in order, blocking each other and nobody else, and never stuck."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.effort import EFFORT
from support.group_rows import Rows, a_queue

from broker_adapter.errors import Refused
from dmq.embedded import group_queue
from dmq.embedded.group_queue import Lease
from dmq.embedded.order import RUN_MAX, MessageOrder
from dmq.embedded.receipt import Receipt

NOW_MS = 1_000_000
ALL = 1_000


@dataclass
class Reading:
    """A receive whose messages are being read."""

    first_epoch: int
    run_max: int
    taken: list[int]


class Line:
    """A queue with messages of message groups (one letter each, ``-`` for none), and who receives from it."""

    def __init__(self, message_groups: str = "") -> None:
        self.rows = Rows()
        self.queue = a_queue(0)
        self.message_groups = ""
        self.epoch = 0
        self.send(message_groups)
        self.rows.apply(self.queue.start_at(0))

    def send(self, message_groups: str) -> None:
        """Append messages."""
        self.message_groups += message_groups
        self.queue.end = len(self.message_groups)

    def group_of(self, offset: int) -> str:
        """The message group of a message, empty for none."""
        return self.message_groups[offset].strip("-")

    def begin(self, limit: int = ALL, run_max: int = ALL) -> Reading:
        """Take and lease, as a receive does before it reads."""
        reading = Reading(self.epoch + 1, run_max, [])
        for offset, returned in self.queue.take(limit):
            self.epoch += 1
            self.queue.lease(offset, Lease(self.epoch, returned.attempt, NOW_MS))
            reading.taken.append(offset)
        assert reading.taken == sorted(set(reading.taken))
        return reading

    def end(self, reading: Reading) -> list[int]:
        """Hand out what may go out, now that it was read."""
        return [offset for offset in reading.taken if self.admit(reading, offset)]

    def admit(self, reading: Reading, offset: int) -> bool:
        """Say whether one message that was read goes out."""
        return self.queue.admit(offset, self.group_of(offset), first_epoch=reading.first_epoch, run_max=reading.run_max)

    def cancel(self, reading: Reading) -> None:
        """Hand out nothing after all."""
        for offset in reversed(reading.taken):
            self.queue.give_back(offset)

    def receive(self, limit: int = ALL, run_max: int = ALL) -> list[int]:
        """A whole receive."""
        return self.end(self.begin(limit, run_max))

    def ack(self, *offsets: int) -> None:
        """Finish messages."""
        for offset in offsets:
            self.rows.apply(self.queue.finish(offset))

    def come_back(self, offset: int) -> None:
        """End a lease."""
        lease = self.queue.leases[offset]
        attempt, ops = self.queue.plan_return(offset, lease, NOW_MS)
        self.rows.apply(ops)
        assert self.queue.come_back(offset, lease, attempt)

    def hide(self, offset: int) -> None:
        """Make a lease outlive the run."""
        lease = self.queue.leases[offset]
        self.rows.apply(self.queue.hide(offset, lease, NOW_MS, message_group=self.group_of(offset)))

    def restart(self) -> None:
        """Begin the next run."""
        self.queue = self.rows.load(len(self.message_groups))


def test_a_run_goes_out_together_and_blocks_what_is_behind_it() -> None:
    """Also if that is sent later; every one of the run must be finished first."""
    line = Line("aa-b")
    assert line.receive() == [0, 1, 2, 3]
    line.send("ab-")
    assert line.receive() == [6]
    line.ack(0)
    assert line.receive() == []
    line.ack(1)
    assert line.receive() == [4]
    line.ack(3)
    assert line.receive() == [5]


def test_a_run_has_its_bound() -> None:
    """A push consumer gets one at a time; what is behind is offered as soon as that one is finished."""
    line = Line("aaab-")
    assert line.receive(run_max=1) == [0, 3, 4]
    line.ack(0)
    assert line.receive(run_max=1) == [1]
    line.ack(1)
    assert line.receive(run_max=2) == [2]


def test_a_long_line_is_offered_in_parts() -> None:
    """What waits behind a failed message is not all read again each time one of them is finished."""
    line = Line("a" * (3 * RUN_MAX))
    assert line.receive(run_max=1) == [0]
    line.ack(0)
    assert line.receive(run_max=ALL) == [1]  # the last receive was a push consumer's
    line.ack(1)
    assert line.receive(run_max=ALL) == list(range(2, 2 + RUN_MAX))


def test_what_comes_back_goes_before_what_is_behind_it() -> None:
    """Alone while the rest of its run is out, and first of the line when nothing is."""
    line = Line("aaa")
    assert line.receive(limit=2) == [0, 1]
    assert line.receive() == []
    line.come_back(0)
    assert line.receive() == [0]
    line.come_back(1)
    assert line.receive() == []
    line.come_back(0)
    assert line.receive() == [0, 1, 2]


def test_what_a_filter_passes_over_lets_the_next_one_go() -> None:
    """Finished without having gone out; whether it was looked at before or not."""
    line = Line("aaa")
    reading = line.begin()
    line.ack(0)
    assert line.end(Reading(reading.first_epoch, 1, [1, 2])) == [1]
    line.come_back(1)
    reading = line.begin(run_max=1)
    line.ack(1)
    assert line.receive(run_max=1) == [2]


def test_a_cancelled_receive_leaves_no_gap() -> None:
    """Another one, begun after it, does not pass it; what it took goes out next."""
    line = Line("aab")
    cancelled, other = line.begin(limit=1), line.begin()
    assert line.end(other) == []
    line.cancel(cancelled)
    assert line.receive() == [0, 1, 2]


def test_two_receives_at_once_keep_the_order() -> None:
    """The second one gets nothing of a group of which the first got something."""
    line = Line("aaab")
    first, second = line.begin(limit=2), line.begin(limit=2)
    assert line.end(first) == [0, 1]
    assert line.end(second) == [3]
    line.ack(0, 1)
    assert line.receive() == [2]


def test_a_lease_from_before_holds_up_what_is_behind_it() -> None:
    """And only that: what was before it in its group is handed out again."""
    line = Line("aaab")
    assert line.receive(limit=3) == [0, 1, 2]
    line.hide(1)
    line.restart()
    assert line.receive() == [0, 3]
    line.ack(1)
    assert line.receive() == []
    line.ack(0)
    assert line.receive() == [2]


def test_a_lease_from_before_that_ends_comes_in_its_turn() -> None:
    """Those before it were handed out in the last run and are free again: they go first."""
    for is_held_by_a_row in (True, False):
        line = Line("aaa")
        assert line.receive() == [0, 1, 2]
        lease = line.queue.leases[2]
        if is_held_by_a_row:
            line.hide(2)
        line.restart()
        if not is_held_by_a_row:
            line.queue.leased(Receipt(7, 8, 9, 2, lease.epoch, 1), "a")
        line.come_back(2)
        assert line.receive(limit=1) == [0]
        assert line.receive() == []
        line.ack(0)
        assert line.receive() == [1, 2]


def test_what_is_parked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound nothing new is looked at; what is finished makes room."""
    monkeypatch.setattr(group_queue, "PARKED_MAX", 3)
    line = Line("aaaaaa--")
    assert line.receive(limit=1) == [0]
    assert line.receive(limit=2) == []
    assert line.receive(limit=2) == []
    assert line.queue.order.parked_count == 4
    assert not line.queue.has_available()
    line.ack(0)
    assert line.receive(limit=2) == [1, 2]
    line.ack(1, 2)
    assert line.receive() == [3, 4, 5, 6, 7]


def test_nothing_is_kept_of_what_is_finished() -> None:
    """A message group costs memory while something of it is unfinished, and no longer."""
    line = Line("abab-")
    line.ack(*line.receive())
    fresh = MessageOrder()
    assert vars(line.queue.order) == vars(fresh)


class OrderMachine(RuleBasedStateMachine):
    """Any number of receives at once, in any state, on one queue, through restarts, against what is known of each."""

    parked_max: ClassVar[int] = 100_000

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(group_queue, "PARKED_MAX", self.parked_max)
        self.line = Line()
        self.reads: list[Reading] = []
        self.finished: set[int] = set()
        self.out: dict[int, Lease] = {}  # handed out, or hidden
        self.hidden: set[int] = set()  # of these, those that outlive the run
        self.due: dict[int, int] = {}  # the next attempt, where it is not the first
        self.due_after_restart: dict[int, int] = {}
        self.good: dict[int, Receipt] = {}
        self.stale: list[Receipt] = []  # in this run
        self.ending: list[tuple[int, Lease, int]] = []

    # -- receives -----------------------------------------------------------------------------------------------------

    @rule(message_groups=st.text("aab-", min_size=1, max_size=6))
    def send(self, message_groups: str) -> None:
        self.line.send(message_groups)

    @rule(limit=st.integers(1, 8), run_max=st.sampled_from((1, 2, 8)))
    def begin(self, limit: int, run_max: int) -> None:
        """Nothing is taken that somebody has, and everything with its attempt."""
        has_available = self.line.queue.has_available()
        reading = self.line.begin(limit, run_max)
        assert bool(reading.taken) == has_available
        assert not self.busy() & set(reading.taken)
        assert not self.finished & set(reading.taken)
        for offset in reading.taken:
            assert self.line.queue.leases[offset].attempt == self.due.get(offset, 1)
        self.reads.append(reading)

    @precondition(lambda self: self.reads)
    @rule(unwanted=st.sampled_from((0, 0, 2, 3)))
    def end(self, unwanted: int) -> None:
        """Reads end in their order. A message goes out when all before it are finished, or go out with it."""
        reading, given = self.reads.pop(0), list[int]()
        for offset in reading.taken:
            if unwanted and offset % unwanted == 0:
                self.finish(offset)
            elif self.line.admit(reading, offset):
                earlier = [each for each in self.same_group(offset) if each < offset and each not in self.finished]
                run = [each for each in given if self.line.group_of(each) == self.line.group_of(offset)]
                assert run[-len(earlier) :] == earlier if earlier else True
                assert len(earlier) < reading.run_max
                given.append(offset)
                self.hand_out(offset)
            else:
                assert self.line.group_of(offset)

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        self.line.cancel(self.reads.pop(pick % len(self.reads)))

    # -- what becomes of deliveries -----------------------------------------------------------------------------------

    @precondition(lambda self: self.usable())
    @rule(pick=st.integers(0, 99), is_moved=st.booleans())
    def finish_one(self, pick: int, *, is_moved: bool) -> None:
        """With the last handle, also a late one; for good, or because it goes on as a copy."""
        receipt = self.pick(pick)
        assert self.line.queue.check(receipt)
        if is_moved:
            self.line.rows.apply(self.line.queue.leave(receipt.queue_offset))
            self.stale.append(receipt)
        self.finish(receipt.queue_offset, is_done=is_moved)

    @precondition(lambda self: self.usable())
    @rule(pick=st.integers(0, 99), what=st.sampled_from(("hide", "suspend", "nack")))
    def hide(self, pick: int, what: str) -> None:
        """With the last handle, also a late one; after a nack it is refused."""
        receipt = self.pick(pick)
        offset, queue = receipt.queue_offset, self.line.queue
        assert queue.check(receipt)
        message_group = self.line.group_of(offset)
        lease = self.out[offset] = queue.leased(receipt, message_group)
        if what == "nack":
            self.line.epoch += 1
            lease.epoch = self.line.epoch
            self.stale.append(self.good.pop(offset))
        is_suspended = what == "suspend"
        rows = queue.hide(offset, lease, NOW_MS, is_suspended=is_suspended, message_group=message_group)
        self.line.rows.apply(rows)
        self.hidden.add(offset)
        self.due[offset] = self.due_after_restart[offset] = lease.attempt

    @precondition(lambda self: self.out)
    @rule(pick=st.integers(0, 99))
    def end_a_lease(self, pick: int) -> None:
        """The row is written; whoever is quick may still do something about it."""
        offset = sorted(self.out)[pick % len(self.out)]
        lease = self.out[offset]
        attempt, ops = self.line.queue.plan_return(offset, lease, NOW_MS)
        assert attempt == lease.attempt + (not lease.is_suspended)
        self.line.rows.apply(ops)
        self.due_after_restart[offset] = attempt
        self.hidden.discard(offset)
        self.ending.append((offset, lease, attempt))

    @precondition(lambda self: self.ending)
    @rule()
    def come_back(self) -> None:
        """Unless it was finished, or hidden anew."""
        offset, lease, attempt = self.ending.pop(0)
        is_still_ending = self.out.get(offset) is lease and offset not in self.hidden
        assert self.line.queue.come_back(offset, lease, attempt) == is_still_ending
        if is_still_ending:
            del self.out[offset]
            self.due[offset] = attempt

    @precondition(lambda self: self.stale)
    @rule(pick=st.integers(0, 99))
    def use_a_stale_handle(self, pick: int) -> None:
        """Refused, unless the message is finished anyway."""
        receipt = self.stale[pick % len(self.stale)]
        try:
            assert not self.line.queue.check(receipt)
        except Refused:
            return
        assert receipt.queue_offset in self.finished

    @rule()
    def restart(self) -> None:
        """What is not a row is forgotten."""
        self.line.restart()
        self.reads, self.ending, self.stale = [], [], []
        self.out = {offset: self.line.queue.leases[offset] for offset in self.hidden}
        assert self.line.queue.leases.keys() == self.hidden
        self.due = dict(self.due_after_restart)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_stuck(self) -> None:
        """Were everything under way called off, one receive would get the head of each group, and all without one."""
        probe = self.probe()
        given = probe.receive()
        for message_group in {*self.line.message_groups}:
            left = [each for each in self.of(message_group) if each not in self.finished]
            for offset in left[:1] if message_group != "-" else left:
                assert offset in given or offset in self.out, offset

    @invariant()
    def everything_can_be_finished(self) -> None:
        """By a consumer that finishes what it gets, after those that hang."""
        probe = self.probe()
        probe.ack(*self.out)
        while given := probe.receive(limit=3, run_max=2):
            probe.ack(*given)
        assert probe.queue.floor == probe.queue.end

    @invariant()
    def parked_is_counted(self) -> None:
        order = self.line.queue.order
        assert order.parked_count == sum(len(each.parked) for each in order._lines.values())

    def probe(self) -> Line:
        """A copy on which every receive under way was cancelled."""
        probe = copy.deepcopy(self.line)
        for reading in reversed(self.reads):
            probe.cancel(reading)
        return probe

    def of(self, message_group: str) -> list[int]:
        """The offsets of a message group."""
        return [offset for offset, each in enumerate(self.line.message_groups) if each == message_group]

    def same_group(self, offset: int) -> Sequence[int]:
        """The offsets of the message group of a message; none if it has none."""
        return self.of(self.line.group_of(offset)) if self.line.group_of(offset) else ()

    def busy(self) -> set[int]:
        """What somebody has, or reads."""
        return {*self.out, *(offset for reading in self.reads for offset in reading.taken)}

    def pick(self, pick: int) -> Receipt:
        """One of them."""
        return self.usable()[pick % len(self.usable())]

    def usable(self) -> list[Receipt]:
        """The last handles of messages that are not finished, and that no receive is about to hand out again."""
        read = {offset for reading in self.reads for offset in reading.taken}
        return [receipt for offset, receipt in sorted(self.good.items()) if offset not in read]

    def hand_out(self, offset: int) -> None:
        if offset in self.good:
            self.stale.append(self.good[offset])
        lease = self.out[offset] = self.line.queue.leases[offset]
        self.good[offset] = Receipt(7, 8, 9, offset, lease.epoch, lease.attempt)

    def finish(self, offset: int, *, is_done: bool = False) -> None:
        if not is_done:
            self.line.ack(offset)
        self.finished.add(offset)
        self.good.pop(offset, None)
        self.out.pop(offset, None)
        self.hidden.discard(offset)

    def teardown(self) -> None:
        self.patch.undo()


class BoundedMachine(OrderMachine):
    """With so little room for what waits that it is often full: others may wait too, but nobody for ever."""

    parked_max = 3

    @invariant()
    def nothing_is_stuck(self) -> None:
        """Not before something is finished; ``everything_can_be_finished`` says that it is enough."""
        most = self.parked_max - 1 + len(self.out) + sum(len(reading.taken) for reading in self.reads) + 8
        assert self.line.queue.order.parked_count <= most


_PACE = settings(stateful_step_count=50, deadline=None, max_examples=100 * EFFORT)

TestAnyHistory = OrderMachine.TestCase
TestAnyHistory.settings = _PACE
TestAnyHistoryWithLittleRoom = BoundedMachine.TestCase
TestAnyHistoryWithLittleRoom.settings = _PACE
