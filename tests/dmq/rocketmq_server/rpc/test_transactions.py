"""Half messages, their end and the question to a producer, as wire messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from support.clients.wire.protocol import a_message, a_send, from_client
from support.rigs.broker.rig import EmbeddedRig, play, receive

from broker_adapter.contracts.transactions import Check
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.rpc.transactions import SENT_TOPICS_MAX, Producers
from dmq.rocketmq_server.sessions.sessions import ClientSession, Sessions, TelemetryOutbox
from dmq.rocketmq_server.sessions.settings import SidecarConfig

TOPIC = wire.Resource(name="orders")
HOUR_S = 3_600


class _Quiet:
    def call_done(self, rpc: str, code: int, seconds: float) -> None:
        pass


class Served:
    """The sidecar in front of an embedded broker."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.rig = rig
        self.config = SidecarConfig(delay_levels_ms=(1_000, 5_000))
        self.service = MessagingService(
            rig.broker, rig.clock, Sessions(rig.clock), self.config, rig.broker.transactions
        )
        self.dispatcher = Dispatcher(self.service, clock=rig.clock, observer=_Quiet())

    async def ask(self, rpc: str, request: Message, call: Call | None = None) -> Any:  # noqa: ANN401 - one class per RPC
        """Return the answer of an RPC."""
        answer = await self.dispatcher.unary(rpc)(request.SerializeToString(), call or from_client())
        return wire.METHODS[rpc].response_class.FromString(answer)

    async def send(self, *messages: wire.Message) -> wire.SendMessageResponse:
        """Send messages in one request."""
        answer = await self.ask("SendMessage", a_send(*messages))
        assert isinstance(answer, wire.SendMessageResponse)
        return answer

    async def end(
        self,
        transaction_id: str,
        resolution: wire.TransactionResolution = wire.COMMIT,
        topic: wire.Resource = TOPIC,
        source: wire.TransactionSource = wire.SOURCE_CLIENT,
    ) -> wire.Status:
        """End a transaction."""
        request = wire.EndTransactionRequest(
            topic=topic, transaction_id=transaction_id, resolution=resolution, source=source
        )
        answer = await self.ask("EndTransaction", request)
        assert isinstance(answer, wire.EndTransactionResponse)
        return answer.status

    def connect(self, client_id: str, *topics: str) -> Stream:
        """Open a telemetry stream as a producer of ``topics``."""
        return Stream(self, client_id, topics)


class Stream:
    """A telemetry stream of a producer."""

    def __init__(self, served: Served, client_id: str, topics: tuple[str, ...]) -> None:
        self._closed = asyncio.Event()
        self._topics = topics
        self._frames = served.dispatcher.telemetry()(self._bodies(), from_client(client_id))

    async def next(self) -> wire.TelemetryCommand:
        """Return the next frame from the server."""
        async with asyncio.timeout(10):
            return wire.TelemetryCommand.FromString(await anext(self._frames))

    async def close(self) -> None:
        """Hang up."""
        self._closed.set()
        async with asyncio.timeout(10):
            assert [frame async for frame in self._frames] == []

    async def _bodies(self) -> AsyncIterator[bytes]:
        publishing = wire.Publishing(topics=[wire.Resource(name=topic) for topic in self._topics])
        settings = wire.Settings(client_type=wire.PRODUCER, publishing=publishing)
        yield wire.TelemetryCommand(settings=settings).SerializeToString()
        await self._closed.wait()


def run(tmp_path: Path, scenario: Callable[[Served], Coroutine[object, object, None]]) -> None:
    """Run a scenario on a broker in memory."""

    async def on_rig(rig: EmbeddedRig) -> None:
        await scenario(Served(rig))

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), on_rig))


def a_half(message_id: str = "01A", **properties: str) -> wire.Message:
    """A half message as clients send it."""
    message = a_message(message_id, properties=properties)
    message.system_properties.message_type = wire.TRANSACTION
    return message


async def due(served: Served, ms: int) -> list[wire.Message]:
    """Let time pass and return what a consumer gets then."""
    await served.rig.pass_ms(ms)
    return [wire.Message.FromString(each.payload) for each in await receive(served.rig, topic="orders")]


