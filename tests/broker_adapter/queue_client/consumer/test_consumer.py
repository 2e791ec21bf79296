"""What consumers of a group do together, on the embedded broker."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from support.clients.embedded.consumers import PATIENCE_S, Faulty, Members, Seen, eventually
from support.rigs.broker.rig import EmbeddedRig, play

from broker_adapter.contracts.classic import HeldQueue, ReceivedMessage, Start
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import dead_letter_topic, retry_topic
from broker_adapter.queue_client.balance.environments import Environments, TooFewQueues
from broker_adapter.queue_client.consumer import Consumer, ConsumerOptions, Later, Outcome, Suspend
from broker_adapter.queue_client.consumer.services import by_handler
from broker_adapter.queue_client.membership import GroupTaken, Intervals

pytestmark = pytest.mark.contract

TOPIC, GROUP = "orders", "workers"
Scenario = Callable[[Members], Coroutine[object, object, None]]


def on_the_embedded_broker(queues: int = 8) -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on the embedded broker in memory."""

    def decorate(scenario: Scenario) -> Callable[..., None]:
        def test(tmp_path: Path) -> None:
            async def run(rig: EmbeddedRig) -> None:
                members = Members(rig)
                try:
                    await scenario(members)
                finally:
                    await members.close()

            asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=queues), run))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return decorate


def bodies(count: int, prefix: str = "m") -> list[bytes]:
    return [f"{prefix}-{number}".encode() for number in range(count)]


def shares(*consumers: object) -> list[int]:
    """How many queues of the topic each has, the most first; nothing while a queue changes hands."""
    own = [[each for each in consumer.queues if each.topic == TOPIC] for consumer in consumers]  # type: ignore[attr-defined]
    if len({queue for queues in own for queue in queues}) < sum(map(len, own)):
        return []
    return sorted(map(len, own), reverse=True)


@on_the_embedded_broker()
async def test_eight_queues_are_shared_by_three(members: Members) -> None:
    """3, 3 and 2, each with one owner; what one that is killed left unfinished is consumed by the others."""
    seen = Seen()
    consumers = [members.consumer(name, seen, GROUP, {TOPIC: "*"}) for name in ("a", "b", "c")]
    await members.client("a")._membership.route(TOPIC)
    await seen.until(lambda: shares(*consumers) == [3, 3, 2])
    await members.send(TOPIC, *bodies(40))
    await seen.until(lambda: set(seen.bodies) == set(bodies(40)))
    await members.kill("b")
    await members.send(TOPIC, *bodies(40, "later"))
    await seen.until(lambda: set(seen.bodies) == {*bodies(40), *bodies(40, "later")}, members.pass_time)
    await seen.until(lambda: shares(consumers[0], consumers[2]) == [4, 4], members.pass_time)


@on_the_embedded_broker(queues=1)
async def test_an_offset_that_an_earlier_owner_commits_late_does_not_stay(members: Members) -> None:
    """Danger: a queue that changed hands was said to be behind until the next message came, and began there again."""
    seen = Seen()
    members.consumer("a", seen, GROUP, {TOPIC: "*"})
    await members.send(TOPIC, *bodies(3))
    await eventually(lambda: members.has_committed(GROUP, TOPIC, 3))
    (queue,) = (await members.brokers["looker"].route(TOPIC)).readable
    await members.brokers["looker"].commit_offset(GROUP, queue, 1)
    await members.pass_time(30_000)
    await eventually(lambda: members.has_committed(GROUP, TOPIC, 3))


@on_the_embedded_broker(queues=1)
async def test_a_message_that_fails_comes_again_and_ends_as_a_dead_letter(members: Members) -> None:
    """From the retry topic, with the attempts that failed, under its own topic and id; then it lies in the DLQ."""
    seen = Seen(lambda _: Later(delay_level=1))
    members.consumer("a", seen, GROUP, {TOPIC: "*"}, retries_max=2)
    dead = Seen()
    await members.send(TOPIC, b"bad")
    await seen.until(lambda: len(seen.bodies) == 3, members.pass_time)
    tries = [each for _, batch in seen.batches for each in batch]
    assert [each.attempts_failed for each in tries] == [0, 1, 2]
    assert {each.message.topic for each in tries} == {TOPIC}
    assert len({each.message.message_id for each in tries}) == 1
    assert [each.queue.topic for each in tries] == [TOPIC, retry_topic(GROUP), retry_topic(GROUP)]
    members.consumer("b", dead, "gravediggers", {dead_letter_topic(GROUP): "*"})
    await dead.until(lambda: dead.bodies == [b"bad"], members.pass_time)
    assert len(seen.bodies) == 3


