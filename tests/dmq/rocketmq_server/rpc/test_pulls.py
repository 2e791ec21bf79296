"""Reading by offset, as clients ask and are answered: over the embedded broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.clients.wire.protocol import GROUP, TOPIC, Sidecar, consumer_settings, from_client
from support.forges.messages.letters import a_message
from support.rigs.broker.rig import EmbeddedRig, an_envelope, play, until

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.sessions.settings import SidecarConfig

RPCS = ("PullMessage", "GetOffset", "UpdateOffset", "QueryOffset")
SECOND = 1_000_000_000


class Scene:
    """A sidecar whose pulls go to an embedded broker with one queue per topic."""

    def __init__(self, rig: EmbeddedRig, config: SidecarConfig | None) -> None:
        self.rig = rig
        self.sidecar = Sidecar(rig.clock, config, pulls=rig.broker.pulls)

    async def send(self, *message_ids: str) -> None:
        """Put messages into the queue."""
        await self.rig.broker.send([a_message(each, tag=each[0]) for each in message_ids])

    async def ask(self, rpc: str, language: str = "JAVA", **fields: Any) -> Any:  # noqa: ANN401
        """Return the answer, or the first frame of several, to a request about queue 0 of the topic."""
        return (await self.frames(rpc, language, **fields))[0]

    async def frames(self, rpc: str, language: str = "JAVA", **fields: Any) -> list[Any]:  # noqa: ANN401
        """Return the frames that answer a request about queue 0 of the topic."""
        request: Any = wire.METHODS[rpc].request_class(message_queue=wire.MessageQueue(topic=TOPIC))
        if rpc != "QueryOffset":
            request.group.CopyFrom(GROUP)
        request.MergeFrom(wire.METHODS[rpc].request_class(**fields))
        call = from_client(language=language)
        if rpc == "PullMessage":
            return await self.sidecar.stream(rpc, request, call)
        return [await self.sidecar.ask(rpc, request, call)]

    @property
    def waiting(self) -> int:
        """How many pulls wait in the broker."""
        return self.rig.broker.pulls.tails.waiting


def run(
    path: Path, scenario: Callable[[Scene], Coroutine[object, object, None]], config: SidecarConfig | None = None
) -> None:
    async def scene(rig: EmbeddedRig) -> None:
        await scenario(Scene(rig, config))

    asyncio.run(play(EmbeddedRig(path, on_disk=False, queues=1), scene))


def test_a_pull_answers_status_messages_and_next_offset(tmp_path: Path) -> None:
    """In this order; a message carries what a delivery does, but for the lease that there is not."""

    async def scenario(scene: Scene) -> None:
        scene.sidecar.service.listening_at("10.1.2.3", 8081)
        await scene.send("a-0", "a-1", "a-2")
        frames = await scene.frames("PullMessage", offset=1, batch_size=1)
        assert [frame.WhichOneof("content") for frame in frames] == ["status", "message", "next_offset"]
        assert (frames[0].status.code, frames[2].next_offset) == (wire.OK, 2)
        message = frames[1].message
        system = message.system_properties
        assert (message.topic, message.body, dict(message.user_properties)) == (TOPIC, b"body", {"color": "red"})
        assert (system.message_id, system.tag, system.queue_id, system.queue_offset) == ("a-1", "a", 0, 1)
        assert (system.store_host, system.message_type) == ("10.1.2.3:8081", wire.NORMAL)
        assert system.store_timestamp.ToMilliseconds() == scene.rig.clock.now_ms()
        assert (system.delivery_attempt, system.body_digest.type) == (1, wire.MD5)
        assert not system.HasField("receipt_handle")
        assert not system.HasField("invisible_duration")

    run(tmp_path, scenario)


def test_an_empty_pull_returns_the_next_offset(tmp_path: Path) -> None:
    """40401 and the next offset, also when that is 0, and behind what the filter passed over."""

    async def scenario(scene: Scene) -> None:
        await scene.rig.broker.route(TOPIC.name)
        frames = await scene.frames("PullMessage")
        assert (frames[0].status.code, frames[1].WhichOneof("content")) == (wire.MESSAGE_NOT_FOUND, "next_offset")
        await scene.send("a-0", "b-1", "a-2")
        none = wire.FilterExpression(type=wire.TAG, expression="c")
        frames = await scene.frames("PullMessage", filter_expression=none)
        assert (frames[0].status.code, frames[1].next_offset) == (wire.MESSAGE_NOT_FOUND, 3)
        some = wire.FilterExpression(type=wire.SQL, expression="TAGS = 'b'")
        frames = await scene.frames("PullMessage", filter_expression=some)
        assert [frame.message.system_properties.message_id for frame in frames[1:-1]] == ["b-1"]

    run(tmp_path, scenario)


def test_offsets_are_committed_kept_and_queried(tmp_path: Path) -> None:
    """Where the queue begins and ends, what was stored from a time on, and where a group continues."""

    async def scenario(scene: Scene) -> None:
        await scene.send("a-0")
        scene.rig.clock.advance(1_000)
        await scene.send("a-1")
        now = wire.Timestamp(seconds=scene.rig.clock.now_ms() // 1000)
        assert (await scene.ask("QueryOffset")).offset == 0
        assert (await scene.ask("QueryOffset", query_offset_policy=wire.END)).offset == 2
        for timestamp, offset in ((now, 1), (wire.Timestamp(seconds=now.seconds, nanos=1), 2), (wire.Timestamp(), 0)):
            answer = await scene.ask("QueryOffset", query_offset_policy=wire.TIMESTAMP, timestamp=timestamp)
            assert (answer.status.code, answer.offset) == (wire.OK, offset)
        assert (await scene.ask("GetOffset")).status.code == wire.OFFSET_NOT_FOUND
        assert (await scene.ask("UpdateOffset", offset=2)).status.code == wire.OK
        answer = await scene.ask("GetOffset")
        assert (answer.status.code, answer.offset) == (wire.OK, 2)

    run(tmp_path, scenario)


def queue(topic: str = "orders", queue_id: int = 0) -> dict[str, Any]:
    return {"message_queue": wire.MessageQueue(topic=wire.Resource(name=topic), id=queue_id)}


@pytest.mark.parametrize(
    ("rpc", "fields", "code", "text"),
    [
        *((rpc, queue("unknown"), wire.TOPIC_NOT_FOUND, "'unknown'") for rpc in RPCS),
        *((rpc, queue("no topic"), wire.ILLEGAL_TOPIC, "") for rpc in RPCS),
        *((rpc, queue(queue_id=1), wire.BAD_REQUEST, "limit 0..0") for rpc in RPCS),
        *((rpc, queue(queue_id=-1), wire.BAD_REQUEST, "got -1") for rpc in RPCS),
        *((rpc, {"group": wire.Resource(name="a b")}, wire.ILLEGAL_CONSUMER_GROUP, "") for rpc in RPCS[:3]),
        ("PullMessage", {"offset": 3}, wire.ILLEGAL_OFFSET, "got 3, limit 0..2"),
        ("PullMessage", {"offset": -1}, wire.ILLEGAL_OFFSET, "got -1, limit 0..2"),
        ("PullMessage", {"long_polling_timeout": wire.Duration(seconds=-1)}, wire.ILLEGAL_POLLING_TIME, "negative"),
        (
            "PullMessage",
            {"filter_expression": wire.FilterExpression(type=wire.SQL, expression="a =")},
            wire.ILLEGAL_FILTER_EXPRESSION,
            "",
        ),
        ("UpdateOffset", {"offset": 3}, wire.ILLEGAL_OFFSET, "got 3, limit 0..2"),
        ("UpdateOffset", {"offset": -1}, wire.ILLEGAL_OFFSET, "got -1, limit 0..2"),
        ("GetOffset", {}, wire.OFFSET_NOT_FOUND, "billing"),
        ("QueryOffset", {"query_offset_policy": wire.TIMESTAMP}, wire.BAD_REQUEST, "needs a timestamp"),
        (
            "QueryOffset",
            {"query_offset_policy": wire.TIMESTAMP, "timestamp": wire.Timestamp(nanos=SECOND)},
            wire.BAD_REQUEST,
            "nanos",
        ),
        ("QueryOffset", {"query_offset_policy": 7}, wire.BAD_REQUEST, "got 7"),
    ],
)
def test_a_faulty_request_is_refused_with_its_code(
    tmp_path: Path, rpc: str, fields: dict[str, Any], code: int, text: str
) -> None:
    """And the reason; nobody is made known by it, and nothing is logged as ours."""

    async def scenario(scene: Scene) -> None:
        await scene.send("a-0", "a-1")
        with capture_logs() as logs:
            status = (await scene.ask(rpc, **fields)).status
        assert (status.code, text in status.message) == (code, True), status
        assert (logs, scene.rig.broker.names.groups, len(scene.rig.broker.names.topics)) == ([], {}, 1)
        if code in {wire.ILLEGAL_OFFSET, wire.OFFSET_NOT_FOUND}:  # Rust clients end themselves over these two
            assert (await scene.ask(rpc, "RUST", **fields)).status.code == wire.BAD_REQUEST

    run(tmp_path, scenario)


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize("body", [b"", b"\xff" * 9, b"\x12\x02\x10\x01"])
def test_no_bytes_do_worse_than_being_refused(tmp_path: Path, rpc: str, body: bytes) -> None:
    """An empty request, one that is no message, and one that names a queue of no topic."""

    async def scenario(scene: Scene) -> None:
        dispatcher, call = scene.sidecar.dispatcher, from_client()
        if rpc == "PullMessage":
            answers = [answer async for piece in dispatcher.streaming(rpc)(body, call) for answer in piece]
        else:
            answers = [await dispatcher.unary(rpc)(body, call)]
        response: Any = wire.METHODS[rpc].response_class.FromString(answers[0])
        assert 40000 <= response.status.code < 50000

    run(tmp_path, scenario)


def test_a_waiting_pull_is_woken_drained_and_bounded(tmp_path: Path) -> None:
    """Like a receive, and counted with them: 42900 beyond the bound, the answer of an empty poll at the end."""

    async def scenario(scene: Scene) -> None:
        await scene.rig.broker.route(TOPIC.name)
        wait: dict[str, Any] = {"long_polling_timeout": wire.Duration(seconds=20)}
        woken = asyncio.ensure_future(scene.frames("PullMessage", **wait))
        await until(lambda: scene.waiting == 1)
        assert (await scene.ask("PullMessage")).status.code == wire.TOO_MANY_REQUESTS
        await scene.send("a-0")
        assert (await woken)[0].status.code == wire.OK
        drained = asyncio.ensure_future(scene.frames("PullMessage", offset=1, **wait))
        await until(lambda: scene.waiting == 1)
        scene.sidecar.service.drain()
        async with asyncio.timeout(5):
            frames = await drained
            again = await scene.frames("PullMessage", offset=1, **wait)
        assert frames == again
        assert (frames[0].status.code, frames[1].next_offset) == (wire.MESSAGE_NOT_FOUND, 1)

    run(tmp_path, scenario, SidecarConfig(receives_waiting_max=1))


def test_clients_that_pull_are_members_of_their_group(tmp_path: Path) -> None:
    """By heartbeat or by pulling, until they say goodbye; consumers of another kind are not."""

    async def scenario(scene: Scene) -> None:
        sidecar, pulls = scene.sidecar, scene.rig.broker.pulls
        for client_id, client_type in (("b", wire.PULL_CONSUMER), ("c", wire.SIMPLE_CONSUMER)):
            beat = wire.HeartbeatRequest(group=GROUP, client_type=client_type)
            assert (await sidecar.ask("Heartbeat", beat, from_client(client_id))).status.code == wire.OK
        await scene.ask("PullMessage")
        assert await pulls.members(GROUP.name) == ["b", "client-1"]
        (answer,) = await sidecar.telemetry(consumer_settings(wire.PULL_CONSUMER), call=from_client("b"))
        assert answer.status.code == wire.OK
        await scene.send("a-0")
        assert await pulls.lock(GROUP.name, "b", TOPIC.name, [0]) == [0]
        await sidecar.ask("NotifyClientTermination", wire.NotifyClientTerminationRequest(), from_client("b"))
        assert await pulls.members(GROUP.name) == ["client-1"]
        assert await pulls.lock(GROUP.name, "client-1", TOPIC.name, [0]) == [0]

    run(tmp_path, scenario)


def test_an_unreadable_message_hides_no_other(tmp_path: Path) -> None:
    """It is logged with its place, and the next offset is behind it."""

    async def scenario(scene: Scene) -> None:
        await scene.send("a-0")
        await scene.rig.broker.send([an_envelope("broken", payload=b"\xff")])
        await scene.send("a-2")
        with capture_logs() as logs:
            frames = await scene.frames("PullMessage", batch_size=32)
        found = [frame.message.system_properties.message_id for frame in frames[1:-1]]
        assert (found, frames[-1].next_offset) == (["a-0", "a-2"], 3)
        assert [(log["event"], log["queue_offset"]) for log in logs] == [("message_unreadable", 1)]

    run(tmp_path, scenario)


def test_lite_topics_are_not_served(tmp_path: Path) -> None:
    """50100 for their subscriptions and their messages, whatever is asked, and nothing is stored."""

    async def scenario(scene: Scene) -> None:
        for action in (wire.PARTIAL_ADD, wire.PARTIAL_REMOVE, wire.COMPLETE_ADD, wire.COMPLETE_REMOVE):
            request = wire.SyncLiteSubscriptionRequest(action=action, topic=TOPIC, group=GROUP, lite_topic_set=["x"])
            answer = await scene.sidecar.ask("SyncLiteSubscription", request)
            assert answer.status.code == wire.NOT_IMPLEMENTED
        message = wire.Message(topic=TOPIC, body=b"body")
        message.system_properties.message_id = "01A"
        message.system_properties.message_type = wire.LITE
        message.system_properties.lite_topic = "x"
        answer = await scene.sidecar.ask("SendMessage", wire.SendMessageRequest(messages=[message]))
        assert answer.status.code == answer.entries[0].status.code == wire.NOT_IMPLEMENTED
        assert scene.sidecar.broker.stored(TOPIC.name) == []

    run(tmp_path, scenario)
