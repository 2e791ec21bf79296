"""Which queues of a topic are whose: the strategies of RocketMQ's clients, with their results to the letter.

Every member of a group computes its own share alone, so members agree only because all of them see the same queues and
the same client ids, use the same strategy, and count in the same order. Members of other languages take part in it:
what decides is what ``org.apache.rocketmq.client.consumer.rebalance`` of RocketMQ 5.5 does (4.9 is the same).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from broker_adapter.contracts.message_queue import MessageQueue

_T = TypeVar("_T")
_VIRTUAL_NODES = 10  # RocketMQ 5.5 default


class Strategy(Protocol):
    """How the queues of one topic are divided among the members of a group."""

    @property
    def name(self) -> str:
        """What RocketMQ calls it; the same for all members of a group."""
        ...

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        """Return the share of ``client_id``. ``queues`` and ``client_ids`` are sorted, and name nothing twice.

        Whoever is not among ``client_ids`` gets nothing: brokers do not know it yet, and others do not count it.
        """
        ...


def _place(client_id: str, client_ids: Sequence[str]) -> int | None:
    return client_ids.index(client_id) if client_id in client_ids else None


class Averagely:
    """Neighbours stay together, and the first members get one more where it does not come out even. The default."""

    name = "AVG"

    def __call__(
        self, _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        place = _place(client_id, client_ids)
        if place is None:
            return ()
        each, left_over = divmod(len(queues), len(client_ids))
        start = place * each + min(place, left_over)
        return queues[start : start + each + (place < left_over)]


class AveragelyByCircle:
    """Members take one queue each in turn, so that every broker's queues are spread over many of them."""

    name = "AVG_BY_CIRCLE"

    def __call__(
        self, _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        place = _place(client_id, client_ids)
        return () if place is None else queues[place :: len(client_ids)]


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Only queues of brokers in these rooms, which the brokers' names say (``room@broker``); others are nobody's."""

    rooms: frozenset[str]
    name = "MACHINE_ROOM"

    def __call__(
        self, _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        place = _place(client_id, client_ids)
        if place is None:
            return ()
        here = [queue for queue in queues if _room(queue.broker) in self.rooms]
        each, left_over = divmod(len(here), len(client_ids))
        last = each * len(client_ids) + place
        return [*here[place * each : (place + 1) * each], *here[last : last + (place < left_over)]]


def _room(broker: str) -> str | None:
    """Java's ``split`` knows no empty words at the end: ``a@b@`` has a room, ``a@`` has none."""
    words = broker.rstrip("@").split("@")
    return words[0] if len(words) == 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRoomNearby:
    """Queues go to members in their own machine room; those of a room without members are shared by all.

    The two functions say where a queue and a client are. ``ValueError`` where one of them does not know.
    """

    inner: Strategy
    room_of_queue: Callable[[MessageQueue], str]
    room_of_client: Callable[[str], str]

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{self.inner.name}"

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        if client_id not in client_ids:
            return ()
        queues_in = _by_room(queues, self.room_of_queue)
        clients_in = _by_room(client_ids, self.room_of_client)
        home = self.room_of_client(client_id)
        share = [*self.inner(group, client_id, queues_in.pop(home, ()), clients_in[home])]
        for room in sorted(queues_in.keys() - clients_in.keys()):
            share += self.inner(group, client_id, queues_in[room], client_ids)
        return share


def _by_room(things: Sequence[_T], room_of: Callable[[_T], str]) -> dict[str, Sequence[_T]]:
    found: defaultdict[str, list[_T]] = defaultdict(list)
    for thing in things:
        room = room_of(thing)
        if not room:
            raise ValueError(f"no machine room is known of {thing}; every queue and every client needs one")
        found[room].append(thing)
    return dict(found)


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Members and queues have places on a ring, so that a member that comes or goes moves few queues of others."""

    virtual_nodes: int = _VIRTUAL_NODES
    name = "CONSISTENT_HASH"

    def __call__(
        self, _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        if client_id not in client_ids:
            return ()
        ring = {_hash(f"{each}-{node}"): each for each in client_ids for node in range(self.virtual_nodes)}
        places = sorted(ring)
        return [queue for queue in queues if ring[_next(places, _hash(_text(queue)))] == client_id]


def _hash(text: str) -> int:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4])


def _next(places: Sequence[int], place: int) -> int:
    return places[bisect_left(places, place) % len(places)]


def _text(queue: MessageQueue) -> str:
    """How Java prints a message queue."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}]"


@dataclass(frozen=True, slots=True)
class Configured:
    """What somebody decided, whoever else is there; that no two members get the same is theirs to see to."""

    queues: tuple[MessageQueue, ...]
    name = "CONFIG"

    def __call__(
        self, _group: str, _client_id: str, _queues: Sequence[MessageQueue], _client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        return self.queues
