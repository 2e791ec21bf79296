"""The embedded broker, its scheduler and its store against a small model, through clock steps, kills and power losses.

Each machine plays one history on one broker with its own event loop; the scheduler and the end of leases are driven by
hand, so a failure repeats. At the end everything is drained: nothing accepted is lost, nothing acknowledged comes back,
and the audit trail holds exactly the facts the model has.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.broker_model import Held, Key, Model
from support.effort import EFFORT
from support.rigs import EmbeddedRig, End, an_envelope, receive
from support.trail import read_facts

from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from dmq.audit.events import gap_event
from dmq.errors import StoreFailed
from dmq.store.assemble import BUCKET_MS
from dmq.store.store import StoreOptions

pytestmark = pytest.mark.timeout(600)  # a failure is made small first, which takes its time
TOPICS, GROUPS = ("orders", "refunds"), ("workers", "auditors")
DAY_MS = 86_400_000
_T = TypeVar("_T")

delays = st.sampled_from((0, -1, -60_000, 1, 2, 50, 999, 1_000, 1_001, 5_000, 61_000, DAY_MS))
durations = st.sampled_from((1, 1_000, 5_000, 30_000, 600_000))
steps = st.sampled_from((1, 2, 49, 50, 998, 999, 1_000, 1_001, 5_000, 61_000, 600_000))
picks = st.integers(0, 10_000)
sends = st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(0, 40), delays), min_size=1, max_size=6)


class BrokerMachine(RuleBasedStateMachine):
    """One history."""

    on_disk: ClassVar[bool]
    ends: ClassVar[tuple[End, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.loop = asyncio.new_event_loop()
        self.strays: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.strays.append(repr(context)))
        self.folder = tempfile.TemporaryDirectory(prefix="dmq-machine-")
        options = StoreOptions(idempotency_window_ms=10**12, gap_event=gap_event)
        self.rig = EmbeddedRig(Path(self.folder.name), on_disk=self.on_disk, queues=2, options=options)
        self.clock = self.rig.clock

    @initialize()
    def open(self) -> None:
        self.run(self.rig.open())
        for topic in TOPICS:
            self.run(self.rig.broker.route(topic))

    def run(self, work: Coroutine[object, object, _T]) -> _T:
        """Run a coroutine on the machine's loop."""
        return self.loop.run_until_complete(work)

    # -- producers ----------------------------------------------------------------------------------------------------

    @rule(batch=sends)
    def send(self, batch: list[tuple[str, int, int]]) -> None:
        """One call; ids come from a small pool, so many of them are known, some twice in the call."""
        now_ms = self.clock.now_ms()
        envelopes = [
            an_envelope(f"m-{number}", topic=topic, deliver_at_ms=now_ms + delay) for topic, number, delay in batch
        ]
        receipts = self.run(self.rig.broker.send(envelopes))
        for envelope, receipt in zip(envelopes, receipts, strict=True):
            key = (envelope.topic, envelope.message_id)
            assert receipt.message_id == envelope.message_id
            assert receipt.repeated == self.model.send(key, envelope.deliver_at_ms, now_ms)
            assert (receipt.queue_offset < 0) == (key in self.model.waiting)

    # -- time ---------------------------------------------------------------------------------------------------------

    @rule(ms=steps)
    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.settle()

    @rule(ms=steps, is_forward=st.booleans())
    def step(self, ms: int, *, is_forward: bool) -> None:
        """The host's clock is set, forward or back, while no time passes."""
        self.clock.step_to(self.clock.now_ms() + (ms if is_forward else -ms))
        self.settle()

    @precondition(lambda self: self.model.waiting)
    @rule(pick=picks, early_ms=st.sampled_from((0, 1)))
    def advance_to_a_delivery_time(self, pick: int, early_ms: int) -> None:
        """To the millisecond, or one before it."""
        times = sorted(self.model.waiting.values())
        self.clock.advance(max(0, times[pick % len(times)] - early_ms - self.clock.now_ms()))
        self.settle()

    @precondition(lambda self: self.leases())
    @rule(pick=picks, early_ms=st.sampled_from((0, 1)))
    def advance_to_the_end_of_a_lease(self, pick: int, early_ms: int) -> None:
        """To the millisecond, or one before it."""
        _, _, held = self.leases()[pick % len(self.leases())]
        assert held.hidden_until_ms is not None
        self.clock.advance(max(0, held.hidden_until_ms - early_ms - self.clock.now_ms()))
        self.settle()

    def settle(self) -> None:
        """Let time do its work, on both sides."""
        self.run(self.rig.settle())
        self.model.settle(self.clock.now_ms())

    # -- consumers ----------------------------------------------------------------------------------------------------

    @rule(
        group=st.sampled_from(GROUPS),
        topic=st.sampled_from(TOPICS),
        batch_max=st.integers(1, 6),
        invisible_ms=durations,
    )
    def receive(self, group: str, topic: str, batch_max: int, invisible_ms: int) -> None:
        """Exactly what is visible may come, as many as fit, each with its attempt."""
        now_ms = self.clock.now_ms()
        deliveries = self.run(
            receive(self.rig, group=group, topic=topic, batch_max=batch_max, invisible_ms=invisible_ms)
        )
        available = self.model.available(group, topic)
        assert len(deliveries) == min(batch_max, len(available))
        assert len({each.message_id for each in deliveries}) == len(deliveries)
        for each in deliveries:
            held = available[topic, each.message_id]  # nothing early, nothing hidden, nothing finished
            assert each.delivery_attempt == held.next_attempt
            self.model.hand_out(held, each.receipt_handle, now_ms + invisible_ms)

    @precondition(lambda self: self.handed_out())
    @rule(pick=picks, count=st.integers(1, 4))
    def ack(self, pick: int, count: int) -> None:
        """With the last handle of messages that are leased, or expired, or finished already."""
        group, key, _ = self.handed_out()[pick % len(self.handed_out())]
        chosen = [(other, held) for where, other, held in self.handed_out() if where == group and other[0] == key[0]][
            -count:
        ]
        handles = [held.handles[-1] for _, held in chosen]
        assert list(self.run(self.rig.broker.ack(group, key[0], handles))) == [None] * len(handles)
        for other, _ in chosen:
            self.model.finish(group, other)

    @precondition(lambda self: self.stale())
    @rule(pick=picks, invisible_ms=st.sampled_from((0, 1_000)))
    def use_a_stale_handle(self, pick: int, invisible_ms: int) -> None:
        """Refused, and nothing changes."""
        group, (topic, _), held = self.stale()[pick % len(self.stale())]
        stale = held.handles[pick % (len(held.handles) - 1)]
        (refused,) = self.run(self.rig.broker.ack(group, topic, [stale]))
        assert isinstance(refused, Refused)
        assert refused.rule is Rule.RECEIPT_HANDLE
        with pytest.raises(Refused):
            self.run(self.rig.broker.change_invisible(group, topic, stale, invisible_ms))

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, invisible_ms=st.sampled_from((0, 1, 1_000, 61_000)), suspend=st.booleans())
    def change_invisible(self, pick: int, invisible_ms: int, *, suspend: bool) -> None:
        """With the last handle, leased or expired."""
        group, key, held = self.unfinished()[pick % len(self.unfinished())]
        handle = held.handles[-1]
        work = self.rig.broker.change_invisible(group, key[0], handle, invisible_ms, suspend=suspend)
        assert self.run(work) == handle
        self.model.hide(group, key, self.clock.now_ms(), invisible_ms, suspend=suspend)

    # -- ends ---------------------------------------------------------------------------------------------------------

    @rule(pick=picks, down_ms=st.sampled_from((0, 0, 1_500, 61_000)))
    def restart(self, pick: int, down_ms: int) -> None:
        """The run ends, in order or not, at rest; time may pass before the next one begins."""
        self.begin_again(self.ends[pick % len(self.ends)], down_ms)

    def begin_again(self, end: End, down_ms: int = 0) -> None:
        """Restart on both sides."""
        self.run(self.rig.restart(end, down_ms=down_ms))
        self.model.restart()
        for group, messages in self.model.held.items():
            for topic in {key[0] for key in messages}:
                self.run(self.rig.broker.ack(group, topic, []))  # loads what the group knows of the topic
        self.settle()

    def leases(self) -> list[tuple[str, Key, Held]]:
        """What is hidden now."""
        return [each for each in self.handed_out() if each[2].hidden_until_ms is not None]

    def unfinished(self) -> list[tuple[str, Key, Held]]:
        """What was handed out and not acknowledged."""
        return [each for each in self.handed_out() if not each[2].is_finished]

    def stale(self) -> list[tuple[str, Key, Held]]:
        """What has handles that must be refused: the run in which they were superseded still knows."""
        return [each for each in self.unfinished() if len(each[2].handles) > 1 and each[2].run == self.model.run]

    def handed_out(self) -> list[tuple[str, Key, Held]]:
        """What has a handle."""
        return [
            (group, key, held)
            for group, messages in self.model.held.items()
            for key, held in messages.items()
            if held.handles
        ]

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def counters_agree(self) -> None:
        """What waits, in total and by minute, as the screens show it."""
        store, topics = self.rig.store, self.rig.broker.names.topics
        pending = store.pending()
        for topic in TOPICS:
            scope = topics[topic].topic_id
            due = {each.until_ms: each.count for each in store.due_counts(scope, 0, 2**50)}
            assert due == self.model.due_counts(topic, BUCKET_MS)
            assert pending.get(scope, 0) == sum(due.values())
        assert self.rig.broker.lease_count == len(self.leases())

    def teardown(self) -> None:
        try:
            if hasattr(self.rig, "broker"):
                self.drain()
                told, true = Counter(read_facts(self.rig.broker)), Counter(self.model.facts)
                assert told == true, f"only in the trail: {told - true}; not in the trail: {true - told}"
                assert not self.strays
                assert min(self.rig.late_ms, default=0) >= 0
                self.run(self.rig.close())
        finally:
            self.loop.close()
            self.folder.cleanup()

    def drain(self) -> None:
        """Receive and acknowledge everything, whatever is still to come; then nothing is left."""
        last_ms = max(
            [self.clock.now_ms(), *self.model.waiting.values()]
            + [held.hidden_until_ms or 0 for _, _, held in self.handed_out()]
        )
        self.clock.advance(last_ms - self.clock.now_ms())
        self.settle()
        assert not self.model.waiting
        for group in GROUPS:
            for topic in TOPICS:
                while self.model.available(group, topic):
                    self.receive(group, topic, 1_000, 1_000_000)
                    handles = [
                        (key, held.handles[-1])
                        for key, held in self.model.held[group].items()
                        if key[0] == topic and held.hidden_until_ms is not None
                    ]
                    results = self.run(self.rig.broker.ack(group, topic, [handle for _, handle in handles]))
                    assert list(results) == [None] * len(handles)
                    for key, _ in handles:
                        self.model.finish(group, key)
                assert not self.run(receive(self.rig, group=group, topic=topic))