@pytest.mark.parametrize("in_order", [False, True])
def test_a_cancellation_that_a_handler_meets_is_a_failure(tmp_path: Path, *, in_order: bool) -> None:
    """Danger: a future that it awaited ended so, as clients' do, and the consumer took that for its own end."""

    @on_the_embedded_broker(queues=1)
    async def scenario(members: Members) -> None:
        met: set[bytes] = set()

        def answer(received: ReceivedMessage) -> Outcome:
            body = received.message.body
            if body not in met:
                met.add(body)
                raise asyncio.CancelledError
            return None

        seen = Seen(answer)
        members.consumer("a", seen, GROUP, {TOPIC: "*"}, handlers_max=1, in_order=in_order)
        await members.send(TOPIC, *bodies(3))
        await seen.until(lambda: sorted(seen.bodies) == sorted(bodies(3) * 2), lambda: members.pass_time(10_000))

    scenario(tmp_path)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_fault_of_ours_ends_no_consumption(tmp_path: Path, *, in_order: bool) -> None:
    """Danger: whoever met an unexpected error was gone, and with the last one all that it consumed."""

    @on_the_embedded_broker(queues=1)
    async def scenario(members: Members) -> None:
        seen = Seen(lambda received: Later(delay_level=-1) if received.message.body == b"m-0" else None)
        consumer = members.consumer("a", seen, GROUP, {TOPIC: "*"}, handlers_max=1, in_order=in_order)
        send_back = consumer._failures.send_back

        async def faulty(received: ReceivedMessage, delay_level: int, error: object = "") -> bool:
            consumer._failures.send_back = send_back  # type: ignore[method-assign]
            raise LookupError("unexpected")

        consumer._failures.send_back = faulty  # type: ignore[method-assign]
        await members.send(TOPIC, *bodies(3))
        await seen.until(lambda: set(seen.bodies) == set(bodies(3)), members.pass_time)

    scenario(tmp_path)


@on_the_embedded_broker(queues=1)
async def test_a_handler_reports_the_consumed_part_of_a_batch(members: Members) -> None:
    """What lies before the first failure is not seen again, the rest is."""

    def answer(received: ReceivedMessage) -> Outcome:
        return None if received.attempts_failed else Later(first=2, delay_level=1)

    await members.send(TOPIC, *bodies(4))
    seen = Seen(answer)
    members.consumer("a", seen, GROUP, {TOPIC: "*"}, batch_max=4)
    await seen.until(lambda: len(seen.bodies) == 6, members.pass_time)
    assert Counter(seen.bodies) == {b"m-0": 1, b"m-1": 1, b"m-2": 2, b"m-3": 2}


@on_the_embedded_broker(queues=4)
async def test_order_holds_while_members_come_and_go(members: Members) -> None:
    """One batch of a queue at a time, in its order, through a rebalance and failures; nothing is passed."""
    tries: Counter[bytes] = Counter()

    def answer(received: ReceivedMessage) -> Outcome:
        tries[received.message.body] += 1
        if received.message.body.endswith(b"7") and tries[received.message.body] == 1:
            return Later()
        if received.message.body.endswith(b"5") and tries[received.message.body] == 1:
            return Suspend(ms=10)
        return None

    seen = Seen(answer)
    first = members.consumer("a", seen, GROUP, {TOPIC: "*"}, in_order=True)
    await members.send(TOPIC, *bodies(60))
    second = members.consumer("b", seen, GROUP, {TOPIC: "*"}, in_order=True)
    await members.send(TOPIC, *bodies(60, "n"))
    expected = {*bodies(60), *bodies(60, "n")}
    await seen.until(lambda: set(seen.bodies) == expected and shares(first, second) == [2, 2], members.pass_time)
    offsets: defaultdict[int, list[int]] = defaultdict(list)
    for _, batch in seen.batches:
        for each in batch:
            offsets[each.queue.queue_id].append(each.queue_offset)
    for came in offsets.values():
        # a repetition follows at once on what failed, or begins where a new owner goes on; nothing is left out
        assert all(later <= before + 1 for before, later in pairwise(came)), came
    failed = [each.attempts_failed for _, batch in seen.batches for each in batch if each.message.body == b"m-7"]
    assert failed[:2] == [0, 1]


