"""A client of the classic protocol in front of brokers that refuse, are old, fall silent or are gone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager

import pytest
from support.forges.messages.stored import a_stored
from support.rigs.rocketmq.remoting_peer import HeldQueue, Peer, remoting_peer

from broker_adapter.contracts.classic import (
    ClassicBroker,
    Filter,
    MemberState,
    MessageQueue,
    Outgoing,
    Presence,
    TransactionCheck,
)
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.remoting import RemotingAdmin, RemotingBroker, RemotingOptions, reach
from broker_adapter.remoting.protocol.codes import Operation, Result
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame
from broker_adapter.remoting.protocol.requests.running import decode_running
from broker_adapter.remoting.protocol.stored import decode_messages

pytestmark = pytest.mark.integration
NOBODY = "127.0.0.1:1"
TIMEOUT_MS = 30_000
QUEUE = MessageQueue("orders", "broker-a", 0)
STORED = RemotingFrame(code=0, fields={"msgId": "7F00000100002A9F0000000000000001", "queueId": "0", "queueOffset": "4"})
CLUSTERS = {
    "none": b'{"brokerAddrTable":{},"clusterAddrTable":{}}',
    "one": b'{"brokerAddrTable":{"a":{"brokerAddrs":{1:"127.0.0.1:1"}}},"clusterAddrTable":{}}',
}
SENDS = (Operation.SEND, Operation.SEND_BATCH)


def outgoing(**more: object) -> Outgoing:
    return Outgoing(message=Message("orders", b"x", **more))  # type: ignore[arg-type]


@asynccontextmanager
async def client(*names: str) -> AsyncIterator[ClassicBroker]:
    broker = RemotingBroker(RemotingOptions(names=names, request_timeout_ms=TIMEOUT_MS), client_id="me")
    try:
        yield broker
    finally:
        await broker.close()


def brokers(**addresses: Mapping[int, str]) -> RemotingFrame:
    """The answer of a name server: one queue at each broker."""
    queues = [{"brokerName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6} for name in addresses]
    named = [
        {"brokerName": name, "brokerAddrs": {str(number): each for number, each in where.items()}}
        for name, where in addresses.items()
    ]
    return RemotingFrame(code=0, body=json.dumps({"queueDatas": queues, "brokerDatas": named}).encode())


def answering(*operations: int, answer: RemotingFrame) -> Callable[[RemotingFrame], RemotingFrame | None]:
    return lambda request: answer if request.code in operations else None


def play(scenario: Callable[[Peer], Coroutine[object, object, None]]) -> None:
    """Run a scenario with a peer that has the topic ``orders`` of one queue."""
    with remoting_peer() as peer:
        peer.topics["orders"] = [HeldQueue()]
        asyncio.run(scenario(peer))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, BrokerUnavailable) for code in (1, 14, 204, 205, 1500)),
        *((code, Overloaded) for code in (2, 215)),
        *((code, Refused) for code in (3, 13, 16, 17)),
    ],
)
def test_an_error_has_the_code_that_the_broker_gave(code: int, kind: type[BrokerError]) -> None:
    """A producer decides by it whether it may try elsewhere."""

    async def scenario(peer: Peer) -> None:
        peer.before = answering(*SENDS, answer=RemotingFrame(code=code, remark="because"))
        async with client(peer.address) as broker:
            with pytest.raises(kind, match="because") as failed:
                await broker.send("g", QUEUE, [outgoing()], timeout_ms=TIMEOUT_MS)
            assert getattr(failed.value, "code", None) == code

    play(scenario)


@pytest.mark.parametrize(("version", "is_refused"), [(0, True), (407, True), (412, True), (413, False), (513, False)])
def test_a_delivery_time_is_for_brokers_that_know_it(version: int, is_refused: bool) -> None:
    """Any answer of a broker says what it is; older ones would deliver at once, so they never see the message."""

    async def scenario(peer: Peer) -> None:
        stored = RemotingFrame(code=0, fields=STORED.fields, version=version)
        peer.before = answering(*SENDS, Operation.END_OFFSET, answer=stored)
        with remoting_peer() as names:
            names.before = answering(Operation.ROUTE, answer=brokers(**{"broker-a": {0: peer.address}}))
            async with client(names.address) as broker:
                sends = [broker.send("g", QUEUE, [outgoing(deliver_at_ms=9)], timeout_ms=TIMEOUT_MS) for _ in range(2)]
                told = [(await asyncio.gather(send, return_exceptions=True))[0] for send in sends]
        for each in told:
            assert isinstance(each, Refused) == is_refused
            assert not isinstance(each, Refused) or (each.rule, each.value) == (Rule.UNSUPPORTED, f"version {version}")
        probes = 2 if version == 0 else 1
        sent = [] if is_refused else [Operation.SEND] * 2
        assert [each.code for each in peer.asked] == [*[Operation.END_OFFSET] * probes, *sent]

    play(scenario)


def test_a_send_one_way_waits_for_nothing() -> None:
    """Where it was stored nobody knows; a broker that is not there is known."""

    async def scenario(peer: Peer) -> None:
        async with client(peer.address) as broker:
            receipt = await broker.send("g", QUEUE, [outgoing()], timeout_ms=TIMEOUT_MS, one_way=True)
            assert receipt.queue_offset == -1
            await broker.queue_range(QUEUE)  # behind it over the same connection
            (sent,) = [each for each in peer.asked if each.code == Operation.SEND]
            assert sent.is_one_way
            assert receipt.message_id in sent.fields["i"]
            peer.before = answering(Operation.ROUTE, answer=brokers(gone={0: NOBODY}))
            gone = MessageQueue("orders", "gone", 0)
            with pytest.raises(BrokerUnavailable, match=NOBODY):
                await broker.send("g", gone, [outgoing()], timeout_ms=TIMEOUT_MS, one_way=True)

    play(scenario)


def test_an_answer_without_its_fields_is_broken() -> None:
    """It is in doubt whether the message was stored."""

    async def scenario(peer: Peer) -> None:
        peer.before = answering(*SENDS, answer=RemotingFrame(code=0))
        async with client(peer.address) as broker:
            with pytest.raises(FrameBroken, match="queueId"):
                await broker.send("g", QUEUE, [outgoing()], timeout_ms=TIMEOUT_MS)

    play(scenario)


def test_a_damaged_message_is_reported_and_delays_no_other() -> None:
    """Its neighbours are read."""

    async def scenario(peer: Peer) -> None:
        peer.topics["orders"] = [HeldQueue([a_stored(offset=0), a_stored(offset=1, crc=7), a_stored(offset=2)])]
        async with client(peer.address) as broker:
            found = await broker.pull("g", QUEUE, Filter(), 0, batch_max=32, wait_ms=0)
        assert found.next_offset == 3
        assert [(each.queue_offset, each.message.body) for each in found.messages] == [
            (0, b"hello"),
            (1, b""),
            (2, b"hello"),
        ]
        assert ["damaged" in each.unreadable for each in found.messages] == [False, True, False]
        assert found.messages[1].offset_id  # by which it can be sent back

    play(scenario)


def test_a_slave_is_read_from_on_the_suggestion_of_its_master() -> None:
    """Until it is gone; then its master is asked again."""

    async def scenario(peer: Peer) -> None:
        with remoting_peer() as slave:
            slave.before = answering(Operation.PULL, answer=RemotingFrame(code=19, fields={"nextBeginOffset": "7"}))
            pointed = RemotingFrame(code=19, fields={"nextBeginOffset": "5", "suggestWhichBrokerId": "1"})
            route = {"broker-a": {0: peer.address, 1: slave.address}}
            peer.before = lambda request: brokers(**route) if request.code == Operation.ROUTE else pointed

            async def next_offset() -> int:
                pulled = await broker.pull("g", QUEUE, Filter(), 5, batch_max=1, wait_ms=0)
                return pulled.next_offset

            async with client(peer.address) as broker:
                assert [await next_offset() for _ in range(2)] == [5, 7]
                route["broker-a"] = {0: peer.address, 1: NOBODY}
                await broker.route("orders")
                with pytest.raises(BrokerUnavailable):
                    await next_offset()
                assert await next_offset() == 5

    play(scenario)


def test_brokers_that_do_not_answer_are_passed_over() -> None:
    """By heartbeats and locks, unless none answers."""

    async def scenario(peer: Peer) -> None:
        given = json.dumps({"lockOKMQSet": [{"topic": "orders", "brokerName": "broker-a", "queueId": 0}]}).encode()
        others = answering(Operation.HEARTBEAT, Operation.LOCK, answer=RemotingFrame(code=0, body=given))
        route = {"broker-a": {0: peer.address}, "gone": {0: NOBODY}}
        peer.before = lambda request: brokers(**route) if request.code == Operation.ROUTE else others(request)
        async with client(peer.address) as broker:
            await broker.heartbeat(["p"], [])  # to nobody: none is known yet
            await broker.route("orders")
            await broker.heartbeat(["p"], [])
            queues = [QUEUE, MessageQueue("orders", "gone", 0)]
            assert await broker.lock("g", queues) == {QUEUE}
            peer.before = answering(Operation.HEARTBEAT, answer=RemotingFrame(code=1, remark="no"))
            with pytest.raises(BrokerUnavailable):
                await broker.heartbeat(["p"], [])

    play(scenario)


def test_whether_a_cluster_is_there_is_known_before_it_is_used() -> None:
    """Danger: a daemon with a wrong name server said that all was well until its first client came."""

    async def scenario(peer: Peer) -> None:
        told: list[tuple[str, str]] = []
        options = RemotingOptions(names=(NOBODY,), request_timeout_ms=TIMEOUT_MS)
        broker = RemotingBroker(options, told=lambda event, **fields: told.append((event, fields["address"])))
        was_away = broker.is_away
        await broker.look()
        assert (was_away, broker.is_away) == (False, True)
        assert told == [("broker_unreachable", NOBODY)]
        assert "Connection refused" in broker.errors[NOBODY]
        await broker.close()
        async with client(peer.address) as there:
            assert isinstance(there, RemotingBroker)
            peer.before = answering(Operation.CLUSTER, answer=RemotingFrame(code=0))
            await there.look()
            assert not there.is_away
            assert [each.code for each in peer.asked] == [Operation.CLUSTER]

    play(scenario)


def test_a_cluster_is_away_while_none_of_its_brokers_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers is enough; those that do not are looked at, and forgotten when they are gone for good."""
    monkeypatch.setattr(reach, "FORGOTTEN_AFTER_LOOKS", 3)

    async def scenario(peer: Peer) -> None:
        told: list[str] = []
        with remoting_peer() as names:
            where = {"broker-a": {0: peer.address}, "gone": {0: NOBODY}}
            names.before = answering(Operation.ROUTE, Operation.CLUSTER, answer=brokers(**where))
            peer.before = answering(Operation.HEARTBEAT, answer=RemotingFrame(code=0))
            options = RemotingOptions(names=(names.address,), request_timeout_ms=300)
            broker = RemotingBroker(options, told=lambda event, **_: told.append(event))
            await broker.route("orders")
            with pytest.raises(BrokerUnavailable):
                await broker.queue_range(MessageQueue("orders", "gone", 0))
            assert (list(broker.errors), broker.is_away) == ([NOBODY], False)
            peer.stops_at = lambda request: request.code == Operation.BEGIN_OFFSET
            with pytest.raises(BrokerUnavailable):
                await broker.queue_range(QUEUE)
            assert broker.is_away
            await broker.look()
            assert (list(broker.errors), broker.is_away) == ([NOBODY], False)
            assert told == ["broker_unreachable", "broker_unreachable", "broker_reachable"]
            for _ in range(2):
                await broker.look()
            assert not broker.errors
            await broker.close()

    play(scenario)


