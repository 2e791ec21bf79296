"""Pauses, rates, recalls, ends of runs and steps of the clock in any order: whatever waits comes once, or was recalled.

Beside that: nothing comes early or while its topic is paused, the oldest of a topic comes first, and what the store
counts is what lies there.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.effort import EFFORT
from support.rigs.broker.scheduler_cell import Cell

from broker_adapter.contracts.message import Envelope, pack_id, unpack_id
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.topics.settings import FlowChange
from dmq.scheduler import scheduler as scheduler_module
from dmq.scheduler.scheduler import FLOOD_ROWS
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family, is_held_key, pack_queue_key
from dmq.store.schema.messages.index import EntryState
from dmq.store.schema.messages.record import QueuedMessage, decode_queued, waiting_topic_id
from dmq.store.writer.operations import Withdraw

pytestmark = pytest.mark.property
TOPICS = ("orders", "mails", "others")
_topics = st.sampled_from(TOPICS)
_MANY = FLOOD_ROWS + 1  # more than a turn takes of one scope from what falls due now


def log(cell: Cell, topic: str) -> list[QueuedMessage]:
    """What lies in the queue of a topic."""
    topic_id = cell.names.topics[topic].topic_id
    start, stop = pack_queue_key(topic_id, 0, 0), pack_queue_key(topic_id, 1, 0)
    return [decode_queued(value) for _, value in cell.store.scan(Family.QUEUE, start, stop, limit=100_000).rows]


class Pauses(RuleBasedStateMachine):
    """Three topics on a store in memory, and what should become of their messages."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.cell = Cell(MemoryEngine(), self.clock)
        self.due: dict[str, int] = {}  # all that was accepted and not recalled
        self.topic_of: dict[str, str] = {}
        self.sent = 0
        self.came: dict[str, int] = dict.fromkeys(TOPICS, 0)  # how many were looked at

    @initialize()
    def begin(self) -> None:
        for topic in TOPICS:
            self.cell.topic_of(topic)

    def teardown(self) -> None:
        """Let everything go, and compare."""
        for topic in TOPICS:
            self.change(topic, FlowChange(is_paused=False, deliver_rate=0))
        for _ in range(2_000):
            if not self.cell.store.pending():
                break
            self.clock.advance(500)
            self.turn()
        assert not self.cell.store.pending()
        assert not self.cell.store.held()
        assert Counter(each for topic in TOPICS for each in self.ids(topic)) == Counter(list(self.due))
        assert not self.cell.failures
        self.cell.close()

    def ids(self, topic: str) -> list[str]:
        return [unpack_id(each.message_id) for each in log(self.cell, topic)]

    def change(self, name: str, change: FlowChange) -> None:
        names = self.cell.names
        topic = change.applied_to(names.topics[name], self.clock.now_ms())
        self.cell.store.commit(names.plan_change(topic, change.said()))
        names.add_topic(topic)

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(topic=_topics, after_ms=st.integers(1, 3_000), count=st.sampled_from((1, 1, 3, _MANY)))
    def send(self, topic: str, after_ms: int, count: int) -> None:
        """Some messages that are due at the same time."""
        ops = []
        for _ in range(count):
            message_id, at_ms = f"{topic}-{self.sent}", self.clock.now_ms() + after_ms
            self.sent += 1
            envelope = Envelope(topic, message_id, b"", deliver_at_ms=at_ms)
            ops.append(self.cell.placement.accept(self.cell.names.topics[topic], envelope, self.clock.now_ms()))
            self.due[message_id], self.topic_of[message_id] = at_ms, topic
        self.cell.store.commit(ops)

    @rule(topic=_topics, is_paused=st.booleans())
    def pause(self, topic: str, is_paused: bool) -> None:
        """Or resume."""
        self.change(topic, FlowChange(is_paused=is_paused))

    @rule(topic=_topics, rate=st.sampled_from((0, 1, 20, 500)))
    def slow(self, topic: str, rate: int) -> None:
        """Or let it go as it likes."""
        self.change(topic, FlowChange(deliver_rate=rate))

    @rule(ms=st.sampled_from((1, 30, 300, 2_000)))
    def pass_time(self, ms: int) -> None:
        """A turn at its end, as a scheduler that is awake takes it."""
        self.clock.advance(ms)
        self.turn()

    @rule()
    def turn(self) -> None:
        """One turn, and a look at what came by it."""
        before = {topic: self.cell.names.topics[topic] for topic in TOPICS}
        self.cell.scheduler.turn()
        now_ms = self.clock.now_ms()
        for topic in TOPICS:
            found = log(self.cell, topic)
            new = found[self.came[topic] :]
            self.came[topic] = len(found)
            assert all(each.deliver_at_ms <= now_ms for each in new)
            assert not (new and before[topic].paused_since_ms is not None)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        """What waits is gone from then on; what does not has been delivered."""
        message_id = data.draw(st.sampled_from(sorted(self.due)[-50:]))
        store, topic = self.cell.store, self.cell.names.topics[self.topic_of[message_id]]
        found = store.find(topic.topic_id, pack_id(message_id))
        if found is None or found.state is not EntryState.WAITING:
            return
        (value,) = store.get_many(Family.TIMELINE, [found.key])
        size = len(value or b"")
        op = Withdraw(found.key, topic.topic_id, pack_id(message_id), self.due[message_id], size, is_remembered=True)
        (told,) = store.commit([op])
        assert told.state is EntryState.WITHDRAWN
        del self.due[message_id]

    @rule(is_power_loss=st.booleans(), down_ms=st.sampled_from((0, 0, 5_000)))
    def end(self, is_power_loss: bool, down_ms: int) -> None:
        """The run ends; all that was answered is synced."""
        engine = self.cell.engine.copied() if is_power_loss else self.cell.engine.reopened()
        self.cell.close()
        self.clock.advance(down_ms)
        self.cell = Cell(engine, self.clock)

    @rule(by_ms=st.sampled_from((-4_000, -50, 50)))
    def step(self, by_ms: int) -> None:
        """The wall clock is set."""
        self.clock.step_to(self.clock.now_ms() + by_ms)

    @invariant()
    def the_figures_are_right(self) -> None:
        """What is held is counted as that, and all that waits as waiting."""
        store = self.cell.store
        rows = store.scan(Family.TIMELINE, b"", b"\xff" * 16, limit=100_000).rows
        topics = [waiting_topic_id(value) for _, value in rows]
        assert store.held() == Counter(each for each, (key, _) in zip(topics, rows, strict=True) if is_held_key(key))
        assert store.pending() == Counter(topics)