@on_the_embedded_broker(queues=2)
async def test_a_broadcast_reaches_all_and_resumes_where_it_stopped(members: Members) -> None:
    """Every client gets everything; a client that comes back gets what came meanwhile, and nothing again."""
    path = members.rig._path
    seen = Seen()
    for name in ("a", "b"):
        members.consumer(name, seen, GROUP, {TOPIC: "*"}, is_broadcast=True, offsets_path=path / name)
    await members.send(TOPIC, *bodies(5))
    await seen.until(lambda: Counter(seen.bodies) == dict.fromkeys(bodies(5), 2))
    await members.clients.pop("b").close()
    await members.send(TOPIC, *bodies(5, "n"))
    await seen.until(
        lambda: Counter(seen.bodies) == {**dict.fromkeys(bodies(5), 2), **dict.fromkeys(bodies(5, "n"), 1)}
    )
    members.consumer("b", seen, GROUP, {TOPIC: "*"}, is_broadcast=True, offsets_path=path / "b")
    await seen.until(lambda: Counter(seen.bodies) == dict.fromkeys([*bodies(5), *bodies(5, "n")], 2))


@on_the_embedded_broker(queues=2)
async def test_a_group_resumes_where_it_was_closed(members: Members) -> None:
    """What was consumed is committed on the way out, also what a filter passed over."""
    seen = Seen()
    await members.send(TOPIC, *bodies(10))
    members.consumer("a", seen, GROUP, {TOPIC: "*"})
    await seen.until(lambda: len(seen.bodies) == 10)
    await members.clients.pop("a").close()
    await members.send(TOPIC, *bodies(10, "n"))
    members.consumer("b", seen, GROUP, {TOPIC: "*"})
    await seen.until(lambda: len(seen.bodies) >= 20)
    assert sorted(seen.bodies) == sorted([*bodies(10), *bodies(10, "n")])


@on_the_embedded_broker(queues=3)
async def test_environments_never_see_each_other(members: Members) -> None:
    """Not even what is delayed or failed; the same group name is another group in each of them."""
    shared = Environments(names=("dev1", "dev2", "dev3"))
    seen = {
        name: Seen(lambda each: None if each.attempts_failed else Later(delay_level=1)) for name in ("dev1", "dev3")
    }
    producers = {}
    for name, noted in seen.items():
        client = members.client(f"{name}-client@{name}", shared)
        producers[name] = await client.producer("senders")
        members.consumer(f"{name}-client@{name}", noted, GROUP, {TOPIC: "*"})
    for name, producer in producers.items():
        for number in range(4):
            await producer.send(Message(TOPIC, f"{name} now {number}".encode()))
            await producer.send(Message(TOPIC, f"{name} later {number}".encode()), delay_level=1)
    for name, noted in seen.items():
        await noted.until(partial(_has, noted, 16), members.pass_time)
        assert Counter(noted.bodies) == {
            f"{name} {when} {number}".encode(): 2 for when in ("now", "later") for number in range(4)
        }


def _has(seen: Seen, count: int) -> bool:
    return len(seen.bodies) >= count


@on_the_embedded_broker(queues=2)
async def test_too_few_queues_for_all_environments_is_refused(members: Members) -> None:
    """By name, before anything is stored."""
    client = members.client("x@dev1", Environments(names=("dev1", "dev2", "dev3")))
    producer = await client.producer("senders")
    with pytest.raises(TooFewQueues, match=r"has 2 queues at broker .* need 3"):
        await producer.send(Message(TOPIC, b"body"))