class MemoryMachine(BrokerMachine):
    """On the engine in memory, where power can fail and writes can."""

    on_disk = False
    ends = (End.CLOSE, End.KILL, End.POWER_LOSS)

    def fail(self, *, at_sync: bool) -> None:
        """Let the next commit fail: before anything is written, or between the write and the sync."""
        engine = self.rig.memory
        engine.fail_next_write, engine.fail_next_sync = not at_sync, at_sync

    @rule(batch=sends, at_sync=st.booleans(), end=st.sampled_from((End.KILL, End.POWER_LOSS)))
    def die_while_sending(self, batch: list[tuple[str, int, int]], end: End, *, at_sync: bool) -> None:
        """The send is in doubt; what was written and survives is there, all of it, else none of it."""
        now_ms = self.clock.now_ms()
        envelopes = [
            an_envelope(f"m-{number}", topic=topic, deliver_at_ms=now_ms + delay) for topic, number, delay in batch
        ]
        self.fail(at_sync=at_sync)
        with pytest.raises(BrokerUnavailable):
            self.run(self.rig.broker.send(envelopes))
        if at_sync and end is End.KILL:
            for envelope in envelopes:
                self.model.send((envelope.topic, envelope.message_id), envelope.deliver_at_ms, now_ms)
        self.begin_again(end)

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, at_sync=st.booleans(), end=st.sampled_from((End.KILL, End.POWER_LOSS)))
    def die_while_acknowledging(self, pick: int, end: End, *, at_sync: bool) -> None:
        """The same for an ack."""
        group, key, held = self.unfinished()[pick % len(self.unfinished())]
        self.fail(at_sync=at_sync)
        with pytest.raises(BrokerUnavailable):
            self.run(self.rig.broker.ack(group, key[0], [held.handles[-1]]))
        if at_sync and end is End.KILL:
            self.model.finish(group, key)
        self.begin_again(end)

    @precondition(lambda self: self.model.waiting)
    @rule(ms=steps, at_sync=st.booleans(), end=st.sampled_from((End.KILL, End.POWER_LOSS)))
    def die_while_handing_over(self, ms: int, end: End, *, at_sync: bool) -> None:
        """A crash between two turns, or in the middle of one, neither loses nor repeats a message."""
        first_ms = min(self.model.waiting.values())
        self.clock.advance(max(0, first_ms - self.clock.now_ms()) + ms)
        self.fail(at_sync=at_sync)
        with pytest.raises(StoreFailed):
            self.rig.scheduler.turn()
        if at_sync and end is End.KILL:
            self.model.hand_over(self.clock.now_ms())
        self.begin_again(end)

    @precondition(lambda self: self.leases())
    @rule(pick=picks, at_sync=st.booleans(), end=st.sampled_from((End.KILL, End.POWER_LOSS)))
    def die_while_a_lease_ends(self, pick: int, end: End, *, at_sync: bool) -> None:
        """An attempt is counted once or not at all."""
        _, _, held = self.leases()[pick % len(self.leases())]
        assert held.hidden_until_ms is not None
        self.clock.advance(max(0, held.hidden_until_ms - self.clock.now_ms()))
        self.fail(at_sync=at_sync)
        with pytest.raises(StoreFailed):
            self.run(self.rig.broker.leases.expire())
        if at_sync and end is End.KILL:
            self.model.expire(self.clock.now_ms())
        self.begin_again(end)


class RocksMachine(BrokerMachine):
    """On RocksDB; a kill is a copy of the directory of a store that was never closed."""

    on_disk = True
    ends = (End.CLOSE, End.KILL)


_PACE = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TestOnMemory = MemoryMachine.TestCase
TestOnMemory.settings = settings(_PACE, max_examples=200 * EFFORT)
TestOnRocksDB = RocksMachine.TestCase
TestOnRocksDB.settings = settings(_PACE, max_examples=30 * EFFORT)
