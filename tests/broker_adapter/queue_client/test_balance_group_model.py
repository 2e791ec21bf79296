"""A whole group on a simulated broker: members join, leave, are killed, and hear late of each other.

Each member divides the queues by what it last heard, so for a while a queue has two owners or none. Whatever happens in
whichever order: a committed offset passes nothing that nobody consumed; orderly, no two members are in one queue at
once; and once all have heard of each other, every message was consumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.allocation import Averagely, AveragelyByCircle, ConsistentHash, Strategy
from broker_adapter.queue_client.balance.queue_locks import BELIEVED_MS, BROKER_LEASE_MS, LockQuestion, QueueLocks
from broker_adapter.queue_client.balance.rebalance import changes
from broker_adapter.queue_client.balance.window import Window

pytestmark = pytest.mark.property
QUEUES = sorted(MessageQueue("orders", broker, number) for broker in "ab" for number in range(2))[:3]
MEMBERS_MAX = 3
BATCH_MS_MAX = BROKER_LEASE_MS - BELIEVED_MS  # how long a batch may take for locks to hold
STEPS_MS = (1, 10_000, 20_000, 29_999, 30_000, 30_001, 60_001, 130_000)


class Item(NamedTuple):
    """A message, as far as a window cares."""

    queue_offset: int
    size_bytes: int = 1


class Batch(NamedTuple):
    """What one member is consuming of one queue."""

    queue: MessageQueue
    window: Window[Item]
    items: Sequence[Item]
    began_at_ms: int


@dataclass
class Broker:
    """What is stored, who is there, who holds which queue, and, which no broker knows, what was consumed."""

    now_ms: int = 0
    ends: Counter[MessageQueue] = field(default_factory=Counter)
    committed: Counter[MessageQueue] = field(default_factory=Counter)
    consumed: defaultdict[MessageQueue, set[int]] = field(default_factory=lambda: defaultdict(set))
    members: set[str] = field(default_factory=set)
    leases: dict[MessageQueue, tuple[str, int]] = field(default_factory=dict)

    def wanted(self, start: int, end: int) -> list[int]:
        """The offsets that the group's filter lets through."""
        return [offset for offset in range(start, end) if offset % 4 != 3]

    def commit(self, queue: MessageQueue, offset: int | None) -> None:
        """Take an offset as it comes, lower ones too; but what it passes was consumed."""
        if offset is not None:
            missed = set(self.wanted(0, offset)) - self.consumed[queue]
            assert not missed, f"{offset} is committed for {queue}, and nobody consumed {missed}"
            self.committed[queue] = offset

    def lock(self, client_id: str, queues: Collection[MessageQueue]) -> set[MessageQueue]:
        """Lease queues for 60 s; those of others, once that has passed."""
        given = set()
        for queue in queues:
            holder, since_ms = self.leases.get(queue, (client_id, self.now_ms))
            if holder == client_id or self.now_ms - since_ms > BROKER_LEASE_MS:
                self.leases[queue] = (client_id, self.now_ms)
                given.add(queue)
        return given

    def unlock(self, client_id: str, queue: MessageQueue) -> None:
        """Give a lease back, if it is the client's."""
        if self.leases.get(queue, ("", 0))[0] == client_id:
            del self.leases[queue]


