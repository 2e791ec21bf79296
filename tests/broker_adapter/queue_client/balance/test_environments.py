"""Environments keep to their own queues of a shared topic, on both sides."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import retry_topic
from broker_adapter.queue_client.balance.allocation import Averagely
from broker_adapter.queue_client.balance.environments import (
    Environments,
    OwnEnvironment,
    TooFewQueues,
    UnknownEnvironment,
)

THREE = Environments(names=("dev1", "dev2", "dev3"))
BY_TWO = Environments(names=("dev1", "dev2"), queues_each=2)
OWN = OwnEnvironment(environments=BY_TWO, inner=Averagely())


def queues_of(topic: str, **counts: int) -> list[MessageQueue]:
    """So many queues at each broker."""
    return [MessageQueue(topic, broker, number) for broker, count in sorted(counts.items()) for number in range(count)]


def test_a_producer_has_the_queues_of_its_environment() -> None:
    """One by default, at each broker; queues behind the last environment's are nobody's."""
    queues = queues_of("orders", a=4, b=3)
    assert THREE.queues_of("dev2", queues) == [MessageQueue("orders", "a", 1), MessageQueue("orders", "b", 1)]
    assert [queue.queue_id for queue in BY_TWO.queues_of("dev2", queues_of("orders", a=8))] == [2, 3]


def test_a_broker_that_goes_moves_no_border() -> None:
    """The number of a queue decides, not its place among all."""
    there = set(THREE.queues_of("dev3", queues_of("orders", a=4, b=4)))
    assert set(THREE.queues_of("dev3", queues_of("orders", b=4))) < there


def test_members_divide_the_queues_of_their_environment() -> None:
    """Members of others do not count."""
    queues = queues_of("orders", a=4)
    clients = ["1@x@dev1", "2@x@dev1", "3@x@dev2", "4@x"]
    shares = [[queue.queue_id for queue in OWN("workers", client, queues, clients)] for client in clients[:3]]
    assert shares == [[0], [1], [2, 3]]


def test_queues_of_an_environment_without_members_wait() -> None:
    """They are nobody's."""
    clients = ["1@x@dev1"]
    assert [queue.queue_id for queue in OWN("workers", clients[0], queues_of("orders", a=4), clients)] == [0, 1]


def test_a_retry_topic_is_shared_by_all() -> None:
    """It has one queue, whoever fails."""
    queues = queues_of(retry_topic("workers"), a=1, b=1)
    clients = ["1@x@dev1", "3@x@dev2"]
    assert [list(OWN("workers", client, queues, clients)) for client in clients] == [queues[:1], queues[1:]]


def test_a_topic_with_too_few_queues_is_refused_on_both_sides() -> None:
    """At any of its brokers; the error says what to do."""
    queues = queues_of("orders", a=4, b=3)
    with pytest.raises(TooFewQueues, match="topic 'orders' has 3 queues at broker 'b', and its environments need 4"):
        BY_TWO.queues_of("dev1", queues)
    with pytest.raises(TooFewQueues) as caught:
        OWN("workers", "1@x@dev1", queues, ["1@x@dev1"])
    error = caught.value
    assert (error.topic, error.broker, error.queues, error.needed) == ("orders", "b", 3, 4)


def test_a_consumer_without_an_environment_is_reported() -> None:
    """A producer, and a consumer by its client id; a name alone is no client id with an environment."""
    with pytest.raises(UnknownEnvironment, match="'dev9' names no environment; those there are: dev1, dev2, dev3"):
        THREE.queues_of("dev9", queues_of("orders", a=4))
    for client_id in ("1@x", "1@x@dev9", "dev1", ""):
        assert BY_TWO.of_client(client_id) is None
        with pytest.raises(UnknownEnvironment, match="names no environment"):
            OWN("workers", client_id, queues_of("orders", a=4), [client_id])


@pytest.mark.parametrize(
    ("names", "queues_each"), [((), 1), (("a", "a"), 1), (("a", ""), 1), (("a", "b@c"), 1), (("a",), 0)]
)
def test_lists_that_cannot_be_are_refused(names: tuple[str, ...], queues_each: int) -> None:
    """Before anything goes to a wrong queue."""
    with pytest.raises(ValueError, match="environment"):
        Environments(names=names, queues_each=queues_each)