@on_the_embedded_broker(queues=1)
async def test_a_group_that_began_at_the_end_misses_nothing_after_a_crash(members: Members) -> None:
    """Where it began is committed before anything comes, so what came before its crash is consumed after it."""
    await members.send(TOPIC, b"old")
    stuck = Seen(lambda _: Later())
    members.consumer("a", stuck, GROUP, {TOPIC: "*"}, start=Start.LAST_OFFSET)
    await stuck.until(lambda: members.clients["a"]._consumers[0].queues != [])
    await eventually(lambda: members.has_committed(GROUP, TOPIC, 0, 1))
    await members.kill("a")
    await members.send(TOPIC, b"new")
    seen = Seen()
    members.consumer("b", seen, GROUP, {TOPIC: "*"}, start=Start.LAST_OFFSET)
    await seen.until(lambda: seen.bodies == [b"new"], members.pass_time)


@on_the_embedded_broker(queues=1)
async def test_a_queue_locked_by_another_member_waits(members: Members) -> None:
    """Ordered consumption begins when the lock is free, and ends where it cannot be renewed."""
    await members.send(TOPIC, b"first")
    other = Faulty(members.rig.broker, "other")
    (queue,) = (await other.route(TOPIC)).readable
    await other.lock(GROUP, [queue])
    seen = Seen()
    members.consumer("a", seen, GROUP, {TOPIC: "*"}, in_order=True)
    await eventually(lambda: other.members(GROUP, TOPIC))
    assert not await members.clients["a"]._consumers[0].divide()
    assert seen.bodies == []
    await other.unlock(GROUP, [queue])
    await seen.until(lambda: seen.bodies == [b"first"])
    members.brokers["a"].failing = frozenset({"lock"})
    members.rig.clock.advance(30_001)
    await members.send(TOPIC, b"second")
    await asyncio.wait_for(members.clients["a"]._consumers[0]._owned[queue].arrived.wait(), PATIENCE_S)
    await asyncio.sleep(0.05)
    assert seen.bodies == [b"first"]
    members.brokers["a"].failing = frozenset()
    await members.clients["a"]._consumers[0]._renew()
    await seen.until(lambda: seen.bodies == [b"first", b"second"])
    await other.close()


@on_the_embedded_broker(queues=1)
async def test_a_consumer_that_lost_a_queue_commits_nothing_of_it(members: Members) -> None:
    """A handler that ends after its queue went to another member: what it failed is not sent back a second time."""
    release, begun = asyncio.Event(), asyncio.Event()
    await members.send(TOPIC, b"slow")
    late = members.client("b").consumer(
        GROUP, {TOPIC: "*"}, ConsumerOptions(start=Start.FIRST_OFFSET, rebalance_ms=100)
    )

    @late
    async def slow(_batch: Sequence[ReceivedMessage]) -> Outcome:
        begun.set()
        await release.wait()
        return Later()

    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    seen = Seen()
    members.consumer("a", seen, GROUP, {TOPIC: "*"})  # the first in order: it gets the only queue
    await seen.until(lambda: seen.bodies == [b"slow"])
    release.set()
    await members.clients.pop("b").close()
    await members.pass_time(20_000)
    await members.send(TOPIC, b"next")
    await seen.until(lambda: seen.bodies[-1] == b"next", members.pass_time)
    assert seen.bodies == [b"slow", b"next"]


@on_the_embedded_broker(queues=1)
async def test_filtered_messages_are_committed(members: Members) -> None:
    """A group of one tag comes to the end of a queue of others, and sees none of them."""
    await members.send(TOPIC, *bodies(5), tag="red")
    await members.send(TOPIC, b"mine", tag="blue")
    await members.send(TOPIC, *bodies(5), tag="red")
    seen = Seen()
    members.consumer("a", seen, GROUP, {TOPIC: "blue || green"})
    await eventually(lambda: members.has_committed(GROUP, TOPIC, 11))
    assert seen.bodies == [b"mine"]


