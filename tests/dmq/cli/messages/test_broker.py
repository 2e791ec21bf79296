"""``dmq broker``: what it asks a name server and a broker, prints and exits with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.forges.messages.stored import a_stored
from support.rigs.commands.fake_admin_client import run_dmq
from support.rigs.rocketmq.remoting_peer import HeldQueue, Peer, remoting_peer
from typer.testing import Result

from broker_adapter.contracts import classic
from broker_adapter.contracts.classic import Filter, MemberState
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.codes import Operation
from broker_adapter.remoting.protocol.frames import RemotingFrame
from broker_adapter.remoting.protocol.requests.running import running_body

NOBODY = "127.0.0.1:1"
TOPIC, GROUP = "orders", "billing"
Answers = dict[int, RemotingFrame | Callable[[Mapping[str, str]], RemotingFrame]]


def body(found: object) -> RemotingFrame:
    return RemotingFrame(code=0, body=json.dumps(found).encode())


def table(queues: Mapping[int, Mapping[str, int]]) -> RemotingFrame:
    """A table of queues as RocketMQ writes it."""
    rows = (
        f'{{"brokerName":"broker-a","queueId":{number},"topic":"{TOPIC}"}}:{json.dumps(each)}'
        for number, each in queues.items()
    )
    return RemotingFrame(code=0, body=f'{{"offsetTable":{{{",".join(rows)}}}}}'.encode())


def state(*numbers: int, wanted: str = "*") -> RemotingFrame:
    """What a member says of itself."""
    held = [classic.HeldQueue(MessageQueue(TOPIC, "broker-a", each), 5, 2, 1, 0, 0, 10**12) for each in numbers]
    return RemotingFrame(code=0, body=running_body(MemberState({TOPIC: Filter(wanted)}, held, False, 0), []))


class Cluster:
    """A scripted cluster of one broker, and another one that is away if ``is_partly_away``."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        peer.topics[TOPIC] = [HeldQueue([a_stored()], begin=4), HeldQueue()]
        self.is_partly_away = False
        self.members: dict[str, RemotingFrame] = {}  # what each says of itself
        self.committed: dict[int, int] = {}
        group = {"consumeEnable": True, "retryMaxTimes": 16}
        self.answers: Answers = {
            Operation.TOPICS: body({"topicList": [TOPIC]}),
            Operation.BROKER_FACTS: body({"table": {"brokerVersionDesc": "V5_5_0", "putTps": "2.5 2.4 2.3"}}),
            Operation.GROUPS: body(
                {"subscriptionGroupTable": {GROUP: group, "idle": {**group, "consumeEnable": False}}}
            ),
            Operation.CONSUMER_CONNECTIONS: self._connections,
            Operation.RUNNING_INFO: lambda fields: self.members[fields["clientId"]],
            Operation.CONSUME_STATS: self._stats,
            Operation.TOPIC_STATS: table({0: {"minOffset": 4, "maxOffset": 5, "lastUpdateTimestamp": 10**12}, 1: {}}),
            Operation.COMMITTED_OFFSET: self._committed,
        }
        peer.before = self._answer

    def run(self, *arguments: str) -> Result:
        return run_dmq("broker", *arguments, "--namesrv", self.peer.address)

    def json(self, *arguments: str) -> Any:  # noqa: ANN401
        found = self.run(*arguments, "-o", "json")
        assert found.exit_code == 0, found.stderr
        return json.loads(found.stdout)

    def _answer(self, request: RemotingFrame) -> RemotingFrame | None:
        if request.code == Operation.CLUSTER:
            away = {"broker-b": {"brokerAddrs": {"0": NOBODY}}} if self.is_partly_away else {}
            brokers = {"broker-a": {"brokerAddrs": {"0": self.peer.address}}, **away}
            return body({"brokerAddrTable": brokers, "clusterAddrTable": {"main": list(brokers)}})
        answer = self.answers.get(request.code)
        return answer(request.fields) if callable(answer) else answer

    def _connections(self, fields: Mapping[str, str]) -> RemotingFrame:
        if fields["consumerGroup"] != GROUP or not self.members:
            return RemotingFrame(code=206, remark="not online")
        members = [{"clientId": each, "clientAddr": "h:1", "language": "JAVA", "version": 407} for each in self.members]
        wanted = {TOPIC: {"subString": "*", "expressionType": "TAG"}}
        return body({"connectionSet": members, "subscriptionTable": wanted, "messageModel": "CLUSTERING"})

    def _stats(self, fields: Mapping[str, str]) -> RemotingFrame:
        if fields["consumerGroup"] != GROUP or not self.committed:
            return table({})
        ends, last = {0: 5, 1: 0}, {0: 10**12}
        return table(
            {
                number: {
                    "brokerOffset": end,
                    "consumerOffset": self.committed.get(number, 0),
                    "lastTimestamp": last.get(number, 0),
                }
                for number, end in ends.items()
            }
        )

    def _committed(self, fields: Mapping[str, str]) -> RemotingFrame:
        offset = self.committed.get(int(fields["queueId"]))
        return RemotingFrame(code=22) if offset is None else RemotingFrame(code=0, fields={"offset": str(offset)})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster with a topic of two queues, and a group that nobody belongs to."""
    with remoting_peer() as peer:
        yield Cluster(peer)


def lines(found: Result) -> list[list[str]]:
    """The cells of what a command printed."""
    assert found.exit_code == 0, found.stderr
    return [line.split() for line in found.stdout.splitlines()]


def test_routes_show_the_brokers_and_the_topics(cluster: Cluster) -> None:
    """Also a broker that does not answer: that is what is looked for."""
    cluster.is_partly_away = True
    cluster.peer.topics.pop(TOPIC)  # it is in the list, and lies nowhere
    found = cluster.run("routes")
    first, second = lines(found)[1:3]
    assert first == ["main", "broker-a", "master", cluster.peer.address, "5.5.0", "2.5", "0.0", "answers"]
    assert second[:7] == ["main", "broker-b", "master", NOBODY, "-", "-", "-"]
    assert second[-2:] == ["Connection", "refused"]
    assert lines(found)[-1] == [TOPIC, "0", "0", "0"]
    brokers = cluster.json("routes")["brokers"]
    assert [(each["answers"], each["version"]) for each in brokers] == [(True, "5.5.0"), (False, None)]


def test_the_route_of_a_topic_states_the_permissions_at_each_broker(cluster: Cluster) -> None:
    """How many queues can be read and written there, and where its machines are."""
    queues = {"brokerName": "broker-a", "readQueueNums": 8, "writeQueueNums": 4, "perm": 4}
    brokers = {"brokerName": "broker-a", "brokerAddrs": {"1": "h:1", "2": "h:2"}}
    cluster.answers[Operation.ROUTE] = body({"queueDatas": [queues], "brokerDatas": [brokers]})
    assert lines(cluster.run("routes", TOPIC))[1] == ["broker-a", "8", "0", "r", "NONE", "NOW", "1=h:1", "2=h:2"]
    slaves = {"1": "h:1", "2": "h:2"}
    known = {"broker": "broker-a", "read_queues": 8, "write_queues": 0, "perm": "r", "master": None, "slaves": slaves}
    assert cluster.json("routes", TOPIC) == [known]


def test_queues_show_where_they_begin_and_end(cluster: Cluster) -> None:
    """And when a message was stored last; never is told as that."""
    first, second = lines(cluster.run("queues", TOPIC))[1:]
    assert (first[:5], first[-1]) == (["broker-a", "0", "4", "5", "1"], "ago")
    assert second == ["broker-a", "1", "0", "0", "0", "never"]
    named = {"topic": TOPIC, "broker": "broker-a"}
    assert cluster.json("queues", TOPIC) == [
        {**named, "queue": 0, "min_offset": 4, "max_offset": 5, "stored_last_at_ms": 10**12},
        {**named, "queue": 1, "min_offset": 0, "max_offset": 0, "stored_last_at_ms": None},
    ]


def test_offsets_show_lags_and_missing_commits(cluster: Cluster) -> None:
    """A broker says 0 of both; it is asked once more."""
    cluster.committed = {0: 3}
    found = lines(cluster.run("offsets", GROUP))
    assert (found[1][:6], found[1][-1]) == ([TOPIC, "broker-a", "0", "5", "3", "2"], "ago")
    assert found[2] == [TOPIC, "broker-a", "1", "0", "never", "-", "-"]
    assert found[-2:] == [["total", "lag", "2"], ["never", "committed", "1", "of", "2", "queues"]]
    cluster.committed = {0: 3, 1: 0}
    found = cluster.json("offsets", GROUP)
    assert (found["lag"], found["never_committed"]) == (2, 0)
    assert found["queues"][1]["committed_offset"] == 0


def test_a_group_that_did_nothing_yet_is_no_error(cluster: Cluster) -> None:
    """It is there, and said to have done nothing; another one is not there."""
    found = cluster.run("offsets", "idle")
    assert (found.exit_code, found.stdout) == (0, "")
    assert found.stderr == "dmq: group idle never committed an offset and has no online members\n"
    assert ["members", "nobody", "is", "online"] in lines(cluster.run("consumers", "idle"))
    assert cluster.json("offsets", "idle")["queues"] == []


def test_consumers_show_the_owner_of_each_queue(cluster: Cluster) -> None:
    """As the members say; a queue that two claim has both, and one that nobody claims is nobody's."""
    cluster.members = {"one": state(0), "two": state(0)}
    found = cluster.json("consumers", GROUP)
    assert [each["owners"] for each in found["owners"]] == [["one", "two"], []]
    assert [(each["client_id"], each["version"], len(each["queues"])) for each in found["members"]] == [
        ("one", "4.9.7", 1),
        ("two", "4.9.7", 1),
    ]
    found = cluster.run("consumers", GROUP)
    shown = [each[:5] for each in lines(found)]
    assert [TOPIC, "broker-a", "0", "one", "2"] in shown
    assert [TOPIC, "broker-a", "0", "two", "2"] in shown
    assert [TOPIC, "broker-a", "1", "nobody"] in shown
    assert [TOPIC, "*", "all", "members"] in shown
    assert found.stderr.startswith(f"dmq: queue 0 of {TOPIC} at broker-a has 2 owners: ")


