"""The strategies on examples that can be followed by eye; a test on RocketMQ compares them with the Java client's."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.allocation import (
    Averagely,
    AveragelyByCircle,
    Configured,
    ConsistentHash,
    MachineRoom,
    MachineRoomNearby,
    Strategy,
)

EIGHT = [MessageQueue("orders", "a", number) for number in range(8)]
ROOMS = sorted(
    MessageQueue("orders", broker, number) for broker in ("east@a", "west@b", "plain") for number in range(3)
)


def shares(strategy: Strategy, clients: list[str], queues: list[MessageQueue]) -> list[list[int]]:
    """The places of each client's queues."""
    return [[queues.index(queue) for queue in strategy("workers", client, queues, clients)] for client in clients]


def room_of(name: str) -> str:
    return name.partition("@")[0] if "@" in name else ""


def nearby(inner: Strategy) -> MachineRoomNearby:
    return MachineRoomNearby(inner=inner, room_of_queue=lambda queue: room_of(queue.broker), room_of_client=room_of)


def test_eight_queues_and_three_members() -> None:
    """3/3/2, as neighbours or in turn."""
    assert shares(Averagely(), ["x", "y", "z"], EIGHT) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert shares(AveragelyByCircle(), ["x", "y", "z"], EIGHT) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_late_consumer_gets_no_queue() -> None:
    """More members than queues."""
    assert shares(Averagely(), ["w", "x", "y"], EIGHT[:2]) == [[0], [1], []]
    assert shares(AveragelyByCircle(), ["w", "x", "y"], EIGHT[:2]) == [[0], [1], []]


def test_machine_room_takes_only_the_rooms_it_was_given() -> None:
    """Brokers elsewhere, or with no room in their name, are nobody's; what is left over goes to the first members."""
    order = [queue.broker for queue in ROOMS]
    assert order == ["east@a"] * 3 + ["plain"] * 3 + ["west@b"] * 3
    assert shares(MachineRoom(frozenset({"east"})), ["x", "y"], ROOMS) == [[0, 2], [1]]
    assert shares(MachineRoom(frozenset({"west", "east"})), ["x", "y", "z"], ROOMS) == [[0, 1], [2, 6], [7, 8]]
    assert shares(MachineRoom(frozenset()), ["x"], ROOMS) == [[]]


def test_nearby_keeps_a_room_to_its_members_and_shares_one_without() -> None:
    """Each room is divided by the inner strategy."""
    queues = [queue for queue in ROOMS if "@" in queue.broker]
    assert shares(nearby(Averagely()), ["east@x", "west@y"], queues) == [[0, 1, 2], [3, 4, 5]]
    assert shares(nearby(Averagely()), ["east@x", "east@y"], queues) == [[0, 1, 3, 4], [2, 5]]
    assert shares(nearby(Averagely()), ["north@y"], queues) == [[0, 1, 2, 3, 4, 5]]


def test_nearby_names_the_parts_without_room() -> None:
    """A queue or a client without one."""
    with pytest.raises(ValueError, match=r"unknown machine room of .*plain"):
        nearby(Averagely())("workers", "east@x", ROOMS, ["east@x"])
    with pytest.raises(ValueError, match="unknown machine room of lost"):
        nearby(Averagely())("workers", "east@x", ROOMS[:3], ["east@x", "lost"])


def test_a_consistent_hash_moves_little() -> None:
    """A member that leaves gives its queues to others, and nobody else's move."""
    queues = [MessageQueue("orders", "a", number) for number in range(64)]
    before = shares(ConsistentHash(), ["x", "y", "z"], queues)
    after = shares(ConsistentHash(), ["x", "z"], queues)
    assert min(map(len, before)) > 0
    assert set(before[0]) <= set(after[0])
    assert set(before[2]) <= set(after[1])


def test_a_configured_list_is_everybodys() -> None:
    """As in RocketMQ: also of a client that is no member."""
    strategy = Configured(tuple(EIGHT[:2]))
    assert strategy("workers", "x", EIGHT, ["y"]) == tuple(EIGHT[:2])


@pytest.mark.parametrize(
    "strategy",
    [Averagely(), AveragelyByCircle(), MachineRoom(frozenset({"east"})), nearby(Averagely()), ConsistentHash()],
)
def test_only_members_get_queues(strategy: Strategy) -> None:
    """A client that the broker does not name, and a group of nobody."""
    queues = ROOMS[:3]
    assert list(strategy("workers", "east@x", queues, ["east@y"])) == []
    assert list(strategy("workers", "east@x", queues, [])) == []
    assert list(strategy("workers", "east@x", [], ["east@x"])) == []


def test_names_are_those_of_rocketmq() -> None:
    """Source: the ``getName`` of each class of rocketmq-client 5.5.0."""
    assert Averagely().name == "AVG"
    assert AveragelyByCircle().name == "AVG_BY_CIRCLE"
    assert MachineRoom(frozenset()).name == "MACHINE_ROOM"
    assert nearby(Averagely()).name == "MACHINE_ROOM_NEARBY-AVG"
    assert ConsistentHash().name == "CONSISTENT_HASH"
    assert Configured(()).name == "CONFIG"