@on_the_embedded_broker(queues=1)
async def test_a_failure_that_cannot_be_sent_back_is_kept(members: Members) -> None:
    """By a send to the retry topic instead; and if that fails as well, by trying again here, uncommitted meanwhile."""
    fails = {b"once": 1, b"twice": 2}

    def answer(received: ReceivedMessage) -> Outcome:
        return Later(delay_level=1) if received.attempts_failed < fails[received.message.body] else None

    seen = Seen(answer)
    await members.send(TOPIC, b"once")
    members.client("a")
    members.brokers["a"].failing = frozenset({"send_back"})
    members.consumer("a", seen, GROUP, {TOPIC: "*"}, send_back_again_ms=50)
    await seen.until(lambda: seen.bodies == [b"once"] * 2, members.pass_time)
    assert seen.batches[-1][1][0].queue.topic == retry_topic(GROUP)
    members.brokers["a"].failing = frozenset({"send_back", "send"})
    await members.send(TOPIC, b"twice")
    await seen.until(lambda: seen.bodies[2:] == [b"twice"] * 3)
    assert [each.attempts_failed for _, batch in seen.batches[2:] for each in batch] == [0, 1, 2]
    assert {each.queue.topic for _, batch in seen.batches[2:] for each in batch} == {TOPIC}
    await eventually(lambda: members.has_committed(GROUP, TOPIC, 2))


@on_the_embedded_broker(queues=1)
async def test_nothing_is_committed_while_a_failure_is_nobodys(members: Members) -> None:
    """What cannot be sent back, and was not consumed, keeps the offset where it is: a crash loses nothing."""
    await members.send(TOPIC, b"bad", b"good")
    seen = Seen(lambda each: Later() if each.message.body == b"bad" else None)
    members.client("a")
    members.brokers["a"].failing = frozenset({"send_back", "send"})
    members.consumer("a", seen, GROUP, {TOPIC: "*"}, send_back_again_ms=600_000)
    await seen.until(lambda: set(seen.bodies) == {b"bad", b"good"})
    await members.clients["a"]._consumers[0]._flush()
    assert await members.committed(GROUP, TOPIC) == [0]
    await members.kill("a")
    again = Seen()
    members.consumer("b", again, GROUP, {TOPIC: "*"})
    await again.until(lambda: set(again.bodies) == {b"bad", b"good"}, members.pass_time)


@on_the_embedded_broker(queues=2)
async def test_a_forgotten_member_registers_again(members: Members) -> None:
    """At once, and not at its next heartbeat."""
    members.intervals = Intervals(heartbeat_ms=3_600_000, route_ms=3_600_000)
    members.client("a")
    members.brokers["a"].hidden_members = 2
    seen = Seen()
    members.consumer("a", seen, GROUP, {TOPIC: "*"})
    await members.send(TOPIC, *bodies(4))
    await seen.until(lambda: set(seen.bodies) == set(bodies(4)))


@on_the_embedded_broker(queues=1)
async def test_a_message_that_cannot_be_read_is_a_dead_letter(members: Members) -> None:
    """No handler sees it, nothing waits for it, and it is not lost: it lies in the dead-letter queue."""
    for in_order in (False, True):
        group = f"{GROUP}-{in_order}"
        name = f"a-{in_order}"
        await members.send(TOPIC, b"damaged", b"well")
        members.client(name)
        members.brokers[name].unreadable = frozenset({b"damaged"})
        seen, dead = Seen(), Seen()
        members.consumer(name, seen, group, {TOPIC: "*"}, in_order=in_order)
        await seen.until(lambda seen=seen: b"well" in seen.bodies)  # type: ignore[misc]
        members.consumer(f"b-{in_order}", dead, f"gravediggers-{in_order}", {dead_letter_topic(group): "*"})
        await dead.until(lambda dead=dead: b"damaged" in dead.bodies, members.pass_time)  # type: ignore[misc]
        assert b"damaged" not in seen.bodies


