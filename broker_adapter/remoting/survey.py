"""State of a whole cluster for operators; brokers that do not answer are reported next to the answers of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from broker_adapter.contracts.classic import Filter, MemberState
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule, group_unknown
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.admin import Connected, Connections, QueueStats, RemotingAdmin, RemotingGroupSettings
from broker_adapter.remoting.protocol.requests.routes import MASTER, Part, route_of

_AT_ONCE_MAX = 32  # concurrent requests
_VERSION_5, _VERSION_4 = 413, 213  # 5.0.0 and 4.0.0 in RocketMQ's list of versions, with a snapshot before each
_Found = TypeVar("_Found")


class BrokerSeen(NamedTuple):
    """Master or slave of a broker. ``why``: reason why it does not answer; all other facts are then unknown."""

    cluster: str
    broker: str
    number: int  # 0: the master
    address: str
    version: str = ""
    stored_per_s: float = 0.0  # both rates: over the last ten seconds
    read_per_s: float = 0.0
    why: str = ""


class TopicSeen(NamedTuple):
    """Topic with the number of its readable and writable queues and of its brokers."""

    topic: str
    brokers: int
    readable: int
    writable: int


class GroupSeen(NamedTuple):
    """Group as its brokers report it.

    ``connections``: by broker, only brokers that see a member. ``lag``: sum over all topics.
    """

    group: str
    settings: RemotingGroupSettings | None
    connections: Mapping[str, Connections]
    topics: tuple[str, ...]
    lag: int

    @property
    def members(self) -> Mapping[str, Connected]:
        """Online members by client id, sorted."""
        found = {each.client_id: each for seen in self.connections.values() for each in seen.members}
        return dict(sorted(found.items()))

    @property
    def filters(self) -> Mapping[str, Filter]:
        """Last subscription of the members, by topic."""
        return {topic: each for seen in self.connections.values() for topic, each in sorted(seen.filters.items())}


class MemberSeen(NamedTuple):
    """Member of a group. ``state``: its own report, or ``None`` if it gives none; ``why`` then has the reason."""

    connected: Connected
    brokers: tuple[str, ...]  # that report it
    state: MemberState | None
    why: str = ""


class QueueShares(NamedTuple):
    """Assignment of the queues of a group's topics. ``owners``: client ids of the members that claim each queue."""

    seen: GroupSeen
    members: Sequence[MemberSeen]
    owners: Mapping[MessageQueue, tuple[str, ...]]

    @property
    def are_known(self) -> bool:
        """True if all members reported their queues; an unclaimed queue then has no owner."""
        return all(each.state is not None for each in self.members)


class GroupPosition(NamedTuple):
    """Position of a group in a queue. ``last_at_ms``: store time of the last finished message; 0 if it is deleted."""

    end_offset: int
    committed_offset: int | None  # None: none committed
    last_at_ms: int

    @property
    def lag(self) -> int | None:
        """Number of unfinished messages; ``None`` if the group never committed an offset."""
        return None if self.committed_offset is None else self.end_offset - self.committed_offset


