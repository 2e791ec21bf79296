"""Message groups within one queue, through any history: in order, blocking each other and nobody else, never stuck."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.effort import EFFORT
from support.forges.messages.line import NOW_MS, Line, Reading

from broker_adapter.contracts.errors import Refused
from broker_adapter.runtime.clock import Moment
from dmq.broker.groups import group_queue
from dmq.broker.groups.group_queue import DeliveryLease
from dmq.broker.handles.receipt_handle import ReceiptHandle


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
        self.out: dict[int, DeliveryLease] = {}  # handed out, or hidden
        self.hidden: set[int] = set()  # of these, those that outlive the run
        self.due: dict[int, int] = {}  # the next attempt, where it is not the first
        self.due_after_restart: dict[int, int] = {}
        self.good: dict[int, ReceiptHandle] = {}
        self.stale: list[ReceiptHandle] = []  # in this run
        self.ending: list[tuple[int, DeliveryLease, int]] = []

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
            self.line.queue.release(receipt.queue_offset)
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
        rows = queue.hide(
            offset, lease, Moment(NOW_MS, NOW_MS), 1, is_suspended=is_suspended, message_group=message_group
        )
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

    def pick(self, pick: int) -> ReceiptHandle:
        """One of them."""
        return self.usable()[pick % len(self.usable())]

    def usable(self) -> list[ReceiptHandle]:
        """The last handles of messages that are not finished, and that no receive is about to hand out again."""
        read = {offset for reading in self.reads for offset in reading.taken}
        return [receipt for offset, receipt in sorted(self.good.items()) if offset not in read]

    def hand_out(self, offset: int) -> None:
        if offset in self.good:
            self.stale.append(self.good[offset])
        lease = self.out[offset] = self.line.queue.leases[offset]
        self.good[offset] = ReceiptHandle(7, 8, 9, offset, lease.epoch, lease.attempt)

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


_PACE = settings(stateful_step_count=50, max_examples=30 * EFFORT)

TestAnyHistory = OrderMachine.TestCase
TestAnyHistory.settings = _PACE
TestAnyHistoryWithLittleRoom = BoundedMachine.TestCase
TestAnyHistoryWithLittleRoom.settings = _PACE
