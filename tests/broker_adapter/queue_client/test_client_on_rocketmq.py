"""Producers and consumers of queues at real Apache RocketMQ, 5 and 4, over the classic protocol."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from support.clients.embedded.consumers import Seen
from support.effort import at_length
from support.rigs.rocketmq.cluster import cluster, cluster_4

from bench.remoting import administer
from broker_adapter import Client, ConsumerOptions, Later, Message, Start, connect
from broker_adapter.contracts.classic import ReceivedMessage
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.topics import dead_letter_topic, retry_topic
from broker_adapter.queue_client.consumer import Consumer, Outcome
from broker_adapter.runtime.clock import SystemClock

pytestmark = pytest.mark.cluster
_QUEUES = 8
_NUMBER = count()
_QUICK: dict[str, Any] = {"rebalance_ms": 500, "flush_ms": 200, "start": Start.FIRST_OFFSET, "close_ms": 2_000}


class Setting:
    """A cluster, a topic of eight queues and a group that nobody used, and clients."""

    def __init__(self, *, is_4: bool) -> None:
        self.knows_times = not is_4
        number = next(_NUMBER)
        self.group = f"queue-clients-{number}"
        if is_4:
            self.names, self.topic = cluster_4().names, f"queue-clients-{number}"
            administer(self.names, lambda admin: admin.make_topic(self.topic, queues=_QUEUES))
        else:
            running = cluster()
            self.names, self.topic = running.rocketmq.names, running.topic()
        self.clients: list[Client] = []

    async def client(self, **how: Any) -> Client:  # noqa: ANN401
        made = await connect(f"rocketmq-remoting://{self.names}", **how)
        self.clients.append(made)
        return made

    async def consumer(self, seen: Seen, name: str, group: str = "", **options: Any) -> tuple[Client, Consumer]:  # noqa: ANN401
        client = await self.client()
        made = client.consumer(group or self.group, {self.topic: "*"}, ConsumerOptions(**{**_QUICK, **options}))
        consumer = made(seen.by(name))
        assert isinstance(consumer, Consumer)
        return client, consumer

    async def send(self, bodies: Sequence[bytes], **how: Any) -> None:  # noqa: ANN401
        producer = await (await self.client()).producer("senders")
        for body in bodies:
            await producer.send(Message(self.topic, body), **how)


_Scenario = Callable[[Setting], Coroutine[Any, Any, None]]


def on_clusters(*, on_4_at_length: bool = True) -> Callable[[_Scenario], Callable[[bool], None]]:
    """Run a scenario on RocketMQ 5.5.0, and on 4.9.7; there in a long run only, unless it says otherwise."""
    marks = (at_length,) if on_4_at_length else ()

    def of(scenario: _Scenario) -> Callable[[bool], None]:
        @pytest.mark.parametrize("is_4", [pytest.param(False, id="5"), pytest.param(True, id="4", marks=marks)])
        def test(is_4: bool) -> None:
            setting = Setting(is_4=is_4)

            async def run() -> None:
                try:
                    await scenario(setting)
                finally:
                    for client in setting.clients:
                        await client.close()

            asyncio.run(run())

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return of


def bodies(number: int, prefix: str = "m") -> list[bytes]:
    return [f"{prefix}-{each}".encode() for each in range(number)]


def own(consumer: Consumer, topic: str) -> list[object]:
    return [queue for queue in consumer.queues if queue.topic == topic]


@on_clusters(on_4_at_length=False)
async def test_eight_queues_are_shared_by_three_and_one_is_killed(setting: Setting) -> None:
    """3, 3 and 2; what the killed one left is consumed by the others: nothing is lost."""
    seen = Seen()
    members = [await setting.consumer(seen, name) for name in ("a", "b", "c")]

    def are_shared() -> bool:  # each member sees by itself who else is there: for a moment two may have one queue
        shares = [own(each, setting.topic) for _, each in members]
        return sorted(map(len, shares)) == [2, 3, 3] and len({queue for share in shares for queue in share}) == _QUEUES

    await seen.until(are_shared)
    await setting.send(bodies(64))
    await seen.until(lambda: set(seen.bodies) == set(bodies(64)))
    client, killed = members[1]
    for task in (*killed._tasks, *(each.pulling for each in killed._owned.values())):
        if task is not None:
            task.cancel()
    await client._membership.broker.close()
    setting.clients.remove(client)
    await setting.send(bodies(64, "later"))
    await seen.until(lambda: set(seen.bodies) == {*bodies(64), *bodies(64, "later")})
    await seen.until(lambda: [len(own(each, setting.topic)) for _, each in (members[0], members[2])] == [4, 4])


@on_clusters()
async def test_a_failure_comes_again_and_ends_as_a_dead_letter(setting: Setting) -> None:
    """With its attempts counted by the broker, under its own topic and id."""
    seen, dead = Seen(lambda _: Later(delay_level=1)), Seen()
    await setting.consumer(seen, "a", retries_max=2)
    await setting.send([b"bad"])
    await seen.until(lambda: len(seen.bodies) == 3)
    tries = [each for _, batch in seen.batches for each in batch]
    assert [each.attempts_failed for each in tries] == [0, 1, 2]
    assert {each.message.topic for each in tries} == {setting.topic}
    assert len({each.message.message_id for each in tries}) == 1
    assert [each.queue.topic for each in tries] == [setting.topic, *[retry_topic(setting.group)] * 2]
    client = await setting.client()
    grave = {dead_letter_topic(setting.group): "*"}
    client.consumer(f"{setting.group}-graves", grave, ConsumerOptions(**_QUICK))(dead.by("d"))
    await dead.until(lambda: dead.bodies == [b"bad"])


@on_clusters()
async def test_order_holds_through_a_rebalance(setting: Setting) -> None:
    """One batch of a queue at a time, though a member comes in the middle; a failure is tried where it lies."""
    tries: Counter[bytes] = Counter()

    def answer(received: ReceivedMessage) -> Outcome:
        tries[received.message.body] += 1
        return Later() if received.message.body.endswith(b"7") and tries[received.message.body] == 1 else None

    seen = Seen(answer)
    _, first = await setting.consumer(seen, "a", in_order=True)
    await setting.send(bodies(80))
    _, second = await setting.consumer(seen, "b", in_order=True)
    await setting.send(bodies(80, "n"))
    expected = {*bodies(80), *bodies(80, "n")}
    await seen.until(lambda: set(seen.bodies) == expected)
    await seen.until(lambda: [len(own(each, setting.topic)) for each in (first, second)] == [4, 4])
    came: dict[object, list[int]] = {}
    for _, batch in seen.batches:
        for each in batch:
            came.setdefault(each.queue, []).append(each.queue_offset)
    for offsets in came.values():
        assert all(later <= before + 1 for before, later in pairwise(offsets)), offsets


@on_clusters()
async def test_a_delay_level_and_a_delivery_time_are_waited_for(setting: Setting) -> None:
    """Neither comes early; a broker that would deliver at once is not given a delivery time."""
    seen = Seen()
    await setting.consumer(seen, "a")
    await setting.send([b"level"], delay_level=1)
    await seen.until(lambda: seen.bodies == [b"level"])
    (received,) = seen.batches[0][1]
    assert received.stored_at_ms - received.message.born_at_ms >= 1_000
    assert received.message.message_id
    due_ms = SystemClock().now_ms() + 1_500
    producer = await (await setting.client()).producer("senders")
    if not setting.knows_times:
        with pytest.raises(Refused) as refused:
            await producer.send(Message(setting.topic, b"time", deliver_at_ms=due_ms))
        assert refused.value.rule is Rule.UNSUPPORTED
        return
    await producer.send(Message(setting.topic, b"time", deliver_at_ms=due_ms))
    await seen.until(lambda: seen.bodies == [b"level", b"time"])
    assert seen.batches[1][1][0].stored_at_ms >= due_ms


@on_clusters()
async def test_broadcasting_resumes_where_it_stopped(setting: Setting) -> None:
    """Everybody gets everything; who was away gets what came meanwhile, and nothing again."""
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"is_broadcast": True}
        one, two, again = Seen(), Seen(), Seen()
        await setting.consumer(one, "a", **how, offsets_path=Path(folder) / "a")
        leaver, _ = await setting.consumer(two, "b", **how, offsets_path=Path(folder) / "b")
        await setting.send(bodies(16))
        for seen in (one, two):
            await seen.until(lambda seen=seen: sorted(seen.bodies) == sorted(bodies(16)))  # type: ignore[misc]
        await leaver.close()
        setting.clients.remove(leaver)
        await setting.send(bodies(16, "later"))
        await setting.consumer(again, "b", **how, offsets_path=Path(folder) / "b")
        await again.until(lambda: len(again.bodies) >= 16)
        await one.until(lambda: len(one.bodies) >= 32)
        assert sorted(again.bodies) == sorted(bodies(16, "later"))
        assert sorted(one.bodies) == sorted([*bodies(16), *bodies(16, "later")])


@on_clusters(on_4_at_length=False)
async def test_environments_never_see_each_other(setting: Setting) -> None:
    """Not even what is delayed or failed."""
    how: dict[str, Any] = {"environments": ["dev1", "dev2", "dev3"]}
    seen = {
        name: Seen(lambda each: None if each.attempts_failed else Later(delay_level=1)) for name in ("dev1", "dev3")
    }
    for name, noted in seen.items():
        client = await setting.client(environment=name, **how)
        producer = await client.producer("senders")
        client.consumer(setting.group, {setting.topic: "*"}, ConsumerOptions(**_QUICK))(noted.by(name))
        for number in range(3):
            await producer.send(Message(setting.topic, f"{name} now {number}".encode()))
            await producer.send(Message(setting.topic, f"{name} later {number}".encode()), delay_level=1)
    for name, noted in seen.items():
        await noted.until(lambda noted=noted: len(noted.bodies) >= 12)  # type: ignore[misc]
        expected = {f"{name} {when} {number}".encode(): 2 for when in ("now", "later") for number in range(3)}
        assert Counter(noted.bodies) == expected
