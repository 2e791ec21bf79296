"""What connected clients are asked over telemetry, and which answers count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from support.clients.wire.protocol import (
    TOPIC,
    Sidecar,
    a_message,
    a_receive,
    consumer_settings,
    from_client,
    producer_settings,
)
from support.rigs.broker.rig import until

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.calls.dispatch import StreamEnded
from dmq.rocketmq_server.rpc import commands
from dmq.rocketmq_server.rpc.commands import NoAnswer
from dmq.rocketmq_server.sessions.settings import SidecarConfig


class Connected:
    """A client with an open stream: frames go to it with ``says`` and come from it with ``hears``."""

    def __init__(self, sidecar: Sidecar, client_id: str, first: wire.TelemetryCommand) -> None:
        self._to_server: asyncio.Queue[bytes] = asyncio.Queue()
        self.says(first)
        self._stream = sidecar.dispatcher.telemetry()(self._bodies(), from_client(client_id))

    async def _bodies(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield await self._to_server.get()

    def says(self, frame: wire.TelemetryCommand) -> None:
        self._to_server.put_nowait(frame.SerializeToString())

    async def hears(self) -> wire.TelemetryCommand:
        return wire.TelemetryCommand.FromString(await anext(self._stream))

    async def close(self) -> None:
        await self._stream.aclose()


async def connected(
    sidecar: Sidecar, client_id: str = "client-1", first: wire.TelemetryCommand | None = None
) -> Connected:
    """Open a stream and exchange settings."""
    client = Connected(sidecar, client_id, first or consumer_settings())
    assert (await client.hears()).HasField("settings")
    return client


def run(scenario: Callable[[Sidecar], Coroutine[object, object, None]], config: SidecarConfig | None = None) -> None:
    async def scene() -> None:
        async with asyncio.timeout(10):
            await scenario(Sidecar(ManualClock(), config))

    asyncio.run(scene())


def a_stack(nonce: str, text: str) -> wire.TelemetryCommand:
    return wire.TelemetryCommand(thread_stack_trace=wire.ThreadStackTrace(nonce=nonce, thread_stack_trace=text))


def test_a_client_shows_its_stack() -> None:
    """Only its own answer to this very question counts; everything else is ignored, and the stream goes on."""

    async def scenario(sidecar: Sidecar) -> None:
        client, other = await connected(sidecar), await connected(sidecar, "client-2")
        asking = asyncio.create_task(sidecar.service.streams.commands.stack("client-1", 5))
        question = await client.hears()
        nonce = question.print_thread_stack_trace_command.nonce
        assert (question.status.code, len(nonce)) == (wire.OK, 32)
        other.says(a_stack(nonce, "of somebody else"))
        other.says(consumer_settings())
        await other.hears()  # what it said before was taken by now
        client.says(a_stack("another nonce", "of another question"))
        client.says(wire.TelemetryCommand(verify_message_result=wire.VerifyMessageResult(nonce="")))
        client.says(a_stack(nonce, "main()"))
        client.says(a_stack(nonce, "twice"))
        assert await asking == "main()"
        client.says(a_stack(nonce, "late"))
        client.says(consumer_settings())
        assert (await client.hears()).HasField("settings")
        assert not sidecar.service.streams.commands._asked
        await client.close()
        await other.close()

    run(scenario)


def test_a_client_consumes_a_message() -> None:
    """It gets what was stored; its status is the answer, whatever it is."""

    async def scenario(sidecar: Sidecar) -> None:
        client = await connected(sidecar)
        payload = a_message("m-1", b"body").SerializeToString()
        asking = asyncio.create_task(sidecar.service.streams.commands.verify("client-1", payload, 5))
        command = (await client.hears()).verify_message_command
        assert (command.message.system_properties.message_id, command.message.body) == ("m-1", b"body")
        failed = wire.Status(code=wire.FAILED_TO_CONSUME_MESSAGE, message="no")
        result = wire.VerifyMessageResult(nonce=command.nonce)
        client.says(wire.TelemetryCommand(status=failed, verify_message_result=result))
        assert await asking == (wire.FAILED_TO_CONSUME_MESSAGE, "no")
        await client.close()

    run(scenario)


def test_an_unreachable_server_is_reported_at_once() -> None:
    """Not connected, connected without a stream, or no push consumer."""

    async def scenario(sidecar: Sidecar) -> None:
        ask = sidecar.service.streams.commands
        sidecar.sessions.seen("beats", wire.PUSH_CONSUMER, "billing", "")
        for client_id in ("nobody", "beats"):
            with pytest.raises(Refused) as refused:
                await ask.stack(client_id, 5)
            assert refused.value.rule is Rule.NOT_FOUND
        producer = await connected(sidecar, "producer", producer_settings())
        with pytest.raises(Refused, match="only a push consumer"):
            await ask.verify("producer", a_message().SerializeToString(), 5)
        await producer.close()

    run(scenario)


def test_silence_ends_in_time() -> None:
    """A client that does not answer, one that answers with something else, and one that does not read."""

    async def scenario(sidecar: Sidecar) -> None:
        ask, client = sidecar.service.streams.commands, await connected(sidecar)
        with pytest.raises(NoAnswer, match=r"client-1 did not answer within 0.01 s"):
            await ask.stack("client-1", 0.01)
        await client.hears()
        asking = asyncio.create_task(ask.stack("client-1", 5))
        nonce = (await client.hears()).print_thread_stack_trace_command.nonce
        client.says(wire.TelemetryCommand(verify_message_result=wire.VerifyMessageResult(nonce=nonce)))
        with pytest.raises(NoAnswer, match="without its stack"):
            await asking
        for _ in range(16):
            with pytest.raises(NoAnswer):
                await ask.stack("client-1", 0)
        with pytest.raises(NoAnswer, match="does not read"):
            await ask.stack("client-1", 5)
        assert not ask._asked
        await client.close()

    run(scenario)


def test_questions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound they are refused, and those that wait are not disturbed."""
    monkeypatch.setattr(commands, "ASKED_MAX", 2)

    async def scenario(sidecar: Sidecar) -> None:
        ask, client = sidecar.service.streams.commands, await connected(sidecar)
        waiting = [asyncio.create_task(ask.stack("client-1", 5)) for _ in range(2)]
        nonces = [(await client.hears()).print_thread_stack_trace_command.nonce for _ in waiting]
        with pytest.raises(Overloaded, match="questions to clients"):
            await ask.stack("client-1", 5)
        for nonce in nonces:
            client.says(a_stack(nonce, nonce))
        assert await asyncio.gather(*waiting) == nonces
        await client.close()

    run(scenario)