class Survey:
    """Survey that queries many brokers concurrently, up to 32 requests at once. Belongs to one event loop.

    Every method raises the errors of ``RemotingAdmin`` if no broker answers. If only some fail, ``silent`` has the
    reason by broker.
    """

    def __init__(self, admin: RemotingAdmin) -> None:
        self._admin = admin
        self._room = asyncio.Semaphore(_AT_ONCE_MAX)
        self.silent: dict[str, str] = {}  # by broker

    # -- routes and queues ----------------------------------------------------------------------------------------

    async def brokers(self) -> Sequence[BrokerSeen]:
        """Return all masters and slaves that the name servers list, by cluster, name and number."""
        known = await self._admin.cluster()
        cluster_of = {broker: cluster for cluster, brokers in known.clusters.items() for broker in brokers}
        places = sorted(
            BrokerSeen(cluster_of.get(broker, ""), broker, number, address)
            for broker, addresses in known.addresses.items()
            for number, address in addresses.items()
        )
        return await asyncio.gather(*(self._facts(each) for each in places))

    async def topics(self) -> Sequence[TopicSeen]:
        """Return all topics, including RocketMQ's system topics."""
        names = await self._admin.topics()
        return await asyncio.gather(*(self._size(each) for each in names))

    async def route(self, topic: str) -> Sequence[Part]:
        """Return the part of a topic at each broker. ``Refused(TOPIC_UNKNOWN)``."""
        return await self._admin.route(topic)

    async def queues(self, topic: str) -> Mapping[MessageQueue, QueueStats]:
        """Return the queues of a topic with their offset ranges and last store times. ``Refused(TOPIC_UNKNOWN)``."""
        found = await self._at_each(
            await self._masters_of(topic), lambda address: self._admin.topic_stats_at(address, topic)
        )
        return {queue: each for part in found.values() for queue, each in part.items()}

    # -- groups ----------------------------------------------------------------------------------------

    async def groups(self) -> Sequence[GroupSeen]:
        """Return all groups, including RocketMQ's system groups, with their members and lags."""
        masters = await self._masters()
        known = await self._at_each(masters, self._admin.groups_at)
        settings = {group: each for part in known.values() for group, each in part.items()}
        answering = {broker: masters[broker] for broker in known}
        return await asyncio.gather(*(self._seen(group, settings[group], answering) for group in sorted(settings)))

    async def shares(self, group: str) -> QueueShares:
        """Return the members of a group and the queues that each one claims. ``Refused(GROUP_UNKNOWN)``."""
        masters = await self._masters()
        seen = await self._group(group, masters)
        asks = (self._member(group, each, seen, masters) for each in seen.members.values())
        members = await asyncio.gather(*asks)
        owners: dict[MessageQueue, list[str]] = {}
        for topic in sorted(seen.filters.keys() | {t for each in members if each.state for t in each.state.filters}):
            owners.update({queue: [] for queue in await self._readable(topic)})
        for each in members:
            for held in each.state.queues if each.state is not None else ():
                owners.setdefault(held.queue, []).append(each.connected.client_id)
        return QueueShares(seen, members, {queue: tuple(owners[queue]) for queue in sorted(owners)})

    async def positions(self, group: str) -> Mapping[MessageQueue, GroupPosition]:
        """Return the position of a group in each queue of its topics. ``Refused(GROUP_UNKNOWN)``.

        The topics are those with a committed offset and those to which its members subscribe.
        """
        masters = await self._masters()
        seen = await self._group(group, masters)
        found: dict[MessageQueue, GroupPosition] = {}
        for topic in sorted({*seen.topics, *seen.filters}):
            found.update(await self._positions(group, topic))
        return found

    # -- inside ----------------------------------------------------------------------------------------

    async def _facts(self, place: BrokerSeen) -> BrokerSeen:
        try:
            async with self._room:
                facts = await self._admin.broker_facts(place.address)
        except BrokerError as error:
            return place._replace(why=str(error))
        read = facts.get("getTransferredTps") or facts.get("getTransferedTps", "")  # 4.x has the second spelling
        version = facts.get("brokerVersionDesc", "").removeprefix("V").replace("_", ".")
        return place._replace(version=version, stored_per_s=_first(facts.get("putTps", "")), read_per_s=_first(read))

    async def _size(self, topic: str) -> TopicSeen:
        try:
            async with self._room:
                parts = await self._admin.route(topic)
        except Refused as refused:
            if refused.rule is not Rule.TOPIC_UNKNOWN:
                raise
            parts = ()  # its brokers are gone, or it was deleted meanwhile
        counts = route_of(topic, tuple(parts))
        return TopicSeen(topic, len(parts), len(counts.readable), len(counts.writable))

    async def _group(self, group: str, masters: Mapping[str, str]) -> GroupSeen:
        known = await self._at_each(masters, self._admin.groups_at)
        settings = next((each[group] for each in known.values() if group in each), None)
        seen = await self._seen(group, settings, {broker: masters[broker] for broker in known})
        if settings is None and not seen.connections and not seen.topics:
            raise group_unknown(group)
        return seen

    async def _seen(self, group: str, settings: RemotingGroupSettings | None, masters: Mapping[str, str]) -> GroupSeen:
        connections = await self._at_each(masters, lambda address: self._admin.connections_at(address, group))
        stats = await self._at_each(masters, lambda address: self._admin.consume_stats_at(address, group))
        ways = {queue: each for part in stats.values() for queue, each in part.items()}
        return GroupSeen(
            group,
            settings,
            {broker: each for broker, each in connections.items() if each is not None},
            tuple(sorted({queue.topic for queue in ways})),
            sum(each.end_offset - each.committed_offset for each in ways.values()),
        )

    async def _member(
        self, group: str, connected: Connected, seen: GroupSeen, masters: Mapping[str, str]
    ) -> MemberSeen:
        name = connected.client_id
        brokers = tuple(
            broker
            for broker, each in seen.connections.items()
            if any(other.client_id == name for other in each.members)
        )
        try:
            async with self._room:
                state = await self._admin.state_of(masters[brokers[0]], group, name)
        except BrokerError as error:
            return MemberSeen(connected, brokers, None, str(error))
        return MemberSeen(connected, brokers, state)

    async def _positions(self, group: str, topic: str) -> Mapping[MessageQueue, GroupPosition]:
        try:
            masters = await self._masters_of(topic)
        except Refused as refused:
            if refused.rule is Rule.TOPIC_UNKNOWN:
                return {}  # deleted meanwhile
            raise
        stats = await self._at_each(masters, lambda address: self._admin.consume_stats_at(address, group, topic))

        async def at(broker: str) -> Mapping[MessageQueue, GroupPosition]:
            found = {queue: GroupPosition(*each) for queue, each in stats[broker].items()}
            for queue, each in found.items():
                if not each.committed_offset:  # 0, or none
                    async with self._room:
                        committed = await self._admin.committed_at(masters[broker], group, queue)
                    found[queue] = each._replace(committed_offset=committed)
            return found

        parts = await asyncio.gather(*(at(broker) for broker in stats))
        return {queue: each for part in parts for queue, each in part.items()}

    async def _readable(self, topic: str) -> Sequence[MessageQueue]:
        try:
            return route_of(topic, tuple(await self._admin.route(topic))).readable
        except Refused as refused:
            if refused.rule is Rule.TOPIC_UNKNOWN:
                return ()  # a member may subscribe to a topic before it exists
            raise

    async def _masters(self) -> Mapping[str, str]:
        found = {
            broker: each[MASTER] for broker, each in (await self._admin.cluster()).addresses.items() if MASTER in each
        }
        if not found:
            raise BrokerUnavailable("the name servers know no broker")
        return found

    async def _masters_of(self, topic: str) -> Mapping[str, str]:
        found = {}
        for part in await self._admin.route(topic):
            if part.broker in self.silent:
                continue
            if MASTER in part.addresses:
                found[part.broker] = part.addresses[MASTER]
            else:
                self.silent[part.broker] = "it has no master now"
        return found

    async def _at_each(
        self, masters: Mapping[str, str], ask: Callable[[str], Awaitable[_Found]]
    ) -> Mapping[str, _Found]:
        """Return the answers by broker. Raise the first error if no broker answers."""

        async def asked(address: str) -> _Found:
            async with self._room:
                return await ask(address)

        answers = await asyncio.gather(*map(asked, masters.values()), return_exceptions=True)
        found: dict[str, _Found] = {}
        failure: BaseException | None = None
        for broker, answer in zip(masters, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[broker] = answer
                continue
            if not isinstance(answer, BrokerError):
                raise answer
            failure = failure or answer
            self.silent[broker] = str(answer)
        if failure is not None and not found:
            raise failure
        return found


def version_text(number: int) -> str:
    """Return the client version for a RocketMQ version number, for example ``5.5.0`` for 513."""
    if number < _VERSION_4:
        return f"before 4.0 ({number})"
    patches = 500 + (number - _VERSION_5) // 2
    return f"{patches // 100}.{patches // 10 % 10}.{patches % 10}"


def _first(numbers: str) -> float:
    try:
        return float(numbers.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0
