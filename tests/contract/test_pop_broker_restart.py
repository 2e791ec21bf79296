"""What a durable ``PopBroker`` promises beyond one run, and what the embedded one does about leases and groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from support.rigs import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    Make,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    on_memory,
    on_rocksdb,
    play,
    receive,
    receive_one,
    send,
    until,
)
from support.stores import GatedEngine

from broker_adapter.errors import BrokerUnavailable, Overloaded, Refused
from broker_adapter.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from broker_adapter.message import Delivery
from dmq.embedded import group_queue
from dmq.store.engine import Engine, EngineStats, Rows
from dmq.store.ops import Batch, Family

SOON_MS = 5_000
ENDS = [
    pytest.param(on_rocksdb, End.CLOSE, id="rocksdb-close"),
    pytest.param(on_rocksdb, End.KILL, id="rocksdb-kill"),
    pytest.param(on_memory, End.CLOSE, id="memory-close"),
    pytest.param(on_memory, End.KILL, id="memory-kill"),
    pytest.param(on_memory, End.POWER_LOSS, id="memory-power-loss"),
]
Restart = Callable[[], Awaitable[None]]


def every_end(scenario: Callable[[EmbeddedRig, Restart], Awaitable[None]]) -> Callable[..., None]:
    """Run a scenario for each way a run can end."""

    def test(make: Make, end: End, tmp_path: Path) -> None:
        async def with_end(rig: EmbeddedRig) -> None:
            await scenario(rig, lambda: rig.restart(end))

        asyncio.run(play(make(tmp_path, 4), with_end))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return pytest.mark.parametrize(("make", "end"), ENDS)(test)


# -- restarts ---------------------------------------------------------------------------------------------------------


@every_end
async def test_everything_accepted_outlives_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Queued and delayed messages, each once, the delayed ones not before their time."""
    await send(rig, *(f"queued-{number}" for number in range(10)))
    at_ms = rig.clock.now_ms() + SOON_MS
    await send(rig, *(f"delayed-{number}" for number in range(10)), deliver_at_ms=at_ms)
    await restart()
    await rig.settle()
    assert sorted(ids(await receive(rig))) == [f"queued-{number}" for number in range(10)]
    rig.clock.advance(SOON_MS)
    await restart()
    await rig.settle()
    delayed = [each for each in await receive(rig) if each.delivery_attempt == 1 and each.deliver_at_ms]
    assert sorted(ids(delayed)) == [f"delayed-{number}" for number in range(10)]


