"""What the embedded broker adds to the contract: what opening costs, fairness, bounds, and a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    play,
    receive,
    receive_one,
    send,
    until,
)
from support.rigs.store.rows import GatedEngine, events

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused
from broker_adapter.contracts.message import Delivery
from dmq.broker.groups import group_queue
from dmq.broker.io.tail_cache import Recent
from dmq.store.engines.engine import Batch, Engine, EngineStats, Rows
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Op, Put
from dmq.trail.events import EventKind, decode_event

pytestmark = pytest.mark.contract
SOON_MS = 5_000


class CountingEngine:
    """Counts what is read, by family."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scanned_rows: dict[Family, int] = dict.fromkeys(Family, 0)
        self.sought: dict[Family, int] = dict.fromkeys(Family, 0)

    def write(self, batch: Batch) -> None:
        self.engine.write(batch)

    def flush(self) -> None:
        self.engine.flush()

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

    def clear(self, family: Family) -> None:
        self.engine.clear(family)

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
    await until(lambda: rig.receives_waiting == 2)
    await ack(rig, leased[0])
    await until(lambda: any(task.done() for task in receiving))
    await ack(rig, leased[1])
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{bound}", f"m-{bound + 1}"]


def test_a_failing_store_raises_the_error_of_the_contract(tmp_path: Path) -> None:
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


def test_a_group_never_gets_a_message_that_is_not_durable_yet(tmp_path: Path) -> None:
    """It is read for the first time in this run while a send is between its write and its sync."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await ack(rig, *await receive(rig))
        await send(rig, "m-1")
        await ack(rig, await receive_one(rig))
        await rig.restart(End.KILL)
        gate = gates[-1]
        gate.hold()
        sending = asyncio.ensure_future(send(rig, "m-2"))
        await asyncio.to_thread(gate.await_sync)
        receiving = asyncio.ensure_future(receive(rig, wait_ms=60_000))
        done, _ = await asyncio.wait({receiving}, timeout=0.1)
        gate.let_go()
        assert not done
        await sending
        assert ids(await receiving) == ["m-2"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated, queues=1), scenario))


def test_filtered_messages_fail_with_the_store_quietly(tmp_path: Path) -> None:
    """Nobody waits for that write, so nobody misses its failure; after a restart it is passed over again."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        await receive(rig, tags=["x"], topic="another")  # makes the group
        await receive(rig, group="warm")
        await rig.broker.subscriptions.subscribe(GROUP, TOPIC)
        rig.memory.fail_next_sync = True
        assert not await receive(rig, tags=["x"])
        await until(lambda: rig.store.failure is not None)
        await rig.restart(End.POWER_LOSS)
        assert ids(await receive(rig)) == ["m-1"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


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


def test_a_full_store_refuses_sends_and_still_finishes_messages(tmp_path: Path) -> None:
    """On a disk that is almost full: ``Overloaded`` and nothing done, while deliveries, acks and hand-overs go on."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        await send(rig, "m-2", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
        rig.store.is_disk_low = lambda: True  # type: ignore[method-assign]
        for at_ms in (0, rig.clock.now_ms() + SOON_MS):
            with pytest.raises(Overloaded):
                await send(rig, "m-3", deliver_at_ms=at_ms)
        assert list(await ack(rig, await receive_one(rig))) == [None]
        await rig.pass_ms(SOON_MS)
        assert list(await ack(rig, await receive_one(rig))) == [None]
        await rig.restart(End.KILL)
        assert not (await send(rig, "m-3"))[0].repeated

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


def test_a_group_begins_once_though_its_first_receive_is_cancelled(tmp_path: Path) -> None:
    """While what it begins with is being written: who comes next does not begin anew, which the books would tell."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        await rig.broker.ensure_group(GROUP)
        submitted, submit = asyncio.Event(), rig.broker.commits.submit

        def submit_and_tell(ops: Sequence[Op], *, is_urgent: bool = True) -> asyncio.Future[list[Receipt]]:
            submitted.set()
            return submit(ops, is_urgent=is_urgent)

        gates[-1].hold()
        sending = asyncio.ensure_future(send(rig, "m-2"))  # what comes behind it waits for it
        await asyncio.to_thread(gates[-1].await_sync)
        rig.broker.commits.submit = submit_and_tell  # type: ignore[method-assign]
        first = asyncio.ensure_future(receive(rig))
        await submitted.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(receive(rig, wait_ms=60_000))
        for _ in range(5):
            await asyncio.to_thread(lambda: None)  # it reads what is stored in threads
        gates[-1].let_go()
        await sending
        assert sorted(ids(await second)) == ["m-1", "m-2"]
        kinds = [decode_event(each.event).kind for each in events(rig.store)]
        assert kinds.count(EventKind.SUBSCRIBED) == rig.queues

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated), scenario))


@every_durable_broker(queues=1)
async def test_a_message_that_cannot_be_read_fails_the_receive_that_asked_for_it_alone(rig: EmbeddedRig) -> None:
    """Receives of one turn look at the store together: the one that meets damage fails, and the others have theirs."""
    topics = ("whole", "damaged", "also-whole")
    for topic in topics:
        await rig.broker.send([an_envelope(f"of-{topic}", topic=topic)])
    rig.broker.reader.recent = Recent()  # what just came is in memory, and would not be looked for
    place = pack_queue_key(rig.broker.names.topics["damaged"].topic_id, 0, 0)
    await rig.store.commit_async([Put(Family.QUEUE, place, b"\xff")])
    found = await asyncio.gather(*(receive(rig, topic=each) for each in topics), return_exceptions=True)
    first, failed, last = found
    assert isinstance(failed, BrokerUnavailable)
    assert not isinstance(first, BaseException)
    assert not isinstance(last, BaseException)
    assert [*ids(first), *ids(last)] == ["of-whole", "of-also-whole"]
    rig.is_whole = False