def test_a_stack_of_absurd_length_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot make the daemon hand on whatever it likes."""
    monkeypatch.setattr(commands, "STACK_CHARS_MAX", 10)

    async def scenario(sidecar: Sidecar) -> None:
        client = await connected(sidecar)
        asking = asyncio.create_task(sidecar.service.streams.commands.stack("client-1", 5))
        nonce = (await client.hears()).print_thread_stack_trace_command.nonce
        client.says(a_stack(nonce, "x" * 1000))
        assert await asking == "x" * 10
        await client.close()

    run(scenario)


def test_one_client_cannot_take_all_streams_and_polls() -> None:
    """Its own bound is 42900 for it, and no matter for another client."""

    async def refused(sidecar: Sidecar) -> str:
        with pytest.raises(StreamEnded) as caught:
            await sidecar.telemetry(consumer_settings(), call=from_client("greedy"))
        return f"{caught.value.code}: {caught.value.text}"

    async def scenario(sidecar: Sidecar) -> None:
        streams = [await connected(sidecar, "greedy") for _ in range(2)]
        assert (await refused(sidecar)).startswith("RESOURCE_EXHAUSTED: 42900 telemetry streams of one client (limit 2")
        other = await connected(sidecar, "modest")
        polls = [
            asyncio.create_task(sidecar.stream("ReceiveMessage", a_receive(polling_s=20), from_client("greedy")))
            for _ in range(2)
        ]
        await until(lambda: len(sidecar.service._polls._places) == 2)
        (status, _) = await sidecar.stream("ReceiveMessage", a_receive(), from_client("greedy"))
        assert status.status.code == wire.TOO_MANY_REQUESTS
        (status, _) = await sidecar.stream("ReceiveMessage", a_receive(), from_client("modest"))
        assert status.status.code == wire.MESSAGE_NOT_FOUND
        bye = wire.NotifyClientTerminationRequest()
        assert (await sidecar.ask("NotifyClientTermination", bye, from_client("greedy"))).status.code == wire.OK
        for poll in polls:
            assert [frame.WhichOneof("content") for frame in await poll] == ["status", "delivery_timestamp"]
        for stream in (*streams, other):
            await stream.close()
        assert len(sidecar.service.streams._places) == 0

    run(scenario, SidecarConfig(streams_per_client_max=2, receives_per_client_max=2))


def test_an_unregistered_producer_is_not_asked() -> None:
    """Its stream may stay open for a while; a check goes to a producer that is there."""

    async def scenario(sidecar: Sidecar) -> None:
        goes, stays = (
            await connected(sidecar, "goes", producer_settings()),
            await connected(sidecar, "stays", producer_settings()),
        )
        producers: Any = sidecar.service._transactions.producers
        assert set(producers._by_topic[TOPIC.name]) == {"goes", "stays"}
        for client_id, left in (("goes", {"stays"}), ("stays", set())):
            await sidecar.ask("NotifyClientTermination", wire.NotifyClientTerminationRequest(), from_client(client_id))
            assert set(producers._by_topic.get(TOPIC.name, ())) == left
        assert not producers.is_live(TOPIC.name)
        await goes.close()
        await stays.close()

    run(scenario)
