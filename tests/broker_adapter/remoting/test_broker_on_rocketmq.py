"""Clients of the classic protocol in front of real brokers: of RocketMQ 5, and of RocketMQ 4."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from support.effort import at_length
from support.rigs.rocketmq.cluster import cluster, cluster_4
from support.rigs.rocketmq.real_time import now_ms

from bench.remoting import administer
from bench.rocketmq import VERSION_4, RocketMQ, artifacts
from broker_adapter.contracts.classic import (
    Decision,
    Filter,
    MessageQueue,
    Outgoing,
    Presence,
    QueueReceipt,
    ReceivedMessage,
    SendStatus,
    TransactionCheck,
)
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import dead_letter_topic, retry_topic
from broker_adapter.remoting import Compression, RemotingAdmin, RemotingBroker, RemotingOptions, StoredMessage

pytestmark = pytest.mark.cluster
PATIENCE_MS, PATIENCE_S = 20_000, 60.0
QUEUES = 2
EVERYTHING = Filter()
names_made = itertools.count()
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster, and what its brokers can."""

    names: str
    knows_times: bool

    @property
    def options(self) -> RemotingOptions:
        return RemotingOptions(names=(self.names,), request_timeout_ms=PATIENCE_MS)

    def topic(self, kind: str = "NORMAL") -> str:
        """Make a topic of two queues at each broker."""
        name = f"classic-{next(names_made)}"
        administer(self.names, lambda admin: admin.make_topic(name, queues=QUEUES, kind=kind))
        return name

    def group(self) -> str:
        """Make a group, with its retry topic: clients would learn of it late otherwise."""
        name = f"classic-group-{next(names_made)}"
        administer(self.names, lambda admin: admin.make_group(name))
        administer(self.names, lambda admin: admin.make_topic(retry_topic(name), queues=1))
        return name


@pytest.fixture(scope="module", params=["5", "4"])
def site(request: pytest.FixtureRequest) -> Site:
    """The clusters of this run, one after the other."""
    is_new = request.param == "5"
    return Site((cluster().rocketmq if is_new else cluster_4()).names, is_new)