def test_the_queues_of_a_member_that_does_not_answer_are_unknown(cluster: Cluster) -> None:
    """It is said which one, and why; nobody is said to have them."""
    cluster.members = {"one": state(0), "two": RemotingFrame(code=3, remark="not served by this client")}
    found = cluster.run("consumers", GROUP)
    assert [TOPIC, "broker-a", "1", "unknown"] in lines(found)
    assert found.stderr.startswith("dmq: member two does not report its queues: not implemented: not served")
    known = cluster.json("consumers", GROUP)
    assert [each["owners"] for each in known["owners"]] == [["one"], None]
    assert (known["members"][1]["answers"], known["members"][1]["queues"]) == (False, None)


def test_members_that_want_different_messages_are_seen(cluster: Cluster) -> None:
    """Each filter is there with those who have it."""
    cluster.members = {"one": state(0), "two": state(1, wanted="paid")}
    shown = lines(cluster.run("consumers", GROUP))
    assert [TOPIC, "*", "one"] in shown
    assert [TOPIC, "paid", "two"] in shown


def test_consumers_show_all_groups(cluster: Cluster) -> None:
    """With how far each is behind; one that an operator disabled is told."""
    cluster.committed, cluster.members = {0: 3}, {"one": state(0)}
    billing, idle = lines(cluster.run("consumers"))[1:]
    assert billing == [GROUP, "1", "clustering", "yes", "16", "1", "2"]
    assert idle == ["idle", "0", "-", "DISABLED", "16", "0", "0"]
    assert [each["lag"] for each in cluster.json("consumers")] == [2, 0]


