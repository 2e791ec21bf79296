"""Producers and consumers over a broker that hands messages out under leases: the embedded one, in this process."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clients.embedded.consumers import PATIENCE_S, Seen
from support.rigs.broker.rig import EmbeddedRig, play

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.classic import Decision, Filter, MessageQueue, ReceivedMessage, Start
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.popping import PopConsumer, PoppedBroker
from broker_adapter.queue_client.balance.allocation import ConsistentHash
from broker_adapter.queue_client.client import Client, connect
from broker_adapter.queue_client.consumer import ConsumerOptions, Later, Outcome, Suspend
from broker_adapter.queue_client.membership import GroupTaken
from dmq.broker.broker import EmbeddedBroker

pytestmark = pytest.mark.contract

TOPIC, GROUP = "orders", "workers"
_QUICK: dict[str, Any] = {"pause_ms": 20, "long_poll_ms": 200, "close_ms": 2_000, "handlers_max": 3}


class Failing:
    """The broker, whose calls fail and say what they say as often as a test wants."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self.failures: Counter[str] = Counter()
        self.settings: GroupSettings | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if self.failures[name] > 0:
            self.failures[name] -= 1
            raise BrokerUnavailable(f"{name} fails here")
        return getattr(self._broker, name)

    def group_settings(self, group: str, topics: Sequence[str] = ()) -> GroupSettings:
        return self.settings or self._broker.group_settings(group, topics)


