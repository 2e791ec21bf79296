"""Filters of receives: what passes, what is finished for the group, and that no message is looked at twice.

Reads are counted, not timed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest
from support.effort import EFFORT
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    Rig,
    ack,
    every_broker,
    ids,
    receive,
    until,
)

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery, Envelope, Message
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire.mapping import encode
from dmq.broker.deliveries.dispatch import LOOK_BYTES_MAX, LOOK_MAX
from dmq.store.engines.engine import Batch, Engine, EngineStats, Rows
from dmq.store.schema.keys import Family
from dmq.store.store import StoreOptions
from dmq.trail.events import EventKind, gap_event

pytestmark = pytest.mark.contract

MANY, EVERY = (100_000, 10_000) if EFFORT > 1 else (8_000, 800)  # one message in so many is wanted
WANTED = "wanted = 'yes' AND number >= 0"


def a_message(
    message_id: str, *, tag: str = "", keys: Sequence[str] = (), message_group: str = "", body: bytes = b"x", **of: str
) -> Envelope:
    """A message with user properties."""
    return encode(
        Message(
            topic=TOPIC,
            message_id=message_id,
            body=body,
            tag=tag,
            keys=keys,
            message_group=message_group,
            properties=of,
        )
    )


async def take(
    rig: Rig, sql: str, *, group: str = GROUP, batch_max: int = 32, wait_ms: int = 0, tags: Sequence[str] = ()
) -> Sequence[Delivery]:
    """Receive what an expression lets through."""
    wanted = Subscription(TOPIC, -1, frozenset(tags), sql)
    return await rig.broker.receive(
        group, wanted, batch_max=batch_max, invisible_ms=INVISIBLE_MS, wait_ms=wait_ms, renew_for=""
    )


# -- every broker -----------------------------------------------------------------------------------------------------


@every_broker(queues=1)
async def test_an_expression_passes_matching_messages(rig: Rig) -> None:
    """Over user properties, tag and keys; what is false or unknown does not pass, and never comes to the group."""
    await rig.broker.send(
        [
            a_message("m-1", tag="red", amount="10", region="west"),
            a_message("m-2", tag="blue", amount="9", region="west"),
            a_message("m-3", tag="red", region="west"),
            a_message("m-4", tag="red", amount="11", keys=("k1", "k2")),
        ]
    )
    assert ids(await take(rig, "amount > 9 AND TAGS = 'red'")) == ["m-1", "m-4"]
    assert not await take(rig, "TRUE")
    assert ids(await take(rig, "KEYS CONTAINS 'k2' OR amount IS NULL", group="others")) == ["m-3", "m-4"]
    assert ids(await receive(rig, group="all")) == ["m-1", "m-2", "m-3", "m-4"]


@every_broker(queues=1)
async def test_a_wrong_expression_is_refused(rig: Rig) -> None:
    """With its position, and nothing is passed over by it."""
    await rig.broker.send([a_message("m-1")])
    with pytest.raises(Refused, match="at position 5") as refused:
        await take(rig, "a = ")
    assert refused.value.rule is Rule.FILTER
    assert ids(await receive(rig)) == ["m-1"]


@every_broker(queues=1)
async def test_a_message_that_no_client_can_read_passes(rig: Rig) -> None:
    """Passed over, it would be gone without a word."""
    await rig.broker.send([Envelope(TOPIC, "m-1", b"\xff\xff no message")])
    assert ids(await take(rig, "a = 1")) == ["m-1"]


@every_broker(queues=1)
async def test_two_filters_of_one_group_share_its_messages(rig: Rig) -> None:
    """Each receive judges by its own: what one passes over is finished for the group, as in RocketMQ."""
    await rig.broker.send([a_message(f"m-{number}", n=f"{number}") for number in range(4)])
    assert ids(await take(rig, "n >= 2", batch_max=1)) == ["m-2"]
    assert not set(ids(await take(rig, "n < 2"))) & {"m-0", "m-1"}


@every_broker(queues=1)
async def test_message_groups_keep_their_order_behind_a_filter(rig: Rig) -> None:
    """What is passed over holds nobody up; what passes comes in order, whatever the size of the batches."""
    await rig.broker.send(
        [a_message(f"m-{number}", message_group="g", n=f"{number % 3}", body=b"%d" % number) for number in range(120)]
    )
    came: list[str] = []
    while found := await take(rig, "n = 1", batch_max=3):
        came += ids(found)
        await ack(rig, *found)
    assert came == [f"m-{number}" for number in range(120) if number % 3 == 1]


# -- a backlog --------------------------------------------------------------------------------------------------------


class Counting:
    """An engine that counts which messages are read, how often and in how many reads; ``on_read`` is told of each."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.read: Counter[bytes] = Counter()
        self.reads = 0
        self.writes = 0
        self.on_read: Callable[[int], None] = lambda _: None
        self.gate = threading.Event()  # syncs wait for it
        self.gate.set()

    def get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        if family is Family.QUEUE:
            self.read.update(wanted)
            self.reads += 1
            self.on_read(len(wanted))
        return self._inner.get_many(family, wanted)

    def write(self, batch: Batch) -> None:
        self.writes += 1
        self._inner.write(batch)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        found = self._inner.scan(family, start, stop, limit=limit, bytes_max=bytes_max)
        if family is Family.QUEUE and limit > 1:  # messages one behind the other
            self.read.update(key for key, _ in found.rows)
            self.reads += 1
            self.on_read(len(found.rows))
        return found

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        return self._inner.last(family, start, stop)

    def flush(self) -> None:
        self._inner.flush()

    def sync(self) -> None:
        assert self.gate.wait(30)
        self._inner.sync()

    def clear(self, family: Family) -> None:
        self._inner.clear(family)

    def stats(self) -> EngineStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