@on_the_embedded_broker(queues=1)
async def test_one_client_has_one_consumer_of_a_group(members: Members) -> None:
    """A second one would take turns with the first under one name."""
    first = members.consumer("a", Seen(), GROUP, {TOPIC: "*"})
    second = Consumer(members.client("a")._membership, GROUP, {"other": "*"}, by_handler(Seen().by("a")))
    await asyncio.sleep(0)
    with pytest.raises(GroupTaken, match="one consumer can have many topics"):
        await second.start()
    assert first.group == GROUP


@on_the_embedded_broker(queues=1)
async def test_a_recreated_queue_is_consumed_from_its_start(members: Members) -> None:
    """A broker that lost its end, or came from a backup: what is stored after it is not passed over."""
    for in_order in (False, True):
        group, name = f"{GROUP}-{in_order}", f"a-{in_order}"
        broker = members.brokers.setdefault("looker", Faulty(members.rig.broker, "looker"))
        (queue,) = (await broker.route(f"{TOPIC}-{in_order}")).readable
        await members.send(queue.topic, *bodies(4))
        seen = Seen()
        members.consumer(name, seen, group, {queue.topic: "*"}, in_order=in_order)
        await seen.until(lambda seen=seen: seen.bodies == bodies(4))  # type: ignore[misc]
        members.brokers[name].moved[queue] = 2
        await seen.until(lambda seen=seen: seen.bodies[4:] == bodies(4)[2:], members.pass_time)  # type: ignore[misc]
        await members.send(queue.topic, b"new")
        await seen.until(lambda seen=seen: seen.bodies[6:] == [b"new"])  # type: ignore[misc]
        members.brokers[name].moved[queue] = 3
        await seen.until(lambda seen=seen: seen.bodies[7:] == [b"m-3", b"new"], members.pass_time)  # type: ignore[misc]


@on_the_embedded_broker(queues=1)
async def test_an_operator_has_a_group_go_on_before_and_behind(members: Members) -> None:
    """It consumes again from there, or what lies before is skipped; nothing else is."""
    seen = Seen()
    await members.send(TOPIC, *bodies(6))
    consumer = members.consumer("a", seen, GROUP, {TOPIC: "*"})
    await seen.until(lambda: len(seen.bodies) == 6)
    (queue,) = [each for each in consumer.queues if each.topic == TOPIC]
    members.client("a")._membership.offsets_reset(GROUP, {queue: 1})
    await seen.until(lambda: seen.bodies[6:] == bodies(6)[1:])
    await consumer._flush()
    assert await members.committed(GROUP, TOPIC) == [6]
    members.client("a")._membership.offsets_reset(GROUP, {queue: 3})
    await seen.until(lambda: seen.bodies[11:] == bodies(6)[3:])


@on_the_embedded_broker(queues=1)
async def test_a_member_reports_its_own_queues(members: Members) -> None:
    """Where its group goes on in each of its queues, and what it holds of them; nothing once it left."""
    gate, seen = asyncio.Event(), Seen()

    async def handle(_: Sequence[ReceivedMessage]) -> None:
        await gate.wait()

    await members.send(TOPIC, *bodies(3))
    client, now_ms = members.client("a"), members.rig.clock.now_ms()
    options = ConsumerOptions(start=Start.FIRST_OFFSET, in_order=True, rebalance_ms=200)
    consumer = client.consumer(GROUP, {TOPIC: "*"}, options)(handle)
    assert isinstance(consumer, Consumer)

    def own() -> list[HeldQueue]:
        return [each for each in consumer.state().queues if each.queue.topic == TOPIC]

    await seen.until(lambda: [each.messages for each in own()] == [3])
    (held,) = own()
    assert held == (*held[:1], 0, 3, 2, held.size_bytes, now_ms, now_ms, True)
    assert held.size_bytes > 0
    state = client._membership.state_of(GROUP)
    assert state is not None
    assert state[2:] == (True, now_ms)
    assert set(state.filters) == {TOPIC, retry_topic(GROUP)}
    gate.set()
    await seen.until(lambda: [each[1:3] for each in own()] == [(3, 0)])
    await members.clients.pop("a").close()
    assert (own(), client._membership.state_of(GROUP)) == ([], None)