class Member:
    """A consumer: it decides by what it heard last."""

    def __init__(self, client_id: str, broker: Broker, strategy: Strategy, *, is_orderly: bool) -> None:
        self.client_id, self.broker, self.strategy, self.is_orderly = client_id, broker, strategy, is_orderly
        self.view: list[str] = []
        self.windows: dict[MessageQueue, Window[Item]] = {}
        self.batches: list[Batch] = []
        self.locks = QueueLocks()
        self.answers: list[tuple[LockQuestion, set[MessageQueue]]] = []
        broker.members.add(client_id)

    def look(self) -> None:
        self.view = sorted(self.broker.members)

    def forget(self) -> None:
        self.view = []

    def rebalance(self) -> None:
        held = {queue: window.pulled_at_ms for queue, window in self.windows.items()}
        now_ms = self.broker.now_ms
        change = changes(held, self.strategy("workers", self.client_id, QUEUES, self.view), now_ms)
        for queue in change.dropped:
            if not (self.is_orderly and self.is_in(queue)):  # else it goes the next time
                self.drop(queue)
        wanted = [queue for queue in change.added if queue not in self.windows]
        if self.is_orderly:
            self.ask([queue for queue in wanted if not self.locks.may_consume(queue, now_ms)])
            wanted = [queue for queue in wanted if self.locks.may_consume(queue, now_ms)]
        self.windows |= {queue: Window[Item](self.broker.committed[queue], now_ms) for queue in wanted}

    def drop(self, queue: MessageQueue) -> None:
        window = self.windows.pop(queue)
        self.broker.commit(queue, window.commit_offset)
        window.drop()
        if self.is_orderly:
            self.locks.forget(queue)
            self.broker.unlock(self.client_id, queue)

    def ask(self, queues: Collection[MessageQueue]) -> None:
        """The broker answers at once, and the answer comes later."""
        question = self.locks.ask(queues, self.broker.now_ms)
        self.answers.append((question, self.broker.lock(self.client_id, queues)))

    def renew(self) -> None:
        self.ask([*self.windows])

    def hear(self, pick: int) -> None:
        if self.answers:
            self.locks.answered(*self.answers.pop(pick % len(self.answers)))

    def pull(self, pick: int, count: int = 3) -> None:
        if self.windows:
            queue = sorted(self.windows)[pick % len(self.windows)]
            window = self.windows[queue]
            end = min(window.next_offset + count, self.broker.ends[queue])
            items = [Item(offset) for offset in self.broker.wanted(window.next_offset, end)]
            window.put(items, end, self.broker.now_ms)

    def take(self, pick: int, count: int = 2) -> None:
        if self.windows:
            queue = sorted(self.windows)[pick % len(self.windows)]
            if self.is_orderly and (self.is_in(queue) or not self.locks.may_consume(queue, self.broker.now_ms)):
                return
            window = self.windows[queue]
            items = window.take(count, self.broker.now_ms)
            if items:
                self.batches.append(Batch(queue, window, items, self.broker.now_ms))

    def finish(self, pick: int, *, succeeds: bool = True) -> None:
        if not self.batches:
            return
        queue, window, items, _ = self.batches.pop(pick % len(self.batches))
        offsets = [item.queue_offset for item in items]
        if not succeeds:
            window.rollback(offsets)
            return
        self.broker.consumed[queue] |= set(offsets)
        if self.is_orderly:
            window.commit()
        else:
            window.remove(offsets)

    def persist(self) -> None:
        for queue, window in self.windows.items():
            self.broker.commit(queue, window.commit_offset)

    def work(self, count: int) -> None:
        """All that a member does in a while without trouble, but for hearing of others: batches begin."""
        self.rebalance()
        while self.answers:
            self.hear(0)
        self.rebalance()
        for pick in range(len(self.windows)):
            self.pull(pick)
            self.take(pick, count)

    def leave(self) -> None:
        while self.batches:
            self.finish(0)
        for queue in [*self.windows]:
            self.drop(queue)
        self.broker.members.discard(self.client_id)

    def is_in(self, queue: MessageQueue) -> bool:
        return any(batch.queue == queue for batch in self.batches)


