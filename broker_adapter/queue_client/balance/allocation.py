"""Allocation of the queues of a topic to members: the strategies of RocketMQ's clients, with identical results.

Every member of a group computes its share alone. Members agree only because they see the same queues and client ids,
use the same strategy, and count in the same order. Members in other languages participate. The reference is
``org.apache.rocketmq.client.consumer.rebalance`` of RocketMQ 5.5 (4.9 is the same).
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
    """Allocation of the queues of one topic to the members of a group."""

    @property
    def name(self) -> str:
        """RocketMQ's name of the strategy; the same for all members of a group."""
        ...

    def __call__(
        self, group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        """Return the share of ``client_id``. ``queues`` and ``client_ids`` are sorted and without duplicates.

        A client that is not in ``client_ids`` has no share: brokers do not list it yet, and other members do not count
        it.
        """
        ...


def _place(client_id: str, client_ids: Sequence[str]) -> int | None:
    return client_ids.index(client_id) if client_id in client_ids else None


class Averagely:
    """Strategy of contiguous ranges; the first members get one more queue if there is a remainder. The default."""

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
    """Round-robin strategy that spreads the queues of each broker over many members."""

    name = "AVG_BY_CIRCLE"

    def __call__(
        self, _group: str, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        place = _place(client_id, client_ids)
        return () if place is None else queues[place :: len(client_ids)]


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Strategy for brokers in these rooms only, given by broker names (``room@broker``); others are unassigned."""

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
    """Return the room in a broker name. Like Java's ``split``, ignore trailing ``@``: ``a@b@`` has a room, ``a@`` has
    none.
    """
    words = broker.rstrip("@").split("@")
    return words[0] if len(words) == 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRoomNearby:
    """Strategy that prefers members in the queue's machine room; all members share the queues of rooms without members.

    The two functions return the room of a queue and of a client. ``ValueError`` if one of them returns no room.
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
            raise ValueError(f"unknown machine room of {thing}; every queue and every client needs one")
        found[room].append(thing)
    return dict(found)


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Strategy with members and queues on a hash ring: a joining or leaving member moves few queues of others."""

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
    """Return the text of a message queue as Java prints it."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}]"


@dataclass(frozen=True, slots=True)
class Configured:
    """Fixed assignment, independent of other members; the application must avoid overlaps."""

    queues: tuple[MessageQueue, ...]
    name = "CONFIG"

    def __call__(
        self, _group: str, _client_id: str, _queues: Sequence[MessageQueue], _client_ids: Sequence[str], /
    ) -> Sequence[MessageQueue]:
        return self.queues