class Popping:
    """Clients of one broker."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.rig = rig
        self.broker = Failing(rig.broker)
        self.clients: dict[str, Client] = {}

    def client(self, name: str) -> Client:
        """Return a client of this name."""
        if name not in self.clients:
            popped = PoppedBroker(
                self.broker,  # type: ignore[arg-type]  # it passes everything on
                self.rig.broker.transactions,
                name="proxy",
                client_id=name,
                clock=self.rig.clock,
            )
            self.clients[name] = Client(popped, clock=self.rig.clock)
        return self.clients[name]

    def consumer(self, name: str, seen: Seen, topic: str = TOPIC, group: str = GROUP, **options: Any) -> PopConsumer:  # noqa: ANN401
        """Begin a consumer in a client of its own."""
        made = self.client(name).consumer(group, {topic: "*"}, ConsumerOptions(**{**_QUICK, **options}))
        consumer = made(seen.by(name))
        assert isinstance(consumer, PopConsumer)
        return consumer

    async def send(self, *bodies: bytes, message_group: str = "", **how: Any) -> None:  # noqa: ANN401
        """Send messages, one after the other."""
        if "sender" not in self.clients:
            self.sender = await self.client("sender").producer("senders")
        for body in bodies:
            await self.sender.send(Message(TOPIC, body, message_group=message_group), **how)

    async def pass_time(self, ms: int = 1_000) -> None:
        """Let time pass, and what is due happen."""
        await self.rig.pass_ms(ms)


Scenario = Callable[[Popping], Coroutine[object, object, None]]


def popping(scenario: Scenario) -> Callable[..., None]:
    """Run a scenario on the embedded broker in memory."""

    def test(tmp_path: Path) -> None:
        async def run(rig: EmbeddedRig) -> None:
            clients = Popping(rig)
            try:
                await scenario(clients)
            finally:
                for each in clients.clients.values():
                    await each.close()

        asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), run))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def attempts(seen: Seen, body: bytes) -> list[int]:
    return [each.attempts_failed for _, batch in seen.batches for each in batch if each.message.body == body]


@popping
async def test_two_consumers_share_the_sent_messages(clients: Popping) -> None:
    """Each message once, as it was sent, in batches of the size that was asked for."""
    seen = Seen()
    for name in ("a", "b"):
        clients.consumer(name, seen, batch_max=4)
    await clients.send(*(b"m-%d" % number for number in range(40)))
    await seen.until(lambda: len(seen.bodies) >= 40)
    assert Counter(seen.bodies) == {b"m-%d" % number: 1 for number in range(40)}
    assert all(len(batch) <= 4 for _, batch in seen.batches)
    first = seen.batches[0][1][0]
    assert first.queue._replace(queue_id=0) == MessageQueue(TOPIC, "proxy", 0)
    assert (first.attempts_failed, len(first.message.message_id), first.message.topic) == (0, 34, TOPIC)


@popping
async def test_a_consumer_gets_the_matches_of_its_filter(clients: Popping) -> None:
    """Tags, and expressions over properties."""
    producer = await clients.client("sender").producer("senders")
    for tag in ("red", "green", "blue"):
        await producer.send(Message(TOPIC, tag.encode(), tag=tag, properties={"size": str(len(tag))}))
    seen = Seen()
    for name, wanted in (("tags", "red || blue"), ("sql", Filter("size > 4", is_sql=True))):
        clients.client("c").consumer(name, {TOPIC: wanted}, ConsumerOptions(**_QUICK))(seen.by(name))
    await seen.until(lambda: len(seen.bodies) >= 3)
    assert sorted((name, each.message.body) for name, batch in seen.batches for each in batch) == [
        ("sql", b"green"),
        ("tags", b"blue"),
        ("tags", b"red"),
    ]


@popping
async def test_a_failed_message_comes_again_by_the_policy_of_its_group_and_dies(clients: Popping) -> None:
    """With the attempts that failed; a handler may raise, or say from which message of the batch on it failed."""
    await clients.rig.set_group(GROUP, max_attempts=3, delays_ms=(10_000, 20_000))

    def answer(received: ReceivedMessage) -> Outcome:
        if received.attempts_failed == 1:
            return Later(delay_level=4)  # 30 s
        raise RuntimeError("bad")

    seen, dead = Seen(answer), Seen()
    await clients.send(b"bad")
    consumer = clients.consumer("a", seen)
    await seen.until(lambda: len(seen.bodies) == 1)
    for wait_ms in (10_000, 30_000):
        count = len(seen.bodies)
        await consumer._busy.over()  # the failure is told
        await clients.pass_time(wait_ms - 1_000)
        assert len(seen.bodies) == count
        await seen.until(lambda before=count: len(seen.bodies) > before, clients.pass_time)  # type: ignore[misc]
    clients.consumer("b", dead, dead_letter_topic(GROUP), "gravediggers")
    await dead.until(lambda: dead.bodies == [b"bad"], clients.pass_time)
    assert attempts(seen, b"bad") == [0, 1, 2]


@popping
async def test_a_cancellation_that_a_handler_meets_is_a_failure(clients: Popping) -> None:
    """Danger: a future that it awaited ended so, as clients' do, and the consumer took that for its own end.

    So it did with an unexpected error while it told the broker what became of a message.
    """
    await clients.rig.set_group(GROUP, max_attempts=3, delays_ms=(1_000,))

    def answer(received: ReceivedMessage) -> Outcome:
        if received.attempts_failed == 0:
            raise asyncio.CancelledError
        return None

    seen = Seen(answer)
    await clients.send(b"1", b"2")
    consumer = clients.consumer("a", seen, handlers_max=1)
    await seen.until(lambda: sorted(seen.bodies) == [b"1", b"1", b"2", b"2"], clients.pass_time)
    told = consumer._acknowledge

    async def faulty(work: Any) -> None:  # noqa: ANN401
        consumer._acknowledge = told  # type: ignore[method-assign]
        raise LookupError("unexpected")

    consumer._acknowledge = faulty  # type: ignore[method-assign]
    await clients.send(b"3")
    await seen.until(lambda: b"3" in seen.bodies, clients.pass_time)
    await clients.send(b"4")
    await seen.until(lambda: b"4" in seen.bodies, clients.pass_time)


@popping
async def test_a_handler_reports_the_consumed_part_of_a_batch(clients: Popping) -> None:
    """What lies before the first failure is not seen again; what is given up is dead at once."""

    def answer(received: ReceivedMessage) -> Outcome:
        return Later(first=2, delay_level=-1) if not received.attempts_failed else None

    seen, dead = Seen(answer), Seen()
    producer = await clients.client("sender").producer("senders")
    sent = [b"m-%d" % number for number in range(12)]
    await producer.send_batch([Message(TOPIC, body) for body in sent])
    clients.consumer("a", seen, batch_max=4, handlers_max=1)
    await seen.until(lambda: len(seen.bodies) >= 12)
    clients.consumer("b", dead, dead_letter_topic(GROUP), "gravediggers")
    given_up = [each.message.body for _, batch in seen.batches for each in batch[2:]]
    assert given_up
    await dead.until(lambda: sorted(dead.bodies) == sorted(given_up), clients.pass_time)
    assert sorted(seen.bodies) == sorted(sent)


@popping
async def test_messages_of_a_group_keep_their_order_through_failures(clients: Popping) -> None:
    """Suspending counts no failure, raising does; nothing of the message group passes what failed."""
    tries: Counter[bytes] = Counter()

    def answer(received: ReceivedMessage) -> Outcome:
        body = received.message.body
        tries[body] += 1
        if tries[body] == 1 and body.endswith(b"3"):
            return Suspend(ms=2_000)
        if tries[body] == 1 and body.endswith(b"5"):
            return Later()
        return None

    seen = Seen(answer)
    for number in range(8):
        for group in ("x", "y"):
            await clients.send(f"{group}-{number}".encode(), message_group=group)
    clients.consumer("a", seen, in_order=True)
    await seen.until(lambda: len(seen.bodies) >= 20, clients.pass_time)
    by_group: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for body in seen.bodies:
        by_group[body[:1]].append(body[2:])
    assert set(by_group) == {b"x", b"y"}
    assert all(found == [b"0", b"1", b"2", b"3", b"3", b"4", b"5", b"5", b"6", b"7"] for found in by_group.values())
    assert (attempts(seen, b"x-3"), attempts(seen, b"x-5")) == ([0, 0], [0, 1])


@popping
async def test_a_group_whose_broker_counts_no_attempts_is_retried_here(clients: Popping) -> None:
    """As RocketMQ's proxies have it in order: in memory, by the policy, until it is given up; the next one waits."""
    clients.broker.settings = GroupSettings(is_fifo=True, max_attempts=3, delays_ms=(10,), believes_clients=True)
    await clients.rig.set_group(GROUP, max_attempts=3, delays_ms=(10_000,))
    seen, dead = Seen(lambda each: Later() if each.message.body == b"bad" else None), Seen()
    await clients.send(b"bad", b"good", message_group="g")
    clients.consumer("a", seen, in_order=True)
    clients.consumer("b", dead, dead_letter_topic(GROUP), "gravediggers")
    await seen.until(lambda: len(seen.bodies) == 4)
    assert seen.bodies == [b"bad"] * 3 + [b"good"]
    assert attempts(seen, b"bad") == [0, 1, 2]
    await dead.until(lambda: dead.bodies == [b"bad"], clients.pass_time)