def test_an_idle_client_notices_that_its_broker_was_killed() -> None:
    """Every few looks the masters are asked, also those that answered; a new one is known from its first answer on."""

    async def scenario(peer: Peer) -> None:
        told: list[str] = []
        with remoting_peer() as names:
            names.before = answering(Operation.ROUTE, Operation.CLUSTER, answer=brokers(**{"broker-a": {0: NOBODY}}))
            options = RemotingOptions(names=(names.address,), request_timeout_ms=300)
            broker = RemotingBroker(options, told=lambda event, **_: told.append(event))
            await broker.route("orders")
            assert not broker.is_away
            for _ in range(5):
                await broker.look()
            assert (list(broker.errors), broker.is_away, told) == ([NOBODY], True, ["broker_unreachable"])
            await broker.close()

    play(scenario)


def test_a_broker_in_the_place_of_a_name_server_is_away_until_it_is_one() -> None:
    """It answers each look, and is told of once."""

    async def scenario(peer: Peer) -> None:
        told: list[str] = []
        peer.before = answering(Operation.CLUSTER, answer=RemotingFrame(code=3, remark="not supported"))
        options = RemotingOptions(names=(peer.address,), request_timeout_ms=300)
        broker = RemotingBroker(options, told=lambda event, **_: told.append(event))
        for _ in range(3):
            await broker.look()
        assert (list(broker.errors), broker.is_away, told) == ([peer.address], True, ["broker_unreachable"])
        peer.before = answering(Operation.CLUSTER, answer=RemotingFrame(code=0))
        for _ in range(3):
            await broker.look()
        assert (broker.errors, broker.is_away, told) == ({}, False, ["broker_unreachable", "broker_reachable"])
        await broker.close()

    play(scenario)