@every_end
async def test_a_hand_over_is_not_repeated(rig: EmbeddedRig, restart: Restart) -> None:
    """What reached its queue before the end is there once."""
    await send(rig, "m-1", "m-2", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
    rig.clock.advance(SOON_MS)
    await rig.settle()
    for _ in range(2):
        await restart()
        await rig.settle()
    assert sorted(ids(await receive(rig))) == ["m-1", "m-2"]


@every_end
async def test_ids_are_still_known(rig: EmbeddedRig, restart: Restart) -> None:
    """A producer whose answer was lost with the run repeats its send; nothing is stored twice."""
    at_ms = rig.clock.now_ms() + SOON_MS
    (queued,) = await send(rig, "queued")
    await send(rig, "waiting", deliver_at_ms=at_ms)
    await restart()
    assert list(await send(rig, "queued")) == [queued._replace(repeated=True)]
    assert list(await send(rig, "waiting", deliver_at_ms=at_ms)) == [("waiting", -1, -1, True)]
    rig.clock.advance(SOON_MS)
    await rig.settle()
    assert sorted(ids(await receive(rig))) == ["queued", "waiting"]


@every_end
async def test_acks_are_durable(rig: EmbeddedRig, restart: Restart) -> None:
    """In any order, with holes, in many runs: exactly the others come back."""
    await send(rig, *(f"m-{number:02}" for number in range(32)))
    deliveries = await receive(rig)
    left = set(ids(deliveries))
    for step in (3, 5, 2):
        finished = [each for each in deliveries if each.message_id in left][::step]
        assert set(await ack(rig, *finished)) == {None}
        left -= set(ids(finished))
        await restart()
    deliveries = await receive(rig)
    assert set(ids(deliveries)) == left
    assert len(deliveries) == len(left)


@every_end
async def test_attempts_are_durable(rig: EmbeddedRig, restart: Restart) -> None:
    """Expired and given-back deliveries come back with the attempt that was due."""
    await send(rig, "expired", "back")
    by_id = {each.message_id: each for each in await receive(rig)}
    await rig.broker.change_invisible(GROUP, TOPIC, by_id["back"].receipt_handle, 0)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    await restart()
    assert {each.message_id: each.delivery_attempt for each in await receive(rig)} == {"expired": 2, "back": 2}


@every_end
async def test_a_renewed_lease_is_still_a_lease(rig: EmbeddedRig, restart: Restart) -> None:
    """Hidden until its time, its handles good, its end an attempt."""
    await send(rig, "m-1", "m-2")
    first, second = await receive(rig)
    for each in (first, second):
        await rig.broker.change_invisible(GROUP, TOPIC, each.receipt_handle, INVISIBLE_MS * 4)
    await restart()
    rig.clock.advance(INVISIBLE_MS * 4 - 1)
    await rig.settle()
    assert not await receive(rig)
    assert list(await ack(rig, first)) == [None]
    rig.clock.advance(1)
    await rig.settle()
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == (second.message_id, 2)


@every_end
async def test_a_suspended_lease_is_still_suspended(rig: EmbeddedRig, restart: Restart) -> None:
    """Its end costs no attempt in the next run either."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, SOON_MS, suspend=True)
    await restart()
    await receive(rig)
    rig.clock.advance(SOON_MS)
    await rig.settle()
    assert (await receive_one(rig)).delivery_attempt == 1


@every_end
async def test_a_plain_lease_ends_with_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Its message is there at once, and the hand-out that nobody can finish any more is not counted."""
    await send(rig, "m-1")
    await receive_one(rig)
    await restart()
    assert (await receive_one(rig)).delivery_attempt == 1


@every_end
async def test_a_handle_from_before_is_honoured(rig: EmbeddedRig, restart: Restart) -> None:
    """A consumer that worked through the restart finishes its message; so does one that only wants more time."""
    await send(rig, "m-1", "m-2", "m-3")
    first, second, third = await receive(rig)
    await restart()
    assert list(await ack(rig, first)) == [None]
    await rig.broker.change_invisible(GROUP, TOPIC, second.receipt_handle, INVISIBLE_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, third.receipt_handle, 0)
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == (third.message_id, 2)
    assert list(await ack(rig, second, again)) == [None, None]
    await restart()
    assert not await receive(rig)


@every_end
async def test_a_handle_from_before_is_refused_once_the_message_was_handed_out_again(
    rig: EmbeddedRig, restart: Restart
) -> None:
    """Two consumers never finish the same delivery."""
    await send(rig, "m-1")
    stale = await receive_one(rig)
    await restart()
    current = await receive_one(rig)
    assert [type(each) for each in await ack(rig, stale)] == [Refused]
    assert list(await ack(rig, current)) == [None]


@every_end
async def test_the_last_handle_is_honoured_whatever_was_given_back_before(rig: EmbeddedRig, restart: Restart) -> None:
    """The second hand-out of a message is a plain lease like any other."""
    await send(rig, "m-1")
    await rig.broker.change_invisible(GROUP, TOPIC, (await receive_one(rig)).receipt_handle, 0)
    second = await receive_one(rig)
    await restart()
    assert list(await ack(rig, second)) == [None]
    assert not await receive(rig)


@every_end
async def test_names_outlive_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Topics and groups keep their ids, and new ones get ids of their own."""
    for number in range(3):
        topic = f"topic-{number}"
        await rig.broker.send([an_envelope(f"m-{number}", topic=topic)])
        await rig.broker.ensure_group(f"group-{number}")
        await restart()
    for number in range(3):
        deliveries = await receive(rig, topic=f"topic-{number}", group=f"group-{number}")
        assert ids(deliveries) == [f"m-{number}"]
    assert len({topic.topic_id for topic in rig.broker.names.topics.values()}) == 3
    assert not {topic.topic_id for topic in rig.broker.names.topics.values()} & {
        group.group_id for group in rig.broker.names.groups.values()
    }


@every_end
async def test_offsets_go_on_where_they_were(rig: EmbeddedRig, restart: Restart) -> None:
    """No offset is used twice, none is left out."""
    offsets: list[tuple[int, int]] = []
    for run in range(3):
        receipts = await send(rig, *(f"m-{run}-{number}" for number in range(8)))
        offsets += [(each.queue_id, each.queue_offset) for each in receipts]
        await restart()
    per_queue = {queue: sorted(offset for at, offset in offsets if at == queue) for queue, _ in offsets}
    assert all(found == list(range(len(found))) for found in per_queue.values())
    assert sum(map(len, per_queue.values())) == 24


# -- what the embedded broker does about it ---------------------------------------------------------------------------


class CountingEngine:
    """Counts what is read, by family."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scanned_rows: dict[Family, int] = dict.fromkeys(Family, 0)
        self.sought: dict[Family, int] = dict.fromkeys(Family, 0)

    def write(self, batch: Batch) -> None:
        self.engine.write(batch)

    def sync(self) -> None:
        self.engine.sync()

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.engine.get_many(family, keys)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        found = self.engine.scan(family, start, stop, limit=limit, bytes_max=bytes_max)
        self.scanned_rows[family] += len(found.rows)
        return found

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        self.sought[family] += 1
        return self.engine.last(family, start, stop)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()


def test_opening_never_scans_messages(tmp_path: Path) -> None:
    """However many lie in the queues and on the timeline: one seek per queue, a few rows per group."""
    engines: list[CountingEngine] = []

    def counting(engine: Engine) -> Engine:
        engines.append(CountingEngine(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, *(f"m-{number}" for number in range(500)))
        await send(rig, *(f"d-{number}" for number in range(500)), deliver_at_ms=rig.clock.now_ms() + SOON_MS)
        while batch := await receive(rig):
            await ack(rig, *batch)
        await rig.restart(End.KILL)
        engine = engines[-1]
        await send(rig, "m-new", "n-new", "o-new", "p-new")
        assert len(await receive(rig)) == 4
        assert engine.scanned_rows[Family.QUEUE] == 0
        assert engine.scanned_rows[Family.TIMELINE] <= 1
        assert engine.scanned_rows[Family.INDEX] <= 1
        assert engine.scanned_rows[Family.GROUP] <= 1 + 2 * 4  # a floor and a chunk for each queue
        assert engine.sought[Family.QUEUE] <= 2 * 4  # once for the writer, once for the group

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=counting), scenario))


