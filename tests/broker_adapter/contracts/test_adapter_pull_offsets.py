"""What ``PullBroker`` promises of offsets: those that groups commit, and those that lie at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.forges.messages.letters import told
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, every_durable_broker, ids, play, receive, send
from support.rigs.store.rows import GatedEngine

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from dmq.broker.io.queue_log import Place, offset_stored_at
from dmq.store.engines.engine import Engine, Rows
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.writer.operations import Delete
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract
HOUR_MS = 3_600_000


async def committed(rig: EmbeddedRig, group: str = GROUP, queue_id: int = 0) -> int | None:
    """Where a group continues."""
    return await rig.broker.pulls.committed_offset(group, TOPIC, queue_id)


async def commit(rig: EmbeddedRig, offset: int, group: str = GROUP, queue_id: int = 0) -> None:
    """Let a group say where it continues."""
    await rig.broker.pulls.commit_offset(group, TOPIC, queue_id, offset)


async def at(rig: EmbeddedRig, stored_at_ms: int) -> int:
    """The offset at a time."""
    return await rig.broker.pulls.offset_at(TOPIC, 0, stored_at_ms)


@every_durable_broker(queues=2)
async def test_a_group_resumes_at_its_offset(rig: EmbeddedRig) -> None:
    """For each group and queue by itself, forwards and backwards; until it said anything there is nothing."""
    await send(rig, *(f"m-{number}" for number in range(8)))
    assert await committed(rig) is None
    assert GROUP not in rig.broker.names.groups
    await commit(rig, 3)
    await commit(rig, 1, queue_id=1)
    await commit(rig, 4, group="others")
    assert [await committed(rig), await committed(rig, queue_id=1), await committed(rig, "others")] == [3, 1, 4]
    await commit(rig, 0)
    assert await committed(rig) == 0
    assert [event.time_ms for event in told(rig, EventKind.OFFSET_SET)] == [3, 1, 4, 0]


@pytest.mark.parametrize("end", [End.CLOSE, End.KILL, End.POWER_LOSS])
def test_an_offset_outlives_the_daemon(tmp_path: Path, end: End) -> None:
    """What was answered is on disk, however the run ends."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-0", "m-1")
        await commit(rig, 2)
        await rig.restart(end)
        assert await committed(rig) == 2

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


def test_an_offset_is_answered_after_the_sync(tmp_path: Path) -> None:
    """And when the sync fails it is in doubt, which is said."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-0")
        await commit(rig, 0)
        (gate,) = gates
        gate.hold()
        committing = asyncio.ensure_future(commit(rig, 1))
        await asyncio.to_thread(gate.await_sync)
        done, _ = await asyncio.wait({committing}, timeout=0.05)
        assert not done
        gate.fails = "sync"
        gate.let_go()
        with pytest.raises(BrokerUnavailable):
            await committing

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated, queues=1), scenario))


@every_durable_broker(queues=1)
async def test_an_offset_behind_the_end_is_refused(rig: EmbeddedRig) -> None:
    """What comes there later would never be read. One below the begin is kept: pulling from it says what there is."""
    await send(rig, "m-0", "m-1")
    for offset in (-1, 3, 2**63 - 1, -(2**63)):
        with pytest.raises(Refused, match=r"limit 0\.\.2") as caught:
            await commit(rig, offset)
        assert caught.value.rule is Rule.OFFSET
    assert await committed(rig) is None
    assert GROUP not in rig.broker.names.groups
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    await rig.store.commit_async([Delete(Family.QUEUE, pack_queue_key(topic_id, 0, 0))])
    await commit(rig, 0)
    assert await committed(rig) == 0


def test_pulls_and_receives_of_a_group_are_independent(tmp_path: Path) -> None:
    """A committed offset begins no subscription: a group that starts at the end gets only what comes after it asked."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-0")
        await commit(rig, 1)
        assert not await receive(rig)
        await send(rig, "m-1")
        assert ids(await receive(rig)) == ["m-1"]
        assert await committed(rig) == 1
        await rig.restart(End.KILL)
        assert ids(await receive(rig)) == ["m-1"]
        assert [event.time_ms for event in told(rig, EventKind.SUBSCRIBED)] == [1]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, group_start="latest", queues=1), scenario))


@every_durable_broker(queues=1)
async def test_a_time_leads_to_the_first_message_stored_then(rig: EmbeddedRig) -> None:
    """Before all of them the begin, after all of them the end, in between the first at or after it."""
    await rig.broker.route(TOPIC)
    start_ms = rig.clock.now_ms()
    assert await at(rig, start_ms) == 0
    for number in range(10):
        await send(rig, f"a-{number}", f"b-{number}")
        rig.clock.advance(1_000)
    for number in range(10):
        stored_ms = start_ms + number * 1_000
        assert [await at(rig, stored_ms + more) for more in (-1, 0, 1)] == [2 * number, 2 * number, 2 * number + 2]
    assert [await at(rig, far) for far in (-(2**70), 2**70)] == [0, 20]
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    await rig.store.commit_async([Delete(Family.QUEUE, pack_queue_key(topic_id, 0, each)) for each in range(5)])
    assert await at(rig, start_ms) == 5
    # Also when the front is removed while somebody searches.
    (place,) = rig.broker.pulls.tails._by_place
    assert offset_stored_at(rig.store, Place(*place), 0, 20, start_ms) == 5


@every_durable_broker(queues=1)
async def test_a_clock_stepped_back_hides_nothing_if_it_is_allowed_for(rig: EmbeddedRig) -> None:
    """The answer lies between an older message and one that is not; asked for the step earlier, it misses none."""
    start_ms, times = rig.clock.now_ms(), []
    for number in range(60):
        times.append(rig.clock.now_ms())
        await send(rig, f"m-{number}")
        rig.clock.advance(60_000)
        if number in {19, 39}:
            rig.clock.step_to(rig.clock.now_ms() - HOUR_MS // 4)
    for asked_ms in range(start_ms - 60_000, max(times) + 120_000, 30_000):
        offset = await at(rig, asked_ms)
        assert offset == 0 or times[offset - 1] < asked_ms
        assert offset == len(times) or times[offset] >= asked_ms
        careful = await at(rig, asked_ms - HOUR_MS // 4)
        assert all(stored_ms < asked_ms for stored_ms in times[:careful])


def test_a_time_is_found_without_a_scan(tmp_path: Path) -> None:
    """Ten times the messages cost four looks more."""
    engines: list[Counting] = []

    def counted(engine: Engine) -> Engine:
        engines.append(Counting(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, *(f"m-{number}" for number in range(1_000)))
        (engine,) = engines
        await at(rig, rig.clock.now_ms())  # the queue is known from here on
        engine.looks = 0
        assert await at(rig, rig.clock.now_ms() + 1) == 1_000
        assert engine.looks <= 12

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=counted, queues=1), scenario))


class Counting(GatedEngine):
    """Counts the rows of queues that are looked at."""

    looks = 0

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        self.looks += len(keys) * (family is Family.QUEUE)
        return super().get_many(family, keys)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        found = super().scan(family, start, stop, limit=limit, bytes_max=bytes_max)
        self.looks += len(found.rows) * (family is Family.QUEUE)
        return found