class CountingRig(EmbeddedRig):
    """The embedded broker on such an engine, one after each restart."""

    def __init__(self, path: Path, *, on_disk: bool = False) -> None:
        super().__init__(path, on_disk=on_disk, queues=2, options=StoreOptions(gap_event=gap_event), wrap=self._counted)
        self.engines: list[Counting] = []

    def _counted(self, engine: Engine) -> Engine:
        self.engines.append(Counting(engine))
        return self.engines[-1]

    @property
    def engine(self) -> Counting:
        """That of this run."""
        return self.engines[-1]

    @property
    def filtered(self) -> int:
        """How many messages the trail says were passed over."""
        return sum(each.event.kind is EventKind.FILTERED for each in read_outbox(self.store))


def with_counts(
    scenario: Callable[[CountingRig], Coroutine[object, object, None]], path: Path, *, on_disk: bool = False
) -> None:
    """Run a scenario, however long it takes on a machine with other things to do."""

    async def run() -> None:
        rig = CountingRig(path, on_disk=on_disk)
        await rig.open()
        await scenario(rig)
        await rig.close()

    asyncio.run(run())


async def fill(rig: Rig, count: int = MANY, *, every: int = EVERY, body: bytes = b"x") -> list[str]:
    """Send messages and return the ids of those that are wanted."""
    for start in range(0, count, 1000):
        await rig.broker.send(
            [
                a_message(
                    f"m-{number}", wanted="yes" if number % every == every // 2 else "no", number=f"{number}", body=body
                )
                for number in range(start, min(start + 1000, count))
            ]
        )
    return [f"m-{number}" for number in range(count) if number % every == every // 2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("on_disk", [True, False], ids=["rocksdb", "memory"])
def test_a_filter_that_matches_little_goes_through_a_backlog_once(tmp_path: Path, on_disk: bool) -> None:
    """Each message is read once, in few reads and few writes; then never again, also not after a kill."""

    async def scenario(rig: CountingRig) -> None:
        wanted = await fill(rig)
        writes = rig.engine.writes
        looks = MANY // LOOK_MAX + len(wanted) * 22  # each receive reads the heads of both queues

        def is_in_bounds(_: int) -> None:
            assert rig.engine.reads <= looks

        rig.engine.on_read = is_in_bounds
        came: list[str] = []
        while found := await take(rig, WANTED, batch_max=1):
            came += ids(found)
            await ack(rig, *found)
        assert sorted(came) == sorted(wanted)
        assert len(rig.engine.read) == MANY
        assert rig.engine.read.total() <= MANY + len(wanted) * LOOK_MAX  # none of them, but beside what was found
        assert max(rig.engine.read.values()) <= 2
        assert rig.engine.writes - writes <= looks + 3 * len(wanted)
        reads = rig.engine.reads
        assert not await take(rig, WANTED)
        assert rig.engine.reads == reads
        await rig.store.commit_async([])  # behind it, what the last look passed over is durable
        assert rig.filtered == MANY - len(wanted)
        await rig.restart(End.KILL)
        assert not await take(rig, WANTED)
        assert not rig.engine.reads

    with_counts(scenario, tmp_path, on_disk=on_disk)


def test_a_kill_in_the_middle_begins_again_where_it_was(tmp_path: Path) -> None:
    """What was passed over is durable as the scan goes along: at most the last looks are repeated."""

    async def scenario(rig: CountingRig) -> None:
        await fill(rig, 20_000, every=20_000)
        half = asyncio.Event()
        loop = asyncio.get_running_loop()

        def at_forty(_: int) -> None:
            if rig.engine.reads == 40:
                loop.call_soon_threadsafe(half.set)

        rig.engine.on_read = at_forty
        scan = asyncio.ensure_future(take(rig, "wanted = 'never'"))
        await half.wait()
        before = rig.engine
        scan.cancel()
        await asyncio.wait({scan})
        await rig.restart(End.KILL)
        assert not await take(rig, "wanted = 'never'")
        assert len(before.read | rig.engine.read) == 20_000
        assert (before.read + rig.engine.read).total() <= 20_000 + 3 * LOOK_MAX

    with_counts(scenario, tmp_path)


def test_a_scan_goes_no_faster_than_it_becomes_durable(tmp_path: Path) -> None:
    """While the disk does not answer, nothing more is looked at: what waits to be written stays little."""

    async def scenario(rig: CountingRig) -> None:
        await fill(rig, 5_000, every=5_000)
        await receive(rig, group="others", batch_max=1)
        await receive(rig, topic="another")  # makes the group
        await rig.broker.subscriptions.subscribe(GROUP, TOPIC)
        reads = rig.engine.reads
        rig.engine.gate.clear()
        scan = asyncio.ensure_future(take(rig, "wanted = 'never'"))
        await until(lambda: rig.engine.reads > reads)
        for _ in range(50):  # the reading thread has time for more
            await rig.broker.reader.end(1, 0)
        assert (
            rig.engine.reads <= reads + 6
        )  # heads of both queues, and one look into both, begun by chunks of 1, 2 and 4
        rig.engine.gate.set()
        assert not await scan

    with_counts(scenario, tmp_path)


def test_a_long_scan_leaves_room_for_other_groups(tmp_path: Path) -> None:
    """While one group looks through a backlog, another one receives and acknowledges between its looks."""

    async def scenario(rig: CountingRig) -> None:
        await fill(rig, 30_000, every=30_000)
        await receive(rig, group="others", batch_max=1)
        scan = asyncio.ensure_future(take(rig, "wanted = 'never'"))
        await until(lambda: rig.engine.reads > 3)
        turns = 0
        while not scan.done():
            reads = rig.engine.reads
            found = await receive(rig, group="others", batch_max=4)
            await ack(rig, *found, group="others")
            assert rig.engine.reads - reads < 12, "it waited for the scan"
            turns += 1
        assert turns > 20
        assert not await scan

    with_counts(scenario, tmp_path)


def test_a_receive_ends_in_time_and_the_next_one_continues(tmp_path: Path) -> None:
    """One that may not wait looks for half a second at most; what it passed over is done."""

    async def scenario(rig: CountingRig) -> None:
        await fill(rig, 10_000, every=10_000)
        rig.engine.on_read = lambda _: rig.clock.advance(50)
        began_ms, calls = rig.clock.now_ms(), 0
        while rig.filtered < 10_000:
            assert not await take(rig, "wanted = 'never'")
            now_ms = rig.clock.now_ms()
            assert now_ms - began_ms <= 600
            began_ms, calls = now_ms, calls + 1
        assert calls > 3
        assert rig.engine.read.total() == 10_000 + 2  # the first message of each queue is read before the first look

    with_counts(scenario, tmp_path)


def test_a_look_is_bounded_in_bytes(tmp_path: Path) -> None:
    """Large messages are looked at a few at a time."""

    async def scenario(rig: CountingRig) -> None:
        await fill(rig, 200, every=200, body=bytes(1024 * 1024))
        sizes: list[int] = []
        rig.engine.on_read = sizes.append
        assert not await take(rig, "wanted = 'never'", batch_max=2)
        assert sum(sizes) == 200 + 2  # the first message of each queue is read before the first look
        assert max(sizes) <= LOOK_BYTES_MAX // (1024 * 1024)

    with_counts(scenario, tmp_path)


def test_surplus_messages_of_a_look_come_next(tmp_path: Path) -> None:
    """A look that grew over messages nobody wants may find more than the batch: they come with the next receives."""

    async def scenario(rig: CountingRig) -> None:
        await fill(rig, 2_000, every=2_000)
        await rig.broker.send([a_message(f"w-{number}", wanted="much") for number in range(300)])
        came: list[str] = []
        while found := await take(rig, "wanted = 'much'", batch_max=7):
            assert len(found) <= 7
            came += ids(found)
        assert sorted(came) == sorted(f"w-{number}" for number in range(300))
        assert len(set(came)) == len(came)

    with_counts(scenario, tmp_path)


def test_a_waiting_receive_is_not_ended_by_filtered_messages(tmp_path: Path) -> None:
    """It waits on, and the first message that passes ends the wait; everything before it is finished."""

    async def scenario(rig: CountingRig) -> None:
        clock = rig.clock
        assert isinstance(clock, ManualClock)
        waiting = asyncio.ensure_future(take(rig, WANTED, wait_ms=60_000))
        await until(lambda: rig.receives_waiting == 1)
        for number in range(5):
            await rig.broker.send([a_message(f"n-{number}", wanted="no")])
        await until(lambda: rig.filtered == 5)
        assert not waiting.done()
        await rig.broker.send([a_message("y", wanted="yes", number="1")])
        assert ids(await waiting) == ["y"]

    with_counts(scenario, tmp_path)