TestPauses = Pauses.TestCase
TestPauses.settings = settings(max_examples=20 * EFFORT, stateful_step_count=30)


class Slowed(RuleBasedStateMachine):
    """One topic with a rate from the beginning, beside one that floods: what comes is in the order of its times."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.cell = Cell(MemoryEngine(), self.clock)
        self.cell.topic_of("others")
        topic = FlowChange(deliver_rate=300).applied_to(self.cell.topic, 0)
        self.cell.store.commit(self.cell.names.plan_change(topic))
        self.cell.names.add_topic(topic)

    @rule(after_ms=st.lists(st.integers(1, 2_000), min_size=1, max_size=20), many=st.booleans())
    def send(self, after_ms: list[int], many: bool) -> None:
        """Messages of the topic; or so many, due at once, that they are a flood."""
        times = after_ms[:1] * _MANY if many else after_ms
        self.cell.schedule(*(self.clock.now_ms() + each for each in times))

    @rule(after_ms=st.integers(1, 2_000))
    def flood(self, after_ms: int) -> None:
        """Of the other topic."""
        at_ms = self.clock.now_ms() + after_ms
        topic = self.cell.names.topics["others"]
        envelopes = [Envelope("others", f"{at_ms}-{number}", b"", deliver_at_ms=at_ms) for number in range(_MANY)]
        self.cell.store.commit([self.cell.placement.accept(topic, each, 0) for each in envelopes])

    @rule(ms=st.sampled_from((0, 1, 20, 100, 1_500)), turns=st.integers(1, 5))
    def pass_time(self, ms: int, turns: int) -> None:
        """Turns at its end."""
        self.clock.advance(ms)
        for _ in range(turns):
            self.cell.scheduler.turn()

    @rule()
    def end(self) -> None:
        """The run is killed and the next one begins."""
        engine = self.cell.engine.reopened()
        self.cell.close()
        self.cell = Cell(engine, self.clock)

    @invariant()
    def the_oldest_comes_first(self) -> None:
        """Whatever the backlog is."""
        times = [each.deliver_at_ms for each in log(self.cell, "orders")]
        assert times == sorted(times)

    def teardown(self) -> None:
        """End."""
        assert not self.cell.failures
        self.cell.close()


TestSlowed = Slowed.TestCase
TestSlowed.settings = settings(max_examples=12 * EFFORT, stateful_step_count=20)


class BesideFloods(Slowed):
    """The same beside floods that no turn reads through: each comes once, none early, at no more than the rate."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler_module, "ROWS_PER_CURSOR_MAX", _MANY)
        self.patch.setattr(scheduler_module, "READS_PER_TURN_MAX", 1)
        super().__init__()
        self.floods: set[int] = set()
        self.made = 0
        self.came: list[int] = []  # of each message, when it was seen first

    @rule(after_ms=st.integers(1, 2_000))
    def flood(self, after_ms: int) -> None:
        """Of the other topic, three turns long."""
        at_ms = self.clock.now_ms() + after_ms
        self.floods.add(at_ms)
        topic, names = self.cell.names.topics["others"], range(self.made, self.made + 3 * _MANY)
        self.made = names.stop
        envelopes = [Envelope("others", f"flood {name}", b"", deliver_at_ms=at_ms) for name in names]
        self.cell.store.commit([self.cell.placement.accept(topic, each, 0) for each in envelopes])

    @invariant()
    def the_oldest_comes_first(self) -> None:
        """But for what lies in a flood, which comes when it is found; and never faster than the rate, or early."""
        now_ms = self.clock.now_ms()
        times = [each.deliver_at_ms for each in log(self.cell, "orders")]
        self.came += [now_ms] * (len(times) - len(self.came))
        assert all(due_ms <= came_ms for due_ms, came_ms in zip(times, self.came, strict=True))
        ends = [(came_ms, number) for number, came_ms in enumerate(self.came)]
        assert all(
            self.came[number + 400] - came_ms >= 1_000 for came_ms, number in ends if number + 400 < len(self.came)
        )
        others = [due_ms for due_ms in times if not any(0 <= due_ms - at_ms <= 2_000 for at_ms in self.floods)]
        assert others == sorted(others)

    def teardown(self) -> None:
        """Let all of it go: each message came once."""
        for _ in range(3_000):
            if not self.cell.store.pending():
                break
            self.clock.advance(50)
            self.cell.scheduler.turn()
        ids = [each.message_id for topic in ("orders", "others") for each in log(self.cell, topic)]
        assert len(ids) == len(set(ids))
        assert not self.cell.store.pending()
        assert not self.cell.store.held()
        assert sum(each.startswith(b"\0flood") for each in ids) == self.made
        super().teardown()
        self.patch.undo()


TestBesideFloods = BesideFloods.TestCase
TestBesideFloods.settings = settings(max_examples=12 * EFFORT, stateful_step_count=20)