def test_a_broker_that_does_not_answer_is_left_out(cluster: Cluster) -> None:
    """The others are shown, stderr says what is missing, and a script sees that something is."""
    cluster.is_partly_away, cluster.committed = True, {0: 3}
    for arguments in (("consumers",), ("consumers", GROUP), ("offsets", GROUP)):
        found = cluster.run(*arguments)
        assert found.exit_code == 6
        assert found.stdout
        assert found.stderr.count("dmq: broker broker-b is left out: the connection to") == 1, found.stderr


@pytest.mark.parametrize(
    ("arguments", "told", "code"),
    [
        (("routes", "nothing"), "topic not found", 3),
        (("queues", "nothing"), "topic not found", 3),
        (("offsets", "nobody"), "consumer group not found: there is none of this name, got 'nobody'", 3),
        (("consumers", "nobody"), "consumer group not found", 3),
        (("queues",), "Missing argument 'TOPIC'", 2),
    ],
)
def test_a_missing_object_is_reported_in_one_line(
    cluster: Cluster, arguments: tuple[str, ...], told: str, code: int
) -> None:
    """With the exit code of what it is."""
    found = cluster.run(*arguments)
    assert (found.exit_code, found.stdout) == (code, "")
    assert told in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [("routes",), ("consumers", GROUP), ("offsets", GROUP), ("queues", TOPIC)])
def test_an_unreachable_cluster_is_reported_in_one_line(cluster: Cluster, verb: tuple[str, ...]) -> None:
    """Nobody there, an address that is none, no permission, and an answer that is none."""
    ends = [run_dmq("broker", *verb, "--namesrv", names) for names in (NOBODY, "nonsense")]
    refusal = RemotingFrame(code=1, remark="org.apache.rocketmq.acl.common.AclException: No accessKey is configured")
    cluster.peer.before = lambda _: refusal
    ends.append(cluster.run(*verb))
    cluster.peer.before = lambda _: RemotingFrame(code=0, body=b"7")
    ends.append(cluster.run(*verb))
    assert [each.exit_code for each in ends] == [6, 2, 5, 6]
    assert [each.stderr.count("\n") for each in ends] == [1] * 4
    assert [each.stdout for each in ends] == [""] * 4


@pytest.mark.parametrize("verb", [("consumers",), ("consumers", GROUP), ("offsets", GROUP), ("queues", TOPIC)])
def test_brokers_that_all_refuse_are_no_empty_answer(cluster: Cluster, verb: tuple[str, ...]) -> None:
    """Name servers check no key, so they answer; what the brokers say ends the command."""
    refusal = RemotingFrame(code=1, remark="org.apache.rocketmq.acl.common.AclException: No accessKey is configured")
    names = (Operation.TOPICS, Operation.BROKER_FACTS)
    cluster.answers = {code: each if code in names else refusal for code, each in cluster.answers.items()}
    ended = cluster.run(*verb)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (5, "", 1)


def test_the_name_servers_may_come_from_the_environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a key has its secret there."""
    monkeypatch.setenv("DMQ_NAMESRV", f"{NOBODY};{cluster.peer.address}")
    monkeypatch.setenv("DMQ_CLUSTER_SECRET_KEY", "secret")
    assert run_dmq("broker", "queues", TOPIC, "--cluster-access-key", "key").exit_code == 0
    assert {each.fields["AccessKey"] for each in cluster.peer.asked} == {"key"}