def test_a_new_group_may_start_at_the_end(tmp_path: Path) -> None:
    """``group_start="latest"``: what was there before is not for it, in this run and in the next."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "before-1", "before-2")
        assert not await receive(rig)
        await send(rig, "after-1")
        await rig.restart(End.KILL)
        assert ids(await receive(rig)) == ["after-1"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, group_start="latest"), scenario))


@every_durable_broker(queues=2)
async def test_every_queue_has_its_turn(rig: EmbeddedRig) -> None:
    """A queue that always has something does not keep the others waiting."""
    await send(rig, *(f"m-{number}" for number in range(20)))
    deliveries = [each for _ in range(10) for each in await receive(rig, batch_max=1)]
    counts = [sum(each.queue_id == queue for each in deliveries) for queue in (0, 1)]
    assert min(counts) >= 4, counts


@every_durable_broker(queues=1)
async def test_leases_are_bounded(rig: EmbeddedRig) -> None:
    """At the bound nothing more is handed out; whoever waits goes on as soon as something is finished."""
    bound = group_queue.LEASES_MAX
    for start in range(0, bound + 2, 1_000):
        await send(rig, *(f"m-{number}" for number in range(start, min(start + 1_000, bound + 2))))
    leased: list[Delivery] = []
    while batch := await receive(rig, batch_max=1_000):
        leased += batch
    assert len(leased) == bound
    receiving = [asyncio.ensure_future(receive(rig, wait_ms=60_000, batch_max=1)) for _ in range(2)]
    await until(lambda: rig.waiting == 2)
    await ack(rig, leased[0])
    await until(lambda: any(task.done() for task in receiving))
    await ack(rig, leased[1])
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{bound}", f"m-{bound + 1}"]


# -- leases that the broker renews ------------------------------------------------------------------------------------


async def pass_time(rig: EmbeddedRig, ms: int, *, seen: str = "") -> None:
    """Let time pass in steps in which a living client sends its heartbeat."""
    while ms > 0:
        step = min(ms, 10_000)
        ms -= step
        if seen:
            rig.broker.client_seen(seen)
        rig.clock.advance(step)
        await rig.settle()


@every_durable_broker()
async def test_a_lease_is_renewed_while_its_client_lives(rig: EmbeddedRig) -> None:
    """No attempt is spent, the first handle stays good, and the ack ends it."""
    await send(rig, "m-1")
    (delivery,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-1")
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS * 10, seen="client-1")
    assert not await receive(rig)
    assert list(await ack(rig, delivery)) == [None]
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS * 2, seen="client-1")
    assert not await receive(rig)


@every_durable_broker()
async def test_renewing_ends_after_three_hours(rig: EmbeddedRig) -> None:
    """A consumer that hangs for ever does not keep its message for ever, nor for a renewal longer."""
    await send(rig, "m-1")
    await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS * 3 // 4, renew_for="client-1")
    await pass_time(rig, AUTO_RENEW_MS_MAX - 1, seen="client-1")
    assert not await receive(rig)
    await pass_time(rig, 1, seen="client-1")
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_renewing_ends_with_silence(rig: EmbeddedRig) -> None:
    """A client that sent nothing for a minute is not waited for; another client's heartbeat does not help it."""
    await send(rig, "m-1", "m-2")
    (silent,) = await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="silent")
    await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="alive")
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS * 2, seen="alive")
    assert ids(await receive(rig)) == [silent.message_id]