@dataclass(slots=True)
class Heard:
    """What brokers said by themselves."""

    changed: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    checks: asyncio.Queue[TransactionCheck] = field(default_factory=asyncio.Queue)

    resets: asyncio.Queue[tuple[str, Mapping[MessageQueue, int]]] = field(default_factory=asyncio.Queue)

    def offsets_reset(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        self.resets.put_nowait((group, offsets))

    def members_changed(self, group: str) -> None:
        self.changed.put_nowait(group)

    def check(self, check: TransactionCheck) -> None:
        self.checks.put_nowait(check)


@asynccontextmanager
async def client(site: Site, compression: Compression | None = Compression.ZLIB) -> AsyncIterator[RemotingBroker]:
    broker = RemotingBroker(site.options, compression=compression)
    try:
        yield broker
    finally:
        await broker.close()


async def route_of(broker: RemotingBroker, topic: str) -> Sequence[MessageQueue]:
    """The queues of a topic, once the name server knows it."""
    return (await until(lambda: broker.route(topic), lambda route: bool(route.writable))).writable


async def until(ask: Callable[[], Awaitable[Found]], is_so: Callable[[Found], bool]) -> Found:
    """What ``ask`` finds, once it is so; what is refused meanwhile is not there yet."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                found = await ask()
                if is_so(found):
                    return found
            except Refused as refused:
                if refused.rule is not Rule.TOPIC_UNKNOWN:
                    raise
            await asyncio.sleep(0.1)


async def send(
    broker: RemotingBroker, queue: MessageQueue, *messages: Outgoing, group: str = "senders"
) -> QueueReceipt:
    receipt = await broker.send(group, queue, messages, timeout_ms=PATIENCE_MS)
    assert receipt.status is SendStatus.STORED
    return receipt


async def pull(
    broker: RemotingBroker,
    group: str,
    queue: MessageQueue,
    offset: int = 0,
    *,
    wanted: Filter = EVERYTHING,
    count: int = 1,
) -> Sequence[ReceivedMessage]:
    """Pull until ``count`` messages came."""
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            pulled = await broker.pull(group, queue, wanted, offset, batch_max=32, wait_ms=5_000)
            found, offset = [*found, *pulled.messages], pulled.next_offset
    return found


async def appear(broker: RemotingBroker, group: str, *filters: tuple[str, Filter]) -> None:
    """Say to all brokers that this client consumes."""
    for topic, _ in filters:
        await route_of(broker, topic)
    await broker.heartbeat(["senders"], [Presence(group, dict(filters))])


def of(queue: MessageQueue, body: bytes = b"x", **more: object) -> Outgoing:
    """A message for a queue's topic, with these of what ``Outgoing`` and ``Message`` have."""
    own = {name: more.pop(name) for name in ("delay_level", "is_half") if name in more}
    return Outgoing(message=Message(queue.topic, body, **more), **own)  # type: ignore[arg-type]


def test_messages_come_as_they_were_sent(site: Site) -> None:
    """One by one, packed in each way, and in a batch; a broker finds each by its offset id, its key and its own id."""
    topic, group = site.topic(), site.group()

    async def scenario() -> None:
        async with client(site) as broker:
            await appear(broker, group, (topic, Filter()))
            queue, *_ = await route_of(broker, topic)
            first = Message(
                topic, b"first", tag="t", keys=("k1", "k2"), properties={"a": "1", "b": "\u00fc"}, message_group="g"
            )
            receipts = [await send(broker, queue, Outgoing(message=first))]
            big = bytes(range(256)) * 100
            for method in (*Compression, None):
                async with client(site, method) as other:
                    await route_of(other, topic)
                    receipts.append(await send(other, queue, of(queue, big)))
            batch = await send(broker, queue, *(of(queue, b"%d" % number, tag="t") for number in range(3)))
            found = await pull(broker, group, queue, count=8)
            assert [each.message.body for each in found] == [b"first", *[big] * 4, b"0", b"1", b"2"]
            assert [each.size_bytes < len(big) for each in found[1:5]] == [True, True, True, False]
            assert [each.queue_offset for each in found] == list(range(8))
            assert [each.message.message_id for each in found] == [
                *(r.message_id for r in receipts),
                *batch.message_id.split(","),
            ]
            assert [each.offset_id for each in found] == [*(r.offset_id for r in receipts), *batch.offset_id.split(",")]
            one = found[0].message
            assert (one.tag, one.keys, one.properties, one.message_group) == (
                "t",
                ("k1", "k2"),
                {"a": "1", "b": "\u00fc"},
                "g",
            )
            assert await broker.queue_range(queue) == (0, 8)
            assert await broker.offset_at(queue, found[0].stored_at_ms) == 0
            assert await broker.offset_at(queue, now_ms() + PATIENCE_MS) == 8
            beyond = await broker.pull(group, queue, Filter(), 100, batch_max=1, wait_ms=0)
            assert beyond == ([], 8, True)
        async with RemotingAdmin(site.options) as admin:
            by_id = await admin.message_by_id(receipts[0].offset_id, topic)
            assert isinstance(by_id, StoredMessage)
            assert by_id.body == b"first"
            for key in ("k2", receipts[0].message_id):  # an index is written a little later
                by_key = await until(partial(admin.messages_by_key, topic, key), bool)
                assert [each.offset_id for each in by_key] == [receipts[0].offset_id]
            assert (await admin.topic_stats(topic))[queue].readable == (0, 8)

    asyncio.run(scenario())


def test_a_long_poll_ends_when_a_message_comes(site: Site) -> None:
    """Other calls over the same connection are answered meanwhile; nothing there and no wait is an empty answer."""
    topic, group = site.topic(), site.group()

    async def scenario() -> None:
        async with client(site) as broker:
            queue, *_ = await route_of(broker, topic)
            with pytest.raises(Refused) as refused:
                await broker.pull(group, queue, Filter(), 0, batch_max=1, wait_ms=0)
            assert refused.value.rule in {Rule.REQUEST, Rule.GROUP_UNKNOWN}
            await appear(broker, group, (topic, Filter()))
            assert await broker.pull(group, queue, Filter(), 0, batch_max=1, wait_ms=0) == ([], 0, False)
            waiting = asyncio.create_task(broker.pull(group, queue, Filter(), 0, batch_max=1, wait_ms=PATIENCE_MS))
            assert await broker.queue_range(queue) == (0, 0)
            assert not waiting.done()
            await send(broker, queue, of(queue, b"late"))
            pulled = await waiting
            assert [each.message.body for each in pulled.messages] == [b"late"]
            assert pulled.next_offset == 1
            assert await broker.committed_offset(group, queue) in ({None} if site.knows_times else {None, 0})
            await broker.commit_offset(group, queue, 1)
            assert await broker.committed_offset(group, queue) == 1
        async with RemotingAdmin(site.options) as admin:
            stats = (await admin.consume_stats(group, topic))[queue]
            assert (stats.end_offset, stats.committed_offset) == (1, 1)

    asyncio.run(scenario())


def test_delays_are_kept_or_refused(site: Site) -> None:
    """A delay level by all brokers; a delivery time by those that know it, and refused by those that ignore it."""
    topic, group = site.topic("DELAY"), site.group()

    async def scenario() -> None:
        async with client(site) as broker:
            await appear(broker, group, (topic, Filter()))
            queue, *_ = await route_of(broker, topic)
            sent_at_ms = now_ms()
            await send(broker, queue, of(queue, b"level", delay_level=1))
            due_ms = sent_at_ms + 2_000
            if not site.knows_times:
                with pytest.raises(Refused, match="older than RocketMQ") as refused:
                    await send(broker, queue, of(queue, deliver_at_ms=due_ms))
                assert refused.value.rule is Rule.UNSUPPORTED
                assert await pull(broker, group, queue)
                return
            await send(broker, queue, of(queue, b"time", deliver_at_ms=due_ms))
            recalled = await send(broker, queue, of(queue, b"no", deliver_at_ms=sent_at_ms + 3_600_000))
            assert await broker.recall(topic, recalled.recall_handle) == recalled.message_id
            found = await pull(broker, group, queue, count=2)
            assert [each.message.body for each in found] == [b"level", b"time"]
            assert found[0].stored_at_ms >= sent_at_ms + 1_000
            assert found[1].stored_at_ms >= due_ms
            with pytest.raises(Refused):
                await broker.recall(topic, "nonsense")

    asyncio.run(scenario())


def test_filters_are_the_brokers(site: Site) -> None:
    """By tags, by SQL, one that no heartbeat told, and one that is wrong."""
    topic, group = site.topic(), site.group()

    async def scenario() -> None:
        async with client(site) as broker:
            await appear(broker, group, (topic, Filter("a || b")))
            queue, *_ = await route_of(broker, topic)
            for tag in "abc":
                await send(broker, queue, of(queue, tag.encode(), tag=tag, properties={"n": str(ord(tag))}))
            found = await pull(broker, group, queue, wanted=Filter("a || b"), count=2)
            assert [each.message.tag for each in found] == ["a", "b"]
            (other,) = await pull(broker, group, queue, wanted=Filter("c"))
            assert other.message.tag == "c"
            sql = Filter("n >= 99", is_sql=True)
            await appear(broker, group, (topic, sql))
            assert [each.message.tag for each in await pull(broker, group, queue, wanted=sql)] == ["c"]
            wrong = Filter("n >=", is_sql=True)
            for _ in range(2):
                with pytest.raises(Refused) as refused:
                    await pull(broker, group, queue, wanted=wrong)
                assert refused.value.rule is Rule.FILTER
                await appear(broker, group, (topic, wrong))

    asyncio.run(scenario())


def test_members_hear_of_each_other_and_share_locks(site: Site) -> None:
    """Who comes and who goes is told; a queue that one of two has locked is not given to the other."""
    topic, group = site.topic(), site.group()

    async def scenario() -> None:
        async with client(site) as one, client(site) as two:
            heard = Heard()
            one.attach(heard)
            await appear(one, group, (topic, Filter()))
            queues = await route_of(one, topic)
            assert await one.members(group, topic) == (one.client_id,)
            assert await one.members(site.group(), topic) == ()
            while not heard.changed.empty():
                heard.changed.get_nowait()
            await appear(two, group, (topic, Filter()))
            async with asyncio.timeout(PATIENCE_S):
                assert await heard.changed.get() == group
            assert list(await one.members(group, topic)) == sorted([one.client_id, two.client_id])
            async with RemotingAdmin(site.options) as admin:
                members = await admin.members(group, topic)
                assert [each.client_id for each in members] == sorted([one.client_id, two.client_id])
                assert {each.language for each in members} == {"PYTHON"}
            assert await one.lock(group, queues) == frozenset(queues)
            assert await two.lock(group, queues) == frozenset()
            await two.unlock(group, queues)  # what it does not hold
            assert await two.lock(group, queues) == frozenset()
            await one.unlock(group, queues[:1])
            assert await two.lock(group, queues) == frozenset(queues[:1])
            await two.leave(consumer=group)
            assert list(await one.members(group, topic)) == [one.client_id]

    asyncio.run(scenario())


def test_a_failed_message_comes_again_and_ends_as_a_dead_letter(site: Site) -> None:
    """Under the topic it was sent to, with its attempts and its id; the last failure is in the dead-letter queue."""
    topic, group = site.topic(), site.group()

    async def scenario() -> None:
        async with client(site) as broker:
            retries = retry_topic(group)
            await appear(broker, group, (topic, Filter()), (retries, Filter()))
            queue, *_ = await route_of(broker, topic)
            receipt = await send(broker, queue, of(queue, b"fails", tag="t"))
            (failed,) = await pull(broker, group, queue)
            await broker.send_back(group, failed, delay_level=1, attempts_max=1)
            lanes = [lane for lane in await route_of(broker, retries) if lane.broker == queue.broker]
            (again,) = await pull(broker, group, lanes[0])
            assert (again.message.topic, again.queue.topic, again.attempts_failed) == (topic, retries, 1)
            assert (again.message.body, again.message.message_id) == (b"fails", receipt.message_id)
            await broker.send_back(group, again, delay_level=0, attempts_max=1)
            await broker.send_back(group, failed, delay_level=-1, attempts_max=1)
            dead = dead_letter_topic(group)
            letters = [each for each in await route_of(broker, dead) if each.broker == queue.broker]
            await appear(broker, group, (dead, Filter()))
            found = await pull(broker, group, letters[0], count=2)
            assert [each.attempts_failed for each in found] == [2, 1]
            assert all(each.system["RETRY_TOPIC"] == topic for each in found)

    asyncio.run(scenario())


def test_transactions_end_as_their_producer_decides(site: Site) -> None:
    """A commit is visible, a rollback never; one that nobody decided is asked for, and the answer counts."""
    topic, group = site.topic("TRANSACTION"), site.group()

    async def scenario() -> None:
        async with client(site) as broker:
            heard = Heard()
            broker.attach(heard)
            await appear(broker, group, (topic, Filter()))
            queue, *_ = await route_of(broker, topic)
            for body, decision in ((b"no", Decision.ROLLBACK), (b"yes", Decision.COMMIT)):
                receipt = await send(broker, queue, of(queue, body, is_half=True))
                await broker.end_transaction("senders", receipt, decision)
            receipt = await send(broker, queue, of(queue, b"?", is_half=True))
            await broker.end_transaction("senders", receipt, Decision.UNKNOWN)
            assert [each.message.body for each in await pull(broker, group, queue)] == [b"yes"]
            async with asyncio.timeout(PATIENCE_S):
                check = await heard.checks.get()
            asked = check.message.message
            assert (check.group, asked.topic, asked.body, asked.message_id) == (
                "senders",
                topic,
                b"?",
                receipt.message_id,
            )
            await broker.end_transaction("senders", receipt, Decision.COMMIT, check=check)
            assert [each.message.body for each in await pull(broker, group, queue, 1)] == [b"?"]

    asyncio.run(scenario())


def test_operators_change_existing_objects(site: Site) -> None:
    """Offsets of a group that is online are set back; a topic and a group that are deleted are gone."""
    topic, group = site.topic(), site.group()

    async def scenario() -> None:
        async with client(site) as broker, RemotingAdmin(site.options) as admin:
            heard = Heard()
            broker.attach(heard)
            queue, *_ = await route_of(broker, topic)
            await send(broker, queue, of(queue))
            for each in await route_of(broker, topic):
                await broker.commit_offset(group, each, int(each == queue))
            assert topic in await admin.topics()
            if site.knows_times:
                await admin.reset_offsets(group, topic, 0)
                assert await broker.committed_offset(group, queue) == 0
            else:  # its members do it
                with pytest.raises(Refused) as refused:
                    await admin.reset_offsets(group, topic, 0)
                assert (refused.value.rule, refused.value.code) == (Rule.NOT_FOUND, 206)
                await appear(broker, group, (topic, Filter()))
                await admin.reset_offsets(group, topic, 0)
                async with asyncio.timeout(PATIENCE_S):
                    told, offsets = await heard.resets.get()
                assert (told, offsets[queue]) == (group, 0)
            await admin.delete_group(group)
            await admin.delete_topic(topic)
            with pytest.raises(Refused) as refused:
                await broker.route(topic)
            assert refused.value.rule is Rule.TOPIC_UNKNOWN

    asyncio.run(scenario())


@at_length
def test_a_broker_that_wants_a_signature_gets_one(tmp_path: Path) -> None:
    """A broker of RocketMQ 4 with access keys of its own; a wrong secret, and none, are unauthorized."""
    keys = "accounts:\n- accessKey: application\n  secretKey: secret-of-it\n  admin: true\n"
    lib = artifacts(VERSION_4)
    running = RocketMQ(
        tmp_path, lib, heap_mb=256, version=VERSION_4, broker="aclEnable=true\n", conf={"plain_acl.yml": keys}
    )

    async def scenario() -> None:
        known = RemotingOptions(names=(running.names,), access_key="application", secret_key="secret-of-it")
        async with RemotingAdmin(known) as admin:
            await until(admin.cluster, lambda found: bool(found.addresses))
            await admin.make_topic("orders", queues=1)
        signing = RemotingBroker(known)
        (queue,) = await route_of(signing, "orders")
        await send(signing, queue, of(queue, b"signed", tag="t", keys=("\u00fc",)))
        await appear(signing, "readers", ("orders", Filter()))
        assert [each.message.body for each in await pull(signing, "readers", queue)] == [b"signed"]
        await signing.close()
        for options in (replace(known, secret_key="wrong"), replace(known, access_key="")):
            other = RemotingBroker(options)
            await other.route("orders")  # name servers check nothing
            with pytest.raises(Refused) as refused:
                await send(other, queue, of(queue))
            assert refused.value.rule is Rule.UNAUTHORIZED
            await other.close()

    try:
        asyncio.run(scenario())
    finally:
        running.close()
