"""A consumer group of this client and of Apache's own Java client: one division, whichever strategy divides."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.clients.embedded.consumers import Seen
from support.clients.java.jvm import SHORT_LIVED
from support.clients.java.programs import class_path
from support.effort import EFFORT
from support.rigs.rocketmq.cluster import BROKERS, cluster

from broker_adapter import Client, ConsumerOptions, Message, Start
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
from broker_adapter.queue_client.consumer import Consumer
from broker_adapter.queue_client.producer import Producer
from broker_adapter.remoting import RemotingBroker, RemotingOptions

pytestmark = pytest.mark.cluster
QUEUES_EACH = 4  # of a topic at each broker
HERE, JAVA = "west", "east"  # the rooms of the two clients, which their ids begin with
_AT_ONCE = "-Drocketmq.client.rebalance.waitInterval=500"  # ms; 20 s otherwise
_STRATEGIES = 6
_PATIENCE_MS = 60_000  # of a call: a machine that stalls is no broker that is away
_OPTIONS = {"rebalance_ms": 500, "flush_ms": 200, "start": Start.FIRST_OFFSET, "close_ms": 2_000}


def room_of(name: str) -> str:
    """Where a broker or a client is."""
    return name.partition("@")[0]


def strategies(topic: str) -> Sequence[tuple[Strategy, Strategy]]:
    """Ours and the Java client's: the same one, but for what is configured."""
    nearby = MachineRoomNearby(
        inner=Averagely(), room_of_queue=lambda queue: room_of(queue.broker), room_of_client=room_of
    )
    same = (Averagely(), AveragelyByCircle(), MachineRoom(frozenset({HERE, JAVA})), nearby, ConsistentHash())
    west, east = (tuple(MessageQueue(topic, broker, n) for n in range(QUEUES_EACH)) for broker in reversed(BROKERS))
    return [*((each, each) for each in same), (Configured(west), Configured(east))]


def at(queue: MessageQueue) -> Callable[[Sequence[MessageQueue]], MessageQueue]:
    """Choose this one."""
    return lambda _: queue