def test_a_new_connection_begins_with_the_last_heartbeat() -> None:
    """A broker forgets a client with its connection, and would serve no pull until the next heartbeat."""

    async def scenario(peer: Peer) -> None:
        silent = [True]
        peer.before = answering(Operation.HEARTBEAT, answer=RemotingFrame(code=0))
        peer.stops_at = lambda request: request.code == Operation.END_OFFSET and silent.pop() if silent else False
        with remoting_peer() as names:
            names.before = answering(Operation.ROUTE, answer=brokers(**{"broker-a": {0: peer.address}}))
            broker = RemotingBroker(RemotingOptions(names=(names.address,), request_timeout_ms=300), client_id="me")
            await broker.route("orders")
            await broker.heartbeat([], [Presence("g", {"orders": Filter()})])
            with pytest.raises(BrokerUnavailable, match="no answer"):
                await broker.queue_range(QUEUE)
            await broker.queue_range(QUEUE)
            await broker.close()
        codes = [each.code for each in peer.asked]
        begin, end = Operation.BEGIN_OFFSET, Operation.END_OFFSET
        assert codes == [Operation.HEARTBEAT, begin, Operation.HEARTBEAT, begin, end]

    play(scenario)


def test_the_next_name_server_is_asked_when_one_is_gone() -> None:
    """And stays the first that is asked."""

    async def scenario(peer: Peer) -> None:
        with remoting_peer() as failing:
            failing.before = lambda _: RemotingFrame(code=1)
            async with client(NOBODY, failing.address, peer.address) as broker:
                for _ in range(2):
                    assert (await broker.route("orders")).writable == (QUEUE,)
            assert len(failing.asked) == 1
        async with client(NOBODY, peer.address) as broker:
            with pytest.raises(Refused) as refused:
                await broker.route("unknown")
            assert refused.value.rule is Rule.TOPIC_UNKNOWN
        async with client(NOBODY) as broker:
            with pytest.raises(BrokerUnavailable, match=NOBODY):
                await broker.route("orders")

    play(scenario)