@every_durable_broker()
async def test_renewing_ends_when_the_client_leaves(rig: EmbeddedRig) -> None:
    """What it held comes back within a second; what others hold, and what it received without renewal, does not."""
    await send(rig, "m-1", "m-2", "m-3")
    gone = await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="gone")
    await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="alive")
    await receive(rig, batch_max=1, invisible_ms=INVISIBLE_MS)
    rig.broker.client_gone("gone")
    rig.broker.client_gone("gone")
    rig.broker.client_gone("never seen")
    rig.clock.advance(999)
    await rig.settle()
    assert not await receive(rig)
    rig.clock.advance(1)
    await rig.settle()
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == (gone[0].message_id, 2)


@every_durable_broker()
async def test_whoever_sets_the_time_ends_the_renewal(rig: EmbeddedRig) -> None:
    """A consumer that failed and wants the message again in five seconds gets it, alive as it is."""
    await send(rig, "m-1")
    (delivery,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-1")
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, SOON_MS)
    await pass_time(rig, SOON_MS, seen="client-1")
    assert (await receive_one(rig)).delivery_attempt == 2


# -- races ------------------------------------------------------------------------------------------------------------


@every_durable_broker()
async def test_a_clock_that_steps_back_while_a_message_comes_back_does_not_lose_it(rig: EmbeddedRig) -> None:
    """The end of the lease was decided; the step comes while it is being written."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    expiring = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    rig.clock.step_to(rig.clock.now_ms() - SOON_MS)
    await expiring
    await rig.settle()
    again = await receive_one(rig)
    assert again.delivery_attempt == 2
    giving_back = asyncio.ensure_future(rig.broker.change_invisible(GROUP, TOPIC, again.receipt_handle, 0))
    await asyncio.sleep(0)
    rig.clock.step_to(rig.clock.now_ms() - SOON_MS)
    await giving_back
    assert (await receive_one(rig)).delivery_attempt == 3
    assert delivery.delivery_attempt == 1


@every_durable_broker()
async def test_an_ack_while_the_lease_is_being_ended_wins(rig: EmbeddedRig) -> None:
    """The handle is good until the message is handed out again, so it never comes back; nor after a restart."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    expiring = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    assert list(await ack(rig, delivery)) == [None]
    await expiring
    await rig.settle()
    assert not await receive(rig)
    await rig.restart(End.KILL)
    assert not await receive(rig)


