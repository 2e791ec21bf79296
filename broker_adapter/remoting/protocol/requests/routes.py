"""Routes of topics and addresses of brokers, decoded from the answers of a name server. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from broker_adapter.contracts.classic import Route
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.frames import FrameBroken
from broker_adapter.remoting.protocol.loose_json import decode_object, unreadable

MASTER = 0  # number of the broker that accepts writes; slaves have other numbers
READABLE, WRITABLE = 4, 2  # bits of perm
_QUEUES_MAX = 65_536  # of one topic at one broker


class Part(NamedTuple):
    """Part of a topic at one broker: the numbers of readable and writable queues, and the addresses of the broker."""

    broker: str
    readable: int
    writable: int
    addresses: Mapping[int, str]  # by number
    perm: int = READABLE | WRITABLE  # permission bits


class ClusterInfo(NamedTuple):
    """Brokers that a name server lists: their addresses by number, and their clusters."""

    addresses: Mapping[str, Mapping[int, str]]
    clusters: Mapping[str, tuple[str, ...]]


def decode_route(topic: str, body: bytes) -> tuple[Part, ...]:
    """Decode a name server's answer about a topic, sorted by broker name; ``FrameBroken`` for an invalid answer."""
    what = f"the route of {topic}"
    found = decode_object(body, what)
    try:
        addresses = {str(each["brokerName"]): _addresses(each["brokerAddrs"]) for each in found["brokerDatas"]}
        return tuple(sorted(_parts(found, addresses)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(what, error) from None


def route_of(topic: str, parts: tuple[Part, ...]) -> Route:
    """Return the queues of a topic. A queue without any address is not readable; without a master it is read-only."""
    read = ((part, part.readable if part.addresses else 0) for part in parts)
    written = ((part, part.writable if MASTER in part.addresses else 0) for part in parts)
    return Route(
        topic,
        tuple(MessageQueue(topic, part.broker, number) for part, count in read for number in range(count)),
        tuple(MessageQueue(topic, part.broker, number) for part, count in written for number in range(count)),
    )


def decode_cluster(body: bytes) -> ClusterInfo:
    """Decode a name server's answer about the cluster; ``FrameBroken`` for an invalid answer."""
    what = "the list of brokers"
    found = decode_object(body, what)
    try:
        brokers: dict[str, Any] = found["brokerAddrTable"]
        clusters: dict[str, Any] = found["clusterAddrTable"]
        return ClusterInfo(
            {name: _addresses(each["brokerAddrs"]) for name, each in sorted(brokers.items())},
            {name: tuple(sorted(map(str, each))) for name, each in sorted(clusters.items())},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(what, error) from None


def _parts(found: Mapping[str, Any], addresses: Mapping[str, Mapping[int, str]]) -> Iterator[Part]:
    for each in found["queueDatas"]:
        broker, perm = str(each["brokerName"]), int(each["perm"])
        counts = int(each["readQueueNums"]), int(each["writeQueueNums"])
        if not all(0 <= count <= _QUEUES_MAX for count in counts):
            raise FrameBroken(f"broker {broker} is reported with {counts[0]} and {counts[1]} queues of one topic")
        read, written = counts[0] if perm & READABLE else 0, counts[1] if perm & WRITABLE else 0
        yield Part(broker, read, written, addresses.get(broker, {}), perm)


def _addresses(found: Mapping[str, Any]) -> Mapping[int, str]:
    return {int(number): str(address) for number, address in sorted(found.items()) if address}