def test_no_member_of_a_group_is_online() -> None:
    """A broker answers that with an error of no code of its own, which is not to be taken for any other failure."""

    async def scenario(peer: Peer) -> None:
        peer.before = answering(Operation.MEMBERS, answer=RemotingFrame(code=1, remark="no consumer for this group, g"))
        async with client(peer.address) as broker:
            assert await broker.members("g", "orders") == ()
            peer.before = answering(Operation.MEMBERS, answer=RemotingFrame(code=1, remark="AclException: no"))
            with pytest.raises(Refused) as refused:
                await broker.members("g", "orders")
            assert refused.value.rule is Rule.UNAUTHORIZED
            peer.before = answering(Operation.MEMBERS, answer=RemotingFrame(code=1, remark="a bug"))
            with pytest.raises(BrokerUnavailable, match="a bug"):
                await broker.members("g", "orders")

    play(scenario)


def nearest(queue: HeldQueue, stored_at_ms: int) -> int:
    """The offset that RocketMQ 4 names for a time: of any message that is nearest to it."""
    times = [each.stored_at_ms for message in queue.messages for each in decode_messages(message)]
    return queue.begin + min(range(len(times)), key=lambda at: (abs(times[at] - stored_at_ms), -at), default=0)


@pytest.mark.parametrize("pull_max", [1, 2, 32])
def test_a_time_is_found_in_a_queue_of_rocketmq_4(pull_max: int) -> None:
    """It names the nearest message, perhaps one too early, or one of many that were stored at the same time."""
    times = [10, 20, 20, *[30] * 40, 40, 50]

    async def scenario(peer: Peer) -> None:
        held = HeldQueue([a_stored(offset=7 + at, stored_at_ms=each) for at, each in enumerate(times)], begin=7)
        empty = HeldQueue(begin=3)
        peer.topics["orders"], peer.pull_max = [held, empty], pull_max

        def as_version_4(request: RemotingFrame) -> RemotingFrame | None:
            if request.code != Operation.OFFSET_AT:
                return None
            queue = peer.topics["orders"][int(request.fields["queueId"])]
            found = nearest(queue, int(request.fields["timestamp"]))
            return RemotingFrame(code=0, fields={"offset": str(found)}, version=407)

        peer.before = as_version_4
        async with client(peer.address) as broker:
            for stored_at_ms in (1, 10, 11, 14, 15, 20, 26, 30, 31, 39, 40, 50, 51, 99):
                found = await broker.offset_at(QUEUE, stored_at_ms)
                assert found == held.offset_at(stored_at_ms), stored_at_ms
            assert await broker.offset_at(QUEUE._replace(queue_id=1), 5) == 3

    play(scenario)