@every_durable_broker()
async def test_an_extension_while_the_lease_is_being_ended_wins(rig: EmbeddedRig) -> None:
    """Hidden until the time that was answered, in this run and in the next."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    expiring = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    await expiring
    await rig.settle()
    assert not await receive(rig)
    await rig.restart(End.KILL)
    await rig.settle()
    assert not await receive(rig)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_a_first_receive_that_is_cancelled_does_not_spoil_the_group(rig: EmbeddedRig) -> None:
    """Whoever waited beside it while the group was loaded sees the group as it is, and forgets none of its acks."""
    await send(rig, *(f"m-{number}" for number in range(8)))
    await ack(rig, *(await receive(rig, batch_max=5)))
    for steps in range(8):
        await rig.restart(End.KILL)
        first = asyncio.ensure_future(receive(rig, batch_max=1, invisible_ms=1))
        second = asyncio.ensure_future(receive(rig, batch_max=32, invisible_ms=1))
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        outcomes.append(await receive(rig))  # what the cancelled one gave back
        found = [each for outcome in outcomes if not isinstance(outcome, BaseException) for each in ids(outcome)]
        assert len(found) == len(set(found)) == 3, (steps, found)


# -- a store that fails -----------------------------------------------------------------------------------------------


def test_a_failing_store_is_said_as_the_contract_says_it(tmp_path: Path) -> None:
    """Every call raises ``BrokerUnavailable`` (in doubt), and what was in doubt is not half done after a restart."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1", "m-2")
        first, second = await receive(rig)
        rig.memory.fail_next_sync = True
        with pytest.raises(BrokerUnavailable):
            await send(rig, "m-3", "m-4")
        broker = rig.broker
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: send(rig, "m-3"),
            lambda: ack(rig, first),
            lambda: broker.change_invisible(GROUP, TOPIC, second.receipt_handle, 0),
            lambda: broker.change_invisible(GROUP, TOPIC, second.receipt_handle, SOON_MS),
            lambda: broker.ensure_group("new"),
            lambda: broker.route("new"),
            lambda: receive(rig, group="another"),
        ]
        for call in calls:
            with pytest.raises(BrokerUnavailable):
                await call()
        await rig.restart(End.POWER_LOSS)
        assert not any(each.repeated for each in await send(rig, "m-3", "m-4"))
        assert sorted(ids(await receive(rig))) == ["m-1", "m-2", "m-3", "m-4"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


def test_a_repeated_ack_is_not_answered_before_the_first_is_durable(tmp_path: Path) -> None:
    """An ack that is still being written is no reason to say OK to its repetition: a crash would take both back."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        delivery = await receive_one(rig)
        (gate,) = gates
        gate.hold()
        first = asyncio.ensure_future(ack(rig, delivery))
        await asyncio.to_thread(gate.await_sync)
        repeated = asyncio.ensure_future(ack(rig, delivery))
        done, _ = await asyncio.wait({first, repeated}, timeout=0.1)
        gate.let_go()
        assert not done
        assert [list(await first), list(await repeated)] == [[None], [None]]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated), scenario))


@pytest.mark.parametrize("end", [End.KILL, End.POWER_LOSS])
def test_a_send_in_doubt_is_whole_or_absent_and_can_be_repeated(tmp_path: Path, end: End) -> None:
    """The batch was written but not synced: after a kill it is there, after power loss it is not, never half of it."""

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.broker.route(TOPIC)
        rig.memory.fail_next_sync = True
        with pytest.raises(BrokerUnavailable):
            await send(rig, "m-1", "m-2")
        await rig.restart(end)
        receipts = await send(rig, "m-1", "m-2")
        assert [each.repeated for each in receipts] == [end is End.KILL] * 2
        assert sorted(ids(await receive(rig))) == ["m-1", "m-2"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


@every_durable_broker()
async def test_a_refused_send_leaves_nothing(rig: EmbeddedRig) -> None:
    """One illegal topic among many messages: none of them is accepted."""
    with pytest.raises(Refused):
        await rig.broker.send([an_envelope("m-1"), an_envelope("m-2", topic="illegal topic"), an_envelope("m-3")])
    assert not await receive(rig)
    assert not any(each.repeated for each in await send(rig, "m-1", "m-3"))


def test_a_full_store_refuses_sends_and_goes_on_finishing(tmp_path: Path) -> None:
    """On a disk that is almost full: ``Overloaded`` and nothing done, while deliveries, acks and hand-overs go on."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        await send(rig, "m-2", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
        rig.store.is_disk_low = lambda: True  # type: ignore[method-assign]
        for at_ms in (0, rig.clock.now_ms() + SOON_MS):
            with pytest.raises(Overloaded):
                await send(rig, "m-3", deliver_at_ms=at_ms)
        assert list(await ack(rig, await receive_one(rig))) == [None]
        rig.clock.advance(SOON_MS)
        await rig.settle()
        assert list(await ack(rig, await receive_one(rig))) == [None]
        await rig.restart(End.KILL)
        assert not (await send(rig, "m-3"))[0].repeated

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))
