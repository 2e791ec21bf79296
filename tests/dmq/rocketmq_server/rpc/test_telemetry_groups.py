"""How a group is served reaches its clients: assignments per queue, and settings pushed to who is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from support.clients.wire.protocol import GROUP, TOPIC, Sidecar, consumer_settings, from_client, producer_settings

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire

FIFO = GroupSettings(is_fifo=True, max_attempts=3, delays_ms=(1000, 4000))
SHORT = GroupSettings(is_fifo=False, max_attempts=2, delays_ms=(7000,))


def run(scenario: Callable[[Sidecar], Coroutine[object, object, None]]) -> None:
    asyncio.run(scenario(Sidecar(ManualClock())))


async def assigned(sidecar: Sidecar, topic: wire.Resource = TOPIC) -> list[wire.MessageQueue]:
    endpoints = wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host="h", port=1)])
    request = wire.QueryAssignmentRequest(topic=topic, group=GROUP, endpoints=endpoints)
    answer = await sidecar.ask("QueryAssignment", request)
    assert answer.status.code == wire.OK
    queues = [assignment.message_queue for assignment in answer.assignments]
    for queue in queues:
        assert (queue.permission, queue.topic, list(queue.accept_message_types)) == (wire.READ_WRITE, topic, [])
        assert (queue.broker.name, queue.broker.id, queue.broker.endpoints) == ("rock-dmq", 0, endpoints)
    return queues


def test_an_assignment_is_any_queue_and_makes_the_group() -> None:
    """Without telemetry or heartbeat before: a restarted server knows nobody."""

    async def scenario(sidecar: Sidecar) -> None:
        assert [queue.id for queue in await assigned(sidecar)] == [-1]
        assert sidecar.broker.groups == {"billing"}

    run(scenario)


def test_a_fifo_group_is_assigned_every_queue() -> None:
    """Each by itself, as clients expect; and any queue again when the group is no longer one."""

    async def scenario(sidecar: Sidecar) -> None:
        sidecar.broker.policies["billing"] = FIFO
        assert [queue.id for queue in await assigned(sidecar)] == list(range(8))
        sidecar.broker.policies["billing"] = SHORT
        assert [queue.id for queue in await assigned(sidecar)] == [-1]

    run(scenario)


def test_a_group_is_fifo_by_the_topics_it_reads() -> None:
    """All of them, in the settings; the one that is asked for, in an assignment. Names are whole, with namespaces."""

    async def scenario(sidecar: Sidecar) -> None:
        ordered = wire.Resource(name="ordered", resource_namespace="ns")
        await sidecar.broker.send(
            [Envelope("ns%ordered", "01A", b"", message_group="a"), Envelope("orders", "01B", b"")]
        )
        frame = consumer_settings()
        for topic, is_fifo in ((ordered, True), (TOPIC, False)):
            frame.settings.subscription.subscriptions.add(topic=topic)
            (answer,) = await sidecar.telemetry(frame)
            assert answer.settings.subscription.fifo == is_fifo
        assert len(await assigned(sidecar, ordered)) == 8
        assert len(await assigned(sidecar)) == 1

    run(scenario)


@asynccontextmanager
async def connected(
    sidecar: Sidecar, client_id: str, first: wire.TelemetryCommand, language: str = "JAVA"
) -> AsyncIterator[AsyncIterator[bytes]]:
    """A client whose telemetry stream stays open, after the answer to its settings."""

    async def bodies() -> AsyncIterator[bytes]:
        yield first.SerializeToString()
        await asyncio.Event().wait()

    stream = sidecar.dispatcher.telemetry()(bodies(), from_client(client_id, language))
    await anext(stream)
    yield stream
    await stream.aclose()


async def pushed(stream: AsyncIterator[bytes]) -> wire.TelemetryCommand:
    """The next frame that comes without being asked for."""
    async with asyncio.timeout(5):
        return wire.TelemetryCommand.FromString(await anext(stream))


def of_group(name: str) -> wire.TelemetryCommand:
    frame = consumer_settings()
    frame.settings.subscription.group.name = name
    frame.settings.subscription.subscriptions.add(topic=TOPIC)
    return frame


def test_connected_consumers_hear_of_a_changed_policy() -> None:
    """Everybody in the group, in the form their language can read, merged with what they wished for."""

    async def scenario(sidecar: Sidecar) -> None:
        async with (
            connected(sidecar, "java", of_group("billing")) as java,
            connected(sidecar, "python", of_group("billing"), "PYTHON") as python,
        ):
            for settings, kinds in (
                (SHORT, ["customized_backoff"] * 2),
                (FIFO, ["exponential_backoff", "customized_backoff"]),
            ):
                sidecar.broker.policies["billing"] = settings
                sidecar.service.group_changed("billing")
                frames = [await pushed(java), await pushed(python)]
                assert [frame.settings.backoff_policy.WhichOneof("strategy") for frame in frames] == kinds
                for frame in frames:
                    assert frame.status.code == wire.OK
                    assert frame.settings.subscription.fifo == settings.is_fifo
                    assert frame.settings.subscription.group == GROUP
                    assert [each.topic for each in frame.settings.subscription.subscriptions] == [TOPIC]
                    assert frame.settings.backoff_policy.max_attempts == (1 if settings.is_fifo else 2)

    run(scenario)


def test_no_other_client_gets_it() -> None:
    """Not another group, not a producer, and not a client whose stream is gone."""

    async def scenario(sidecar: Sidecar) -> None:
        async with connected(sidecar, "gone", of_group("billing")):
            pass
        beat = wire.HeartbeatRequest(group=GROUP, client_type=wire.PUSH_CONSUMER)
        await sidecar.ask("Heartbeat", beat, from_client("silent"))  # known, but without a stream
        async with (
            connected(sidecar, "other", of_group("shipping")) as other,
            connected(sidecar, "producer", producer_settings()) as producer,
        ):
            sidecar.service.group_changed("billing")
            sidecar.service.drain()
            assert [[frame async for frame in stream] for stream in (other, producer)] == [[], []]

    run(scenario)


def test_a_client_that_does_not_read_delays_no_other() -> None:
    """What does not fit into its stream is dropped; what did arrives, and it may ask again."""

    async def scenario(sidecar: Sidecar) -> None:
        async with connected(sidecar, "slow", of_group("billing")) as stream:
            for _ in range(100):
                sidecar.service.group_changed("billing")
            sidecar.service.drain()
            assert 0 < len([frame async for frame in stream]) <= 16

    run(scenario)


def test_a_client_hears_of_it_on_its_newest_stream() -> None:
    """Once, where commands go."""

    async def scenario(sidecar: Sidecar) -> None:
        async with (
            connected(sidecar, "twice", of_group("billing")) as old,
            connected(sidecar, "twice", of_group("billing")) as new,
        ):
            sidecar.service.group_changed("billing")
            await pushed(new)
            sidecar.service.drain()
            assert [[frame async for frame in stream] for stream in (old, new)] == [[], []]

    run(scenario)