def test_a_half_message_is_committed(tmp_path: Path) -> None:
    """Its entry has a transaction id; after the commit consumers get it, with its type, and a second commit is OK."""

    async def scenario(served: Served) -> None:
        answer = await served.send(a_half("01A"), a_half("01B"))
        assert [entry.message_id for entry in answer.entries] == ["01A", "01B"]
        assert {entry.status.code for entry in answer.entries} == {answer.status.code} == {wire.OK}
        first, second = (entry.transaction_id for entry in answer.entries)
        assert not await due(served, 0)
        for _ in range(2):
            assert (await served.end(first)).code == wire.OK
            assert (await served.end(second, wire.ROLLBACK)).code == wire.OK
        (found,) = await due(served, 0)
        assert (found.system_properties.message_id, found.system_properties.message_type) == ("01A", wire.TRANSACTION)
        assert (await served.end(first, wire.ROLLBACK)).code == wire.INVALID_TRANSACTION_ID
        again = await served.send(a_half("01B"))
        assert again.status.code == again.entries[0].status.code == wire.ILLEGAL_MESSAGE_ID

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("properties", "delay_ms"),
    [({"DELAY": "2"}, 5_000), ({"TIMER_DELAY_SEC": "7"}, 7_000), ({"TIMER_DELAY_MS": "9"}, 9)],
)
def test_relative_delays_begin_at_the_commit(tmp_path: Path, properties: dict[str, str], delay_ms: int) -> None:
    """Levels too; and the properties that said so are gone, as with any delayed message."""

    async def scenario(served: Served) -> None:
        answer = await served.send(a_half(**properties))
        assert not await due(served, 60_000)
        assert (await served.end(answer.entries[0].transaction_id)).code == wire.OK
        assert not await due(served, delay_ms - 1)
        (found,) = await due(served, 1)
        assert not found.user_properties

    run(tmp_path, scenario)


def test_a_delivery_timestamp_stays(tmp_path: Path) -> None:
    """It counts whenever the commit comes before it."""

    async def scenario(served: Served) -> None:
        message = a_half()
        message.system_properties.delivery_timestamp.seconds = served.rig.clock.now_ms() // 1000 + 100
        answer = await served.send(message)
        served.rig.clock.advance(60_000)
        assert (await served.end(answer.entries[0].transaction_id)).code == wire.OK
        assert not await due(served, 30_000)
        assert len(await due(served, 10_000)) == 1

    run(tmp_path, scenario)