class Group:
    """The members that live, and the broker, which believes in some that do not."""

    def __init__(self, strategy: Strategy, *, is_orderly: bool) -> None:
        self.strategy, self.is_orderly = strategy, is_orderly
        self.broker = Broker()
        self.alive: list[Member] = []
        self.joined = 0

    def step(self, kind: str, pick: int, more: int) -> None:
        """Let one thing happen: to the group, or to one member."""
        whole: dict[str, Callable[[], None]] = {
            "send": lambda: self.broker.ends.update({QUEUES[pick % len(QUEUES)]: more}),
            "join": self.join,
            "kill": lambda: self.kill(pick),
            "notice": self.notice,
            "wait": lambda: self.wait(STEPS_MS[more % len(STEPS_MS)]),
        }
        if kind in whole:
            whole[kind]()
        elif self.alive:
            member = self.alive[pick % len(self.alive)]
            if kind == "leave":
                self.alive.remove(member)
            one: dict[str, Callable[[], None]] = {
                "leave": member.leave,
                "look": member.look,
                "forget": member.forget,
                "rebalance": member.rebalance,
                "pull": lambda: member.pull(more),
                "take": lambda: member.take(more),
                "finish": lambda: member.finish(more),
                "fail": lambda: member.finish(more, succeeds=False),
                "persist": member.persist,
                "work": lambda: member.work(more),
                "renew": member.renew,
                "hear": lambda: member.hear(more),
            }
            one[kind]()
        self.check()

    def join(self) -> None:
        if len(self.alive) < MEMBERS_MAX:
            self.joined += 1
            member = Member(f"client-{self.joined}", self.broker, self.strategy, is_orderly=self.is_orderly)
            self.alive.append(member)

    def kill(self, pick: int) -> None:
        """Neither offsets nor locks are given back; what it is consuming is not consumed."""
        if self.alive:
            self.alive.pop(pick % len(self.alive))

    def notice(self) -> None:
        """The broker finds out who does not live any more."""
        self.broker.members = {member.client_id for member in self.alive}

    def wait(self, ms: int) -> None:
        """Time passes, and no batch takes longer than it may."""
        self.broker.now_ms += ms
        for member in self.alive:
            while any(batch.began_at_ms + BATCH_MS_MAX < self.broker.now_ms for batch in member.batches):
                member.finish(0)

    def check(self) -> None:
        """Orderly, nobody is in a queue that another one is in, nor twice."""
        if self.is_orderly:
            inside = Counter(batch.queue for member in self.alive for batch in member.batches)
            assert max(inside.values(), default=0) <= 1, inside

    def settle(self) -> None:
        """Let everybody hear of everybody, and consume what there is."""
        if not self.alive:
            self.join()
        self.notice()
        self.wait(BROKER_LEASE_MS + 1)
        for _ in range(3):  # drop, lock, begin
            for work in (Member.look, Member.rebalance):
                for member in self.alive:
                    work(member)
            self.listen()
        for _ in range(max(self.broker.ends.values(), default=0) + 1):
            for member in self.alive:
                member.renew()
            self.listen()
            for member in self.alive:
                for pick in range(len(QUEUES)):
                    member.pull(pick, 10)
                    member.take(pick, 10)
                    self.check()
                while member.batches:
                    member.finish(0)
                member.persist()

    def listen(self) -> None:
        """Every answer comes."""
        for member in self.alive:
            while member.answers:
                member.hear(0)


KINDS = (
    *(
        "send",
        "join",
        "leave",
        "kill",
        "notice",
        "wait",
        "wait",
        "wait",
        "look",
        "look",
        "rebalance",
        "work",
        "work",
        "work",
    ),
    *("pull", "take", "finish", "finish", "fail", "persist", "renew", "hear", "hear"),
)


def stories(kinds: Sequence[str], *, picks: int, more: int) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Histories of one group: what happens, to whom, and how much of it."""
    return st.lists(st.sampled_from([*product(kinds, range(picks), range(more))]), min_size=60, max_size=140)


@settings(max_examples=150 * EFFORT)
@given(
    strategy=st.sampled_from((Averagely(), AveragelyByCircle(), ConsistentHash())),
    is_orderly=st.booleans(),
    story=stories(KINDS, picks=MEMBERS_MAX, more=8),
)
def test_every_message_is_consumed_through_any_membership(
    strategy: Strategy, story: list[tuple[str, int, int]], *, is_orderly: bool
) -> None:
    """At least once; and in the end all is committed, and each queue has one owner."""
    group = Group(strategy, is_orderly=is_orderly)
    for number in range(len(QUEUES)):
        group.step("join", 0, 0)
        group.step("send", number, 20)
    for kind, pick, more in story:
        group.step(kind, pick, more)
    group.settle()
    broker = group.broker
    for queue in QUEUES:
        assert broker.consumed[queue] == set(broker.wanted(0, broker.ends[queue])), queue
        assert broker.committed[queue] == broker.ends[queue], queue
    assert sorted(queue for member in group.alive for queue in member.windows) == QUEUES


class Greedy:
    """Every member has all queues, as soon as it knows of itself: only locks stand between them."""

    name = "GREEDY"

    def __call__(
        self, _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        return queues if client_id in client_ids else ()


QUARREL = ("wait", "wait", "work", "work", "take", "renew", "hear", "look", "forget", "rebalance", "finish")


@settings(max_examples=250 * EFFORT)
@given(story=stories(QUARREL, picks=2, more=6))  # waits of up to 30 s: locks are believed often
def test_two_consumers_of_the_same_queues_are_never_in_one_at_once(story: list[tuple[str, int, int]]) -> None:
    """Locks that are believed for too long, or after they were given back, would let both in."""
    group = Group(Greedy(), is_orderly=True)
    for number in range(2):
        group.step("join", 0, 0)
        group.step("send", number, 100)
    for number in range(2):
        group.step("look", number, 0)
    for kind, pick, more in story:
        group.step(kind, pick, more)