class Java:
    """``Member.java``: the queues of its members and what they got, by group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.queues: dict[str, list[MessageQueue]] = {}
        self.got: defaultdict[str, list[tuple[str, MessageQueue]]] = defaultdict(list)
        self._process = process

    async def read(self) -> None:
        """Take what it tells, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if not line.startswith(b"{"):
                continue
            told = json.loads(line)
            if "queues" in told:
                self.queues[told["group"]] = sorted(MessageQueue(*each) for each in told["queues"])
            else:
                self.got[told["group"]].append((told["got"], MessageQueue(*told["queue"])))

    def order(self, what: str, group: str, **more: object) -> None:
        """Have it join a group or leave it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "group": group, **more}).encode() + b"\n")


@asynccontextmanager
async def java(names: str, folder: Path) -> AsyncIterator[Java]:
    """One virtual machine for all strategies."""
    options = (*SHORT_LIVED, _AT_ONCE, f"-Duser.home={folder}", "-cp", class_path())
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("java", *options, "Member", names, stdin=pipe, stdout=pipe)
    made = Java(process)
    reading = asyncio.ensure_future(made.read())
    try:
        yield made
    finally:
        process.kill()
        await process.wait()
        await reading


class Mixed:
    """A group of the two, and how its strategy divides the queues of a topic."""

    def __init__(self, beside: Java, names: str, topic: str, ours: Strategy, theirs: Strategy) -> None:
        self.group = f"mixed-{ours.name}".lower()
        self._java, self._names, self._topic = beside, names, topic
        self._strategies = {f"{HERE}@{self.group}": ours, f"{JAVA}@{self.group}": theirs}
        self._here, self._there = self._strategies
        self._queues = [MessageQueue(topic, broker, number) for broker in BROKERS for number in range(QUEUES_EACH)]
        self._seen = Seen()

    async def scenario(self, *leavers: str) -> None:
        """Both, then without the one and, after both again, without the other: as far as they are named."""
        how = RemotingOptions(names=(self._names,), request_timeout_ms=_PATIENCE_MS)
        sender, client = Client(RemotingBroker(how)), Client(RemotingBroker(how, client_id=self._here))
        options = ConsumerOptions(strategy=self._strategies[self._here], **_OPTIONS)  # type: ignore[arg-type]
        async with sender:
            producer = await sender.producer("senders")
            async with client:
                consumer = client.consumer(self.group, {self._topic: "*"}, options)(self._seen.by(self._here))
                assert isinstance(consumer, Consumer)
                self._join()
                await self._consumed(producer, await self._divided(consumer, self._here, self._there), "both")
                if JAVA in leavers:
                    self._java.order("leave", self.group)
                    await self._consumed(producer, await self._divided(consumer, self._here), "here")
                if {JAVA, HERE} <= {*leavers}:
                    self._join()
                    await self._divided(consumer, self._here, self._there)
            if HERE in leavers:
                await self._consumed(producer, await self._divided(consumer, self._there), "there")

    def _join(self) -> None:
        theirs = self._strategies[self._there]
        facts = {"strategy": theirs.name, "rooms": [HERE, JAVA], "configured": getattr(theirs, "queues", ())}
        self._java.order("join", self.group, topic=self._topic, room=JAVA, **facts)

    async def _divided(self, consumer: Consumer, *members: str) -> Mapping[MessageQueue, str]:
        """Wait until all queues are given to these members, as the strategy says; return whose each is."""
        shares = {
            name: sorted(strategy(self.group, name, self._queues, sorted(members))) if name in members else []
            for name, strategy in self._strategies.items()
        }
        owner = {queue: name for name, share in shares.items() for queue in share}
        assert len(owner) == sum(map(len, shares.values()))
        is_configured = isinstance(self._strategies[self._here], Configured)
        assert len(owner) == (QUEUES_EACH * len(members) if is_configured else len(self._queues))

        def held() -> Mapping[str, Sequence[MessageQueue]]:
            here = [queue for queue in consumer.queues if queue.topic == self._topic]
            return {self._here: here, self._there: self._java.queues.get(self.group, [])}

        try:
            await self._seen.until(lambda: held() == shares)
        except TimeoutError:
            raise AssertionError(f"{members} of {self.group} hold {held()}, not {shares}") from None
        return owner

    async def _consumed(self, producer: Producer, owner: Mapping[MessageQueue, str], prefix: str) -> None:
        """Each message comes once, to the member whose queue it lies in."""
        sent: dict[str, str] = {}
        for number, queue in enumerate([*owner] * 2):
            body = f"{prefix}-{number}"
            await producer.send(Message(self._topic, body.encode()), choose=at(queue), timeout_ms=_PATIENCE_MS)
            sent[body] = owner[queue]

        def came() -> list[tuple[str, str]]:
            here = [(each.message.body.decode(), self._here) for _, batch in self._seen.batches for each in batch]
            there = [(body, self._there) for body, _ in self._java.got[self.group]]
            return [each for each in here + there if each[0].startswith(prefix)]

        await self._seen.until(lambda: {body for body, _ in came()} == set(sent))
        assert Counter(came()) == Counter(sent.items())


def test_this_client_and_the_java_client_share_the_queues(tmp_path: Path) -> None:
    """With each of the Java client's strategies: no queue has two owners or none, and none is of a member that left.

    By default one of the two leaves, from strategy to strategy the other one; in a long run both do.
    """
    running = cluster()

    async def scenario() -> None:
        async with java(running.rocketmq.names, tmp_path) as beside, asyncio.TaskGroup() as group:
            for number in range(_STRATEGIES):
                topic = running.topic()
                mixed = Mixed(beside, running.rocketmq.names, topic, *strategies(topic)[number])
                leavers = (HERE, JAVA) if EFFORT > 1 else (HERE, JAVA)[number % 2 :][:1]
                group.create_task(mixed.scenario(*leavers))

    asyncio.run(scenario())