def test_each_fault_has_its_code(tmp_path: Path) -> None:
    """40014, 40000, 40008 as the real server says, and nothing is stored; 40000 for no outcome."""

    async def scenario(served: Served) -> None:
        grouped, late, negative = a_half(), a_half(), a_half()
        grouped.system_properties.message_group = "a"
        late.system_properties.orphaned_transaction_recovery_duration.seconds = HOUR_S + 1
        negative.system_properties.orphaned_transaction_recovery_duration.seconds = -1
        for wrong, code in (
            ([grouped], wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
            ([a_half(), a_message("01B")], wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
            ([a_message("01B"), a_half()], wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
            ([late], wire.BAD_REQUEST),
            ([negative], wire.BAD_REQUEST),
            ([a_half(TIMER_DELAY_MS="x")], wire.ILLEGAL_DELIVERY_TIME),
        ):
            answer = await served.send(*wrong)
            assert answer.status.code == code
        assert served.rig.store.pending() == {}
        late.system_properties.orphaned_transaction_recovery_duration.seconds = HOUR_S
        transaction_id = (await served.send(late)).entries[0].transaction_id
        for text in ("", "  ", "nonsense", transaction_id[:-2]):
            assert (await served.end(text)).code == wire.INVALID_TRANSACTION_ID
        other = wire.Resource(name="others")
        assert (await served.end(transaction_id, topic=other)).code == wire.INVALID_TRANSACTION_ID
        nothing = wire.TRANSACTION_RESOLUTION_UNSPECIFIED
        assert (await served.end(transaction_id, nothing)).code == wire.BAD_REQUEST
        assert (await served.end(transaction_id)).code == wire.OK

    run(tmp_path, scenario)


def test_a_producer_of_the_topic_is_asked_on_its_stream(tmp_path: Path) -> None:
    """Not one of another topic; with the message as it was sent, and the id that ends the transaction."""

    async def scenario(served: Served) -> None:
        one, other = served.connect("one", "orders"), served.connect("other", "others")
        for stream in (one, other):
            assert (await stream.next()).HasField("settings")
        answer = await served.send(a_half(color="red"))
        assert not await due(served, 6_000)
        frame = await one.next()
        command = frame.recover_orphaned_transaction_command
        assert (frame.status.code, command.transaction_id) == (wire.OK, answer.entries[0].transaction_id)
        assert (command.message.body, dict(command.message.user_properties)) == (b"body", {"color": "red"})
        assert command.message.system_properties.body_digest.checksum  # without it Node asks nobody
        assert (await served.end(command.transaction_id, source=wire.SOURCE_SERVER_CHECK)).code == wire.OK
        await other.close()
        await one.close()
        assert not served.service._transactions.producers.is_live("orders")

    run(tmp_path, scenario)


def test_a_producer_of_half_messages_is_asked_with_any_settings(tmp_path: Path) -> None:
    """Clients may send to topics that they did not name at their start."""

    async def scenario(served: Served) -> None:
        stream = served.connect("client-1")
        await stream.next()
        await served.send(a_half())
        await due(served, 6_000)
        assert (await stream.next()).HasField("recover_orphaned_transaction_command")
        await stream.close()

    run(tmp_path, scenario)


def a_check(number: int) -> Check:
    """A check of a message of its own."""
    return Check("orders", f"m-{number}", f"t-{number}", a_half().SerializeToString(), 1)


def test_producers_are_asked_in_turn() -> None:
    """One that is silent does not get all the questions; one whose stream is closed gets none."""

    async def scenario() -> None:
        producers, streams = Producers(), [TelemetryOutbox(), TelemetryOutbox(), TelemetryOutbox()]
        for number, outbox in enumerate(streams):
            for topic in ("orders", "others"):
                producers.sent(f"client-{number}", topic, outbox)
        streams[2].close()
        for number in range(8):
            assert await producers.check(a_check(number))
        for outbox in streams[:2]:
            outbox.close()
            asked = [frame.recover_orphaned_transaction_command.transaction_id async for frame in outbox]
            assert len(asked) == 4
        assert not await producers.check(a_check(9))
        for number, outbox in enumerate(streams):
            assert producers.is_live("orders")
            producers.left(f"client-{number}", TelemetryOutbox())
            producers.left(f"client-{number}", outbox)
        assert not producers.is_live("orders")
        assert not await producers.check(a_check(9))

    asyncio.run(scenario())


def a_session(outbox: TelemetryOutbox, *topics: str) -> ClientSession:
    """What a producer with these topics told about itself."""
    settings = wire.Settings(publishing=wire.Publishing(topics=[wire.Resource(name=topic) for topic in topics]))
    return ClientSession(
        client_id="one",
        client_type=wire.PRODUCER,
        group="",
        language="JAVA",
        version="5.2.0",
        last_seen_s=0.0,
        outbox=outbox,
        settings=settings,
    )


def test_settings_replace_earlier_ones() -> None:
    """Danger: every topic that a stream ever named was kept, 158 bytes for each that came. What it sent to stays."""
    producers, outbox = Producers(), TelemetryOutbox()
    producers.sent("one", "sent", outbox)
    for number in range(3):
        producers.told(a_session(outbox, f"t-{number}", "always", "sent"))
        live = [each for each in ("t-0", "t-1", "t-2", "always", "sent") if producers.is_live(each)]
        assert live == [f"t-{number}", "always", "sent"]
    producers.told(a_session(outbox))
    assert not producers.is_live("always")
    assert producers.is_live("sent")
    newer = TelemetryOutbox()
    producers.told(a_session(newer, "t-0"))
    producers.left("one", outbox)  # of its streams the newest counts
    assert producers.is_live("t-0")
    assert producers.is_live("sent")
    producers.left("one", newer)
    assert not (producers._by_topic)
    assert not (producers._told)
    assert not (producers._sent)


def test_topics_that_a_client_sent_to_are_bounded() -> None:
    """The one that it used longest ago is forgotten, unless its settings name it."""
    producers, outbox = Producers(), TelemetryOutbox()
    producers.told(a_session(outbox, "t-1"))
    for number in range(SENT_TOPICS_MAX):
        producers.sent("one", f"t-{number}", outbox)
    producers.sent("one", "t-0", outbox)
    producers.sent("one", "new-1", outbox)
    producers.sent("one", "new-2", outbox)
    assert [producers.is_live(f"t-{number}") for number in range(4)] == [True, True, False, True]
    producers.gone("one")
    assert not (producers._by_topic)
    assert not (producers._told)
    assert not (producers._sent)


def test_a_full_stream_is_waited_for() -> None:
    """More questions than a stream holds all arrive, as its client reads."""

    async def scenario() -> None:
        producers, outbox = Producers(), TelemetryOutbox()
        producers.sent("one", "orders", outbox)

        async def ask() -> None:
            for number in range(40):
                assert await producers.check(a_check(number))
            outbox.close()

        asking = asyncio.ensure_future(ask())
        asked = [frame.recover_orphaned_transaction_command.transaction_id async for frame in outbox]
        await asking
        assert asked == [f"t-{number}" for number in range(40)]

    asyncio.run(scenario())