class Heard:
    """What a broker said by itself."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def members_changed(self, group: str) -> None:
        self.said.append(group)

    def check(self, check: TransactionCheck) -> None:
        self.said.append((check.group, check.message.message.body, check.broker))

    def offsets_reset(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        self.said.append((group, dict(offsets)))

    def state_of(self, group: str) -> MemberState | None:
        return MemberState({"orders": Filter("a")}, [], False, 5) if group == "g" else None


def test_requests_of_brokers_are_passed_on() -> None:
    """Once somebody listens; what cannot be read is passed over, and the connection goes on."""
    table = b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:7}}'
    said = [
        RemotingFrame(code=Operation.MEMBERS_CHANGED, is_one_way=True, fields={"consumerGroup": "g"}),
        RemotingFrame(code=Operation.CHECK_TRANSACTION, is_one_way=True, body=a_stored(properties={"PGROUP": "p"})),
        RemotingFrame(code=Operation.CHECK_TRANSACTION, is_one_way=True, body=a_stored(crc=1)),
        RemotingFrame(code=Operation.RESET_OFFSETS_HERE, is_one_way=True, fields={"group": "g"}, body=table),
        RemotingFrame(code=Operation.RESET_OFFSETS_HERE, is_one_way=True, fields={"group": "g"}, body=b"no"),
    ]

    async def scenario(peer: Peer) -> None:
        heard = Heard()
        async with client(peer.address) as broker:
            await broker.route("orders")
            peer.says = list(said)
            await broker.route("orders")
            broker.attach(heard)
            peer.says = list(said)
            await broker.queue_range(QUEUE)
        assert heard.said == ["g", ("p", b"hello", "broker-a"), ("g", {QUEUE: 7})]

    play(scenario)


def test_a_member_reports_its_own_queues_on_request() -> None:
    """Its broker passes the question on; of a group that it is not in, and before somebody listens, it says so."""
    asks = [
        RemotingFrame(code=Operation.RUNNING_INFO, opaque=7, fields={"consumerGroup": group}) for group in ("g", "h")
    ]

    async def scenario(peer: Peer) -> None:
        async with client(peer.address) as broker:
            await broker.route("orders")
            peer.says = asks[:1]
            await broker.route("orders")
            broker.attach(Heard())
            peer.says = list(asks)
            await broker.queue_range(QUEUE)
            await broker.queue_range(QUEUE)  # its answers came before
        nobody, found, other = [each for each in peer.asked if each.is_answer]
        assert nobody.code == Result.UNSUPPORTED
        assert (found.code, found.opaque) == (0, 7)
        assert decode_running(found.body) == ({"orders": Filter("a")}, [], False, 5)
        assert (other.code, other.remark) == (Result.FAILED, "this client has no consumer of group h")

    play(scenario)


def test_operators_see_failures() -> None:
    """No broker to make a topic at, one of another name, and an answer that is none."""

    async def scenario(peer: Peer) -> None:
        clusters = {name: RemotingFrame(code=0, body=body) for name, body in CLUSTERS.items()}
        answers = {
            Operation.CLUSTER: clusters["none"],
            Operation.TOPIC_STATS: RemotingFrame(code=0, body=b'{"offsetTable":7}'),
        }
        peer.before = lambda request: answers.get(Operation(request.code))
        async with RemotingAdmin(RemotingOptions(names=(peer.address,))) as admin:
            with pytest.raises(BrokerUnavailable, match="know no broker"):
                await admin.make_topic("t")
            answers[Operation.CLUSTER] = clusters["one"]
            with pytest.raises(Refused, match="no broker of this name"):
                await admin.make_topic("t", brokers=["b"])
            with pytest.raises(BrokerUnavailable, match="no master"):
                await admin.make_topic("t")
            with pytest.raises(FrameBroken, match="the queues of orders"):
                await admin.topic_stats("orders")

    play(scenario)


def test_the_package_is_light() -> None:
    """Neither gRPC nor protobuf is loaded with it, nor what unpacks bodies of which none came yet."""
    heavy = ("grpc", "google.protobuf", "lz4", "zstandard")
    code = f"import sys, broker_adapter.remoting; print([each for each in {heavy} if each in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_long_poll_is_answered_late() -> None:
    """A broker looks every few seconds at what waits: an answer behind its time and the usual patience still counts."""

    async def scenario(peer: Peer) -> None:
        def late(request: RemotingFrame) -> None:
            if request.code == Operation.PULL:
                time.sleep(2.5)

        peer.before = late
        options = RemotingOptions(names=(peer.address,), request_timeout_ms=2_000)
        broker = RemotingBroker(options, client_id="me")
        assert await broker.pull("g", QUEUE, Filter(), 0, batch_max=1, wait_ms=1) == ([], 0, False)
        await broker.close()

    play(scenario)
