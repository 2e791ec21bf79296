"""The embedded broker, its scheduler and its store against a small model, through clock steps, kills and power losses.

Each machine plays one history on one broker with its own event loop; the scheduler and the end of leases are driven by
hand, so a failure repeats. Consumers fail in every way there is, policies change, messages belong to message groups. At
the end everything is drained: each message of each group is acknowledged or in its dead-letter queue and never both,
and the audit trail holds exactly the facts the model has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from support.effort import EFFORT
from support.models.broker.draws import (
    FAILING,
    GROUPS,
    LAST_PAIRS,
    PAIRS,
    POLICIES,
    TOPICS,
    Sends,
    a_policy,
    picks,
    sends,
)
from support.models.broker.machine import BrokerRules
from support.models.broker.model import Policy
from support.models.broker.progress_check import assert_progress
from support.models.broker.trail import read_facts
from support.rigs.broker.rig import End, receive

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.topics import dead_letter_topic
from dmq.errors import StoreFailed
from dmq.store.schema.accounting.counts import BUCKET_MS

pytestmark = pytest.mark.property
crashes = st.sampled_from((End.KILL, End.POWER_LOSS))


class BrokerMachine(BrokerRules):
    """One history: runs end, what the screens show agrees, and at the end nothing is left and nothing was lost."""

    ends: ClassVar[tuple[End, ...]]

    @rule(pick=picks, down_ms=st.sampled_from((0, 0, 1_500, 61_000)))
    def restart(self, pick: int, down_ms: int) -> None:
        """The run ends, in order or not, at rest; time may pass before the next one begins."""
        self.begin_again(self.ends[pick % len(self.ends)], down_ms)

    def begin_again(self, end: End, down_ms: int = 0) -> None:
        """Restart on both sides."""
        self.run(self.rig.restart(end, down_ms=down_ms))
        self.model.restart(self.clock.now_ms())
        for group, topic in PAIRS:
            if any(key[0] == topic for key in self.model.held.get(group, {})):
                self.run(self.rig.broker.ack(group, topic, []))  # loads what the group knows of the topic
        self.settle()

    @invariant()
    def counters_agree(self) -> None:
        """What waits, in total and by minute, as the screens show it; for a topic, and as retries of a group."""
        store, names = self.rig.store, self.rig.broker.names
        pending = store.pending()
        scopes = {topic: names.topics[topic].topic_id for topic in TOPICS}
        scopes |= {group: names.groups[group].group_id for group in FAILING}
        for name, scope in scopes.items():
            due = {each.until_ms: each.count for each in store.due_counts(scope, 0, 2**50)}
            assert due == self.model.due_counts(name, BUCKET_MS)
            assert pending.get(scope, 0) == sum(due.values())
        assert self.rig.broker.lease_count == len(self.leases())
        assert_progress(self.rig.broker)
        self.rig.check_ledger(every=4)

    def teardown(self) -> None:
        """Receive everything; compare the trail with what the model says happened."""
        try:
            if hasattr(self.rig, "broker") and self.rig.store.failure is None:  # else a rule failed, which is told
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
        """Receive and acknowledge everything, whatever is still to come; then nothing is left, and nothing was lost."""
        self.hear_of_the_client(is_seen=False)  # or its leases would be renewed for hours
        self.clock.advance(max(0, *(time - self.clock.now_ms() for time in [*self.times(), 0])))
        self.settle()
        assert not self.times(), self.times()
        for group, topic in (*PAIRS, *LAST_PAIRS):
            for _ in range(100):  # a message group comes in many runs
                handed_out = self.take_all(group, topic)
                if not handed_out:
                    break
            assert not self.run(receive(self.rig, group=group, topic=topic))
        self.check_ends()

    def take_all(self, group: str, topic: str) -> int:
        """Receive what is there and acknowledge it; say how many were handed out or buried."""
        before = len(self.model.facts)
        self.take((group, topic), 1_000, 1_000_000)
        leased = [
            (key, held.handles[-1].text)
            for key, held in self.model.held[group].items()
            if key[0] == topic and held.hidden_until_ms is not None
        ]
        results = self.run(self.rig.broker.ack(group, topic, [handle for _, handle in leased]))
        assert list(results) == [None] * len(leased)
        for key, _ in leased:
            self.model.ack(group, key)
        return len(self.model.facts) - before

    def check_ends(self) -> None:
        """Each message of each group is acknowledged or in its dead-letter queue, exactly one of them."""
        for group, topic in (*PAIRS, *LAST_PAIRS):
            letters = dead_letter_topic(group)
            for key in self.model.queued:
                if key[0] == topic:
                    held = self.model.held[group][key]
                    assert held.is_acked != held.is_dead, (group, key)
                    assert held.is_dead == ((letters, key[1]) in self.model.letters)


class MemoryMachine(BrokerMachine):
    """On the engine in memory, where power can fail and writes can."""

    on_disk = False
    ends = (End.CLOSE, End.KILL, End.POWER_LOSS)

    def die(self, work: Coroutine[object, object, object], end: End, *, at_sync: bool) -> bool:
        """Let the commit of a call fail, before anything is written or between the write and the sync.

        Returns whether what was written survives ``end``: the call is in doubt, and it was done whole or not at all.
        """
        self.fail(at_sync=at_sync)
        with pytest.raises(BrokerUnavailable):
            self.run(work)
        return at_sync and end is End.KILL

    def fail(self, *, at_sync: bool) -> None:
        """Let the next commit fail."""
        engine = self.rig.memory
        engine.fail_next_write, engine.fail_next_sync = not at_sync, at_sync

    @rule(batch=sends, at_sync=st.booleans(), end=crashes)
    def die_while_sending(self, batch: Sends, end: End, *, at_sync: bool) -> None:
        """The send is in doubt; what was written and survives is there, all of it, else none of it."""
        now_ms = self.clock.now_ms()
        envelopes = self.envelopes(batch)
        if self.die(self.send_all(envelopes), end, at_sync=at_sync):
            for envelope in envelopes:
                self.model.send((envelope.topic, envelope.message_id), envelope.deliver_at_ms, now_ms)
        self.begin_again(end, down_ms=1)

    @precondition(lambda self: self.model.waiting.keys() & self.recall_handles.keys())
    @rule(pick=picks, at_sync=st.booleans(), end=crashes)
    def die_while_recalling(self, pick: int, end: End, *, at_sync: bool) -> None:
        """The message waits as before, or it is gone, and a repeated recall is told so."""
        found = sorted(self.model.waiting.keys() & self.recall_handles.keys())
        key, now_ms = found[pick % len(found)], self.clock.now_ms()
        work = self.rig.broker.recall(key[0], self.recall_handles[key])
        if self.die(work, end, at_sync=at_sync):
            self.model.recall(key, now_ms)
        self.begin_again(end)

    @precondition(lambda self: self.model.waiting.keys() & self.recall_handles.keys())
    @rule(pick=picks, ms=st.sampled_from((-1, 1, 1_500)), at_sync=st.booleans(), end=crashes)
    def die_while_rescheduling(self, pick: int, ms: int, end: End, *, at_sync: bool) -> None:
        """The message waits as before, or until its new time; never under both, never under none."""
        found = sorted(self.model.waiting.keys() & self.recall_handles.keys())
        key, now_ms = found[pick % len(found)], self.clock.now_ms()
        if self.die(self.rescheduling(key, now_ms + ms, by_handle=False), end, at_sync=at_sync):
            self.model.reschedule(key, now_ms + ms, now_ms)
        self.begin_again(end, down_ms=3)

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, at_sync=st.booleans(), end=crashes)
    def die_while_acknowledging(self, pick: int, end: End, *, at_sync: bool) -> None:
        """The message comes again, or never."""
        group, key, handle = self.one(pick)
        if self.die(self.rig.broker.ack(group, key[0], [handle]), end, at_sync=at_sync):
            self.model.ack(group, key)
        self.begin_again(end)

    @precondition(lambda self: self.unfinished(is_push=True))
    @rule(pick=picks, invisible_ms=st.sampled_from((0, 2_000)), at_sync=st.booleans(), end=crashes)
    def die_while_nacking(self, pick: int, invisible_ms: int, end: End, *, at_sync: bool) -> None:
        """The delivery is as it was, or its retry waits and its attempt is counted; on the last one it is dead."""
        group, key, handle = self.one(pick, is_push=True)
        work = self.rig.broker.change_invisible(group, key[0], handle, invisible_ms)
        if self.die(work, end, at_sync=at_sync):
            self.model.hide(group, key, self.clock.now_ms(), invisible_ms, suspend=False)
        self.begin_again(end)

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, at_sync=st.booleans(), end=crashes)
    def die_while_burying(self, pick: int, end: End, *, at_sync: bool) -> None:
        """The message comes again, or it is in the dead-letter queue, once."""
        group, key, handle = self.one(pick)
        if self.die(self.rig.broker.send_back(group, key[0], handle, -1), end, at_sync=at_sync):
            self.model.send_back(group, key, self.clock.now_ms(), -1)
        self.begin_again(end)

    @precondition(lambda self: self.unfinished())
    @rule(pick=picks, ms=st.sampled_from((0, 1_000)), suspend=st.booleans(), at_sync=st.booleans(), end=crashes)
    def die_while_hiding(self, pick: int, ms: int, end: End, *, suspend: bool, at_sync: bool) -> None:
        """A lease is as it was, or durable; given back, or not."""
        group, key, handle = self.one(pick)
        work = self.rig.broker.change_invisible(group, key[0], handle, ms, suspend=suspend)
        if self.die(work, end, at_sync=at_sync):
            self.model.hide(group, key, self.clock.now_ms(), ms, suspend=suspend)
        self.begin_again(end)

    @rule(group=st.sampled_from(GROUPS), policy=st.sampled_from(POLICIES), at_sync=st.booleans(), end=crashes)
    def die_while_setting_a_policy(self, group: str, policy: Policy, end: End, *, at_sync: bool) -> None:
        """The old one counts, or the new one."""
        if self.die(self.rig.broker.set_group(group, policy=a_policy(policy)), end, at_sync=at_sync):
            self.model.policies[group] = policy
        self.begin_again(end)

    @precondition(lambda self: self.due())
    @rule(pick=picks, ms=st.sampled_from((0, 0, 1, 5_000)), at_sync=st.booleans(), end=crashes)
    def die_while_handing_over(self, pick: int, ms: int, end: End, *, at_sync: bool) -> None:
        """A crash between two turns, or in the middle of one, neither loses nor repeats a message or a retry."""
        self.move_to(self.due(), pick, ms)
        self.fail(at_sync=at_sync)
        with pytest.raises(StoreFailed):
            self.rig.scheduler.turn()
        if at_sync and end is End.KILL:
            self.model.hand_over(self.clock.now_ms())
        self.begin_again(end)

    @precondition(lambda self: self.leases())
    @rule(pick=picks, ms=st.sampled_from((0, 0, 1, 5_000)), at_sync=st.booleans(), end=crashes)
    def die_while_a_lease_ends(self, pick: int, ms: int, end: End, *, at_sync: bool) -> None:
        """An attempt is counted once or not at all, and a message whose last one it was is dead once or not at all.

        Leases that end together may be written in more than one batch; which of them were, the trail says.
        """
        self.move_to([held.hidden_until_ms or 0 for held in self.leases()], pick, ms)
        expired = self.model.expired(self.clock.now_ms(), self.clock.monotonic_s())
        if expired:  # else it was renewed
            self.fail(at_sync=at_sync)
            with pytest.raises(StoreFailed):
                self.run(self.rig.broker.leases.expire())
        self.run(self.rig.restart(end))
        told = self.untold()
        assert bool(told) == (bool(expired) and at_sync and end is End.KILL)
        for group, key in expired:
            if any(fact.group == group and fact.key == key for fact in told):
                self.model.end_lease(group, key, self.clock.now_ms())
        assert not self.untold()
        self.begin_again(End.KILL)

    def move_to(self, times: list[int], pick: int, ms: int) -> None:
        """Let time pass until something will happen, and a little more; but let it not happen yet."""
        self.clock.advance(max(0, times[pick % len(times)] - self.clock.now_ms()) + ms)


class RocksMachine(BrokerMachine):
    """On RocksDB; a kill is a copy of the directory of a store that was never closed."""

    on_disk = True
    ends = (End.CLOSE, End.KILL)


_PACE = settings(stateful_step_count=40)

TestOnMemory = MemoryMachine.TestCase
TestOnMemory.settings = settings(_PACE, max_examples=40 * EFFORT)
TestOnRocksDB = RocksMachine.TestCase
TestOnRocksDB.settings = settings(_PACE, max_examples=15 * EFFORT)


def test_a_step_that_smaller_ones_hide_moves_nothing() -> None:
    """Several steps within a second are seen as what is left of them; below a second that is none, on both sides."""
    state = MemoryMachine()
    state.open()
    state.step(ms=1, is_forward=False)
    state.advance(1_001)
    state.send(batch=[("orders", 20, None)])
    state.step(ms=1, is_forward=True)
    state.consume(hows=["fail"], is_push=True, pair=("workers", "orders"), then_ms=1)
    state.step(ms=1, is_forward=True)
    state.step(ms=1_001, is_forward=False)
    state.counters_agree()
    state.step(ms=998, is_forward=True)
    state.counters_agree()
    state.teardown()


def test_an_entry_moved_to_the_readers_position_comes_a_millisecond_later() -> None:
    """A clock that was set back by one is not noticed; the reader was where a new time is, under a later number."""
    state = MemoryMachine()
    state.open()
    state.step(ms=1, is_forward=False)
    state.send(batch=[("orders", 14, 5_000), ("orders", 0, None), ("orders", 0, 1)])
    state.reschedule(ms=1, pick=0)
    state.counters_agree()
    state.advance(1)
    state.counters_agree()
    state.teardown()


def test_a_lease_is_renewed_after_a_standstill_and_ends_when_its_client_is_silent() -> None:
    """Standing still makes no client silent, on both sides; a minute in which the process runs does."""
    state = MemoryMachine()
    state.open()
    state.send(batch=[("orders", 20, None)])
    state.receive(pair=("workers", "orders"), batch_max=1, invisible_ms=30_000, is_push=True)
    state.stand_still(ms=600_000)
    state.counters_agree()
    assert state.leases()
    state.advance(61_000)
    state.counters_agree()
    assert not state.leases()
    state.teardown()
