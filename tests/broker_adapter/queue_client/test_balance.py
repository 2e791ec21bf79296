"""Whatever members and queues there are: each queue has one owner. Whatever is consumed when: no offset passes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.effort import EFFORT

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.allocation import (
    Averagely,
    AveragelyByCircle,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    Strategy,
)
from broker_adapter.queue_client.balance.environments import Environments, OwnEnvironment
from broker_adapter.queue_client.balance.rebalance import changes
from broker_adapter.queue_client.balance.window import Window

pytestmark = pytest.mark.property
ROOMS = ("east", "north", "west")
ENVIRONMENTS = Environments(names=ROOMS, queues_each=2)


def room_of(name: str) -> str:
    return name.partition("@")[0]


INNER: tuple[Strategy, ...] = (Averagely(), AveragelyByCircle(), ConsistentHash())
STRATEGIES: tuple[Strategy, ...] = (
    *INNER,
    MachineRoom(frozenset(ROOMS[:2])),
    *(
        MachineRoomNearby(inner=inner, room_of_queue=lambda queue: room_of(queue.broker), room_of_client=room_of)
        for inner in INNER
    ),
    *(OwnEnvironment(environments=ENVIRONMENTS, inner=inner) for inner in INNER),
)
brokers = st.dictionaries(
    st.builds("{}@{}".format, st.sampled_from(ROOMS), st.sampled_from("ab")), st.integers(6, 9), max_size=4
)
clients = st.sets(
    st.builds("{}@{}@{}".format, st.sampled_from(ROOMS), st.integers(1, 99), st.sampled_from(ROOMS)),
    min_size=1,
    max_size=9,
)


def owned(strategy: Strategy, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> set[MessageQueue]:
    """The queues that somebody has to have."""
    if isinstance(strategy, MachineRoom):
        return {queue for queue in queues if room_of(queue.broker) in strategy.rooms}
    if isinstance(strategy, OwnEnvironment):
        there = {ENVIRONMENTS.of_client(client_id) for client_id in client_ids}
        return {queue for name in there if name for queue in ENVIRONMENTS.queues_of(name, queues)}
    return set(queues)


@settings(max_examples=200 * EFFORT)
@given(strategy=st.sampled_from(STRATEGIES), counts=brokers, names=clients)
def test_once_views_agree_every_queue_has_exactly_one_owner(
    strategy: Strategy, counts: dict[str, int], names: set[str]
) -> None:
    """Complete and without overlap for every strategy; the same each time; and a rebalance gets everybody there."""
    queues = sorted(
        MessageQueue("orders", broker, number) for broker, count in counts.items() for number in range(count)
    )
    client_ids = sorted(names)
    shares = {client_id: strategy("workers", client_id, queues, client_ids) for client_id in client_ids}
    given_out = sorted(queue for share in shares.values() for queue in share)
    assert given_out == sorted(owned(strategy, queues, client_ids))
    for client_id, share in shares.items():
        assert list(strategy("workers", client_id, tuple(queues), tuple(client_ids))) == list(share)
        held = dict.fromkeys(queues[::2], 0)
        change = changes(held, share, 0)
        assert (held.keys() - set(change.dropped)) | set(change.added) == set(share)
        assert set(change.kept) == held.keys() & set(share)


class Item(NamedTuple):
    """A message, as far as a window cares."""

    queue_offset: int
    size_bytes: int


class WindowMachine(RuleBasedStateMachine):
    """One window, whatever is pulled, taken, removed, rolled back and dropped in whichever order."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window[Item](5, 0)
        self.came: dict[int, Item] = {}
        self.unconsumed: set[int] = set()
        self.taken: set[int] = set()
        self.committed = 5
        self.is_dropped = False

    @rule(back=st.integers(0, 3), gaps=st.lists(st.integers(1, 3), max_size=5), behind=st.integers(0, 3))
    def put(self, back: int, gaps: list[int], behind: int) -> None:
        """Messages with gaps between them, perhaps some that came before, perhaps an end that was passed over."""
        offset = self.window.next_offset - 1 - back
        items = []
        for gap in gaps:
            offset += gap
            items.append(Item(offset, 1 + offset % 7))
        new = {item.queue_offset: item for item in items if item.queue_offset >= self.window.next_offset}
        self.window.put(items, offset + behind, 0)
        self.came |= new
        self.unconsumed |= new.keys()

    @rule(batch_max=st.integers(0, 5))
    def take(self, batch_max: int) -> None:
        """The first ones that wait, and none that is taken or consumed."""
        waiting = [] if self.is_dropped else sorted(self.unconsumed - self.taken)
        batch = [item.queue_offset for item in self.window.take(batch_max, 0)]
        assert batch == waiting[:batch_max]
        self.taken |= set(batch)

    @rule(picks=st.sets(st.integers(0, 40)))
    def remove(self, picks: set[int]) -> None:
        """Any, taken or not, there or not."""
        self.unconsumed -= picks
        self.taken -= picks
        self.commit_as(self.window.remove(picks))

    @rule()
    def commit(self) -> None:
        """All that is taken."""
        self.unconsumed -= self.taken
        self.taken.clear()
        self.commit_as(self.window.commit())

    @rule(picks=st.none() | st.sets(st.integers(0, 40)))
    def rollback(self, picks: set[int] | None) -> None:
        """Some that are taken, or all."""
        self.window.rollback(picks)
        self.taken -= self.taken if picks is None else picks

    @rule(sure=st.integers(0, 9))
    def drop(self, sure: int) -> None:
        """Now and then."""
        if sure == 0:
            self.window.drop()
            self.is_dropped = True

    @invariant()
    def counts_agree(self) -> None:
        """Count, bytes and span are those of what is not consumed."""
        there = sorted(self.unconsumed)
        assert self.window.count == len(there)
        assert self.window.bytes == sum(self.came[offset].size_bytes for offset in there)
        assert self.window.span == (there[-1] - there[0] if there else 0)
        self.commit_as(self.window.commit_offset)

    def commit_as(self, offset: int | None) -> None:
        """It passes nothing that is not consumed, never goes back, and is as high as it may be."""
        assert (offset is None) == self.is_dropped
        if offset is not None:
            assert offset >= self.committed
            assert offset == min(self.unconsumed, default=self.window.next_offset)
            self.committed = offset


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=60 * EFFORT, stateful_step_count=30)