@popping
async def test_an_acknowledgement_is_repeated_until_it_is_heard(clients: Popping) -> None:
    """Also a receive that fails is; what was consumed does not come again."""
    clients.broker.failures.update({"receive": 3, "ack": 3, "ensure_group": 2})
    seen = Seen()
    await clients.send(b"once")
    clients.consumer("a", seen, handlers_max=1)
    await seen.until(lambda: clients.broker.failures["ack"] == 0)
    await clients.clients.pop("a").close()
    clients.consumer("b", seen)
    await clients.send(b"next")
    await seen.until(lambda: b"next" in seen.bodies, clients.pass_time)
    assert seen.bodies == [b"once", b"next"]


@popping
async def test_closing_waits_for_handlers_and_gives_the_rest_to_others(clients: Popping) -> None:
    """What was consumed meanwhile is acknowledged; what a handler does not finish in time comes to another client."""
    release, begun = asyncio.Event(), asyncio.Event()
    running: Counter[str] = Counter()

    @clients.client("a").consumer(GROUP, {TOPIC: "*", "others": "*"}, ConsumerOptions(**{**_QUICK, "handlers_max": 2}))
    async def slow(batch: Sequence[ReceivedMessage]) -> None:
        running["now"] += 1
        running["most"] = max(running["most"], running["now"])
        begun.set()
        await release.wait()
        running["now"] -= 1

    await clients.send(*(b"m-%d" % number for number in range(6)))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    closing = asyncio.ensure_future(clients.clients.pop("a").close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    release.set()
    await closing
    consumed = running["most"]
    assert 1 <= consumed <= 2
    stuck = asyncio.Event()

    @clients.client("b").consumer(GROUP, {TOPIC: "*"}, ConsumerOptions(**{**_QUICK, "close_ms": 10, "handlers_max": 1}))
    async def never(batch: Sequence[ReceivedMessage]) -> None:
        stuck.set()
        await asyncio.Event().wait()

    await asyncio.wait_for(stuck.wait(), PATIENCE_S)
    await clients.clients.pop("b").close()
    seen = Seen()
    clients.consumer("c", seen)
    await seen.until(lambda: len(set(seen.bodies)) == 6 - consumed, lambda: clients.pass_time(61_000))


@popping
async def test_a_handler_may_take_longer_than_a_lease(clients: Popping) -> None:
    """Nobody else gets its message while its client lives; a client that is closed no longer counts as living."""
    release, begun = asyncio.Event(), asyncio.Event()

    @clients.client("a").consumer(GROUP, {TOPIC: "*"}, ConsumerOptions(**{**_QUICK, "handlers_max": 1}))
    async def slow(batch: Sequence[ReceivedMessage]) -> None:
        begun.set()
        await release.wait()

    await clients.send(b"slow")
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    seen = Seen()
    clients.consumer("b", seen)
    for _ in range(3):
        await clients.pass_time(40_000)
        clients.broker.client_seen("a@" + GROUP)
    await clients.send(b"other")
    await seen.until(lambda: b"other" in seen.bodies)
    release.set()
    await clients.clients.pop("a").close()
    assert not clients.rig.broker.lease_ends.clients.is_alive("a@" + GROUP)
    await clients.pass_time(61_000)
    assert seen.bodies == [b"other"]


@popping
async def test_handlers_are_bounded_over_all_topics(clients: Popping) -> None:
    """Also where a consumer has more topics than handlers."""
    running: Counter[str] = Counter()
    done = asyncio.Event()

    @clients.client("a").consumer(GROUP, {TOPIC: "*", "others": "*"}, ConsumerOptions(**{**_QUICK, "handlers_max": 1}))
    async def one_by_one(batch: Sequence[ReceivedMessage]) -> None:
        running["now"] += 1
        running["most"] = max(running["most"], running["now"])
        await asyncio.sleep(0.01)  # so that others could begin
        running["now"] -= 1
        running["all"] += 1
        if running["all"] == 8:
            done.set()

    producer = await clients.client("sender").producer("senders")
    for number in range(8):
        await producer.send(Message((TOPIC, "others")[number % 2], b"m-%d" % number))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert running["most"] == 1


@popping
async def test_a_producer_delays_recalls_and_sends_one_way(clients: Popping) -> None:
    """A level is a time by RocketMQ's table; the receipt of what waits has a handle."""
    producer = await clients.client("sender").producer("senders")
    seen = Seen()
    receipt = await producer.send(Message(TOPIC, b"recalled"), delay_level=5)
    assert await producer.recall(TOPIC, receipt.recall_handle) == receipt.message_id
    await producer.send(Message(TOPIC, b"later"), delay_level=5)
    await producer.send_one_way(Message(TOPIC, b"now"))
    clients.consumer("a", seen)
    await seen.until(lambda: seen.bodies == [b"now"])
    await clients.pass_time(59_000)
    await asyncio.sleep(0.02)
    assert seen.bodies == [b"now"]
    await clients.pass_time(1_000)
    await seen.until(lambda: seen.bodies == [b"now", b"later"])
    clients.broker.failures["send"] = 1
    await producer.send_one_way(Message(TOPIC, b"lost"))
    clients.broker.failures["send"] = 9
    with pytest.raises(BrokerUnavailable, match="send fails here"):
        await producer.send(Message(TOPIC, b"x"))


@popping
async def test_a_transaction_ends_as_its_producer_decides(clients: Popping) -> None:
    """At once, or when the broker asks, which is asked of the group that sent the half message."""
    asked: list[bytes] = []

    async def on_check(half: ReceivedMessage) -> Decision:
        asked.append(half.message.body)
        return Decision.COMMIT

    other = await clients.client("sender").producer("others")
    producer = await clients.client("sender").producer("senders", on_check=on_check)
    seen = Seen()
    for decision in Decision:

        async def execute(_: Message, ended: Decision = decision) -> Decision:
            return ended

        await producer.send_in_transaction(Message(TOPIC, decision.value.encode()), execute)
    clients.consumer("a", seen)
    await seen.until(lambda: seen.bodies == [b"commit"])
    await seen.until(lambda: len(seen.bodies) == 2, lambda: clients.pass_time(30_000))
    assert (seen.bodies, asked) == ([b"commit", b"unknown"], [b"unknown"])
    assert other.group == "others"


@popping
async def test_settings_impossible_here_are_refused_by_name(clients: Popping) -> None:
    """Options of members that divide queues, a second consumer of a group, and a chooser of queues."""
    client = clients.client("a")
    options = ConsumerOptions(start=Start.FIRST_OFFSET, strategy=ConsistentHash(), retries_max=3)
    with pytest.raises(ValueError, match="does not support start, retries_max, strategy"):
        client.consumer(GROUP, {TOPIC: "*"}, options)(Seen().by("a"))
    client.consumer(GROUP, {TOPIC: "*"})(Seen().by("a"))
    with pytest.raises(GroupTaken):
        client.consumer(GROUP, {TOPIC: "*"})(Seen().by("a"))
    producer = await client.producer("senders")
    with pytest.raises(Refused, match="message_group instead of choose"):
        await producer.send(Message(TOPIC, b"x"), choose=lambda queues: queues[0])
    (queue,) = (await client._membership.route(TOPIC)).readable
    with pytest.raises(Refused) as caught:
        await client._membership.broker.queue_range(queue)
    assert caught.value.rule is Rule.UNSUPPORTED
    with pytest.raises(ValueError, match="rocketmq does not support environments"):
        await connect("rocketmq://127.0.0.1:8081", environment="dev", environments=["dev"])
    with pytest.raises(ValueError, match="no such option of rocketmq: queues"):
        await connect("rocketmq://127.0.0.1:8081", queues=3)
