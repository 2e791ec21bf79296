"""Every change of state and its audit event are in one batch: what each batch does to the rows is compared with what
it says in the outbox. Calls run concurrently, so one batch holds the work of many.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.rigs import EmbeddedRig, ack, an_envelope, play, receive

from broker_adapter.message import Delivery
from dmq.audit.events import AuditEvent, EventKind, decode_event, gap_count, gap_event
from dmq.audit.outbox import read_outbox
from dmq.store.engine import Engine, EngineStats, Rows
from dmq.store.keys import unpack_u64
from dmq.store.ops import Batch, Family
from dmq.store.outbox import decode_block
from dmq.store.store import StoreOptions

pytestmark = pytest.mark.timeout(600)  # a failure is made small first, which takes its time
Queue = bytes  # group_id 4 | topic_id 4 | queue_id 2, as keys of the group family begin


class Told(NamedTuple):
    """One event of a batch."""

    event: AuditEvent
    queue_offset: int

    @property
    def queue(self) -> Queue:
        """Whose progress it is about."""
        event = self.event
        return event.group_id.to_bytes(4, "big") + event.topic_id.to_bytes(4, "big") + event.queue_id.to_bytes(2, "big")


class WatchedEngine:
    """Compares each batch with its events before it is applied; says which kinds it has seen."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: set[EventKind] = set()
        self.broken: list[str] = []

    def write(self, batch: Batch) -> None:
        told = [
            Told(decode_event(record.event), record.queue_offset)
            for family, key, value in batch.puts
            if family == Family.AUDIT
            for record in decode_block(key, value)
        ]
        self.seen |= {each.event.kind for each in told}
        before = {queue: self._progress(queue) for queue in _queues(batch)}
        try:
            _check_messages(batch, told)
            _check_names(batch, told)
        except AssertionError as error:
            self.broken.append(str(error))
        self.engine.write(batch)
        for queue, was in before.items():
            try:
                _check_progress(was, self._progress(queue), [each for each in told if each.queue == queue])
            except AssertionError as error:
                self.broken.append(str(error))

    def _progress(self, queue: Queue) -> dict[bytes, bytes]:
        return dict(self.engine.scan(Family.GROUP, queue, queue + b"\xff" * 10, limit=10_000).rows)

    def sync(self) -> None:
        self.engine.sync()

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.engine.get_many(family, keys)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        return self.engine.scan(family, start, stop, limit=limit, bytes_max=bytes_max)

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        return self.engine.last(family, start, stop)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()


def _queues(batch: Batch) -> set[Queue]:
    touched = [(family, key) for family, key, _ in batch.puts] + batch.deletes
    return {key[:10] for family, key in touched if family == Family.GROUP}


def _check_messages(batch: Batch, told: list[Told]) -> None:
    """Timeline rows come with SCHEDULED and go with DELIVERED; a queue row comes with QUEUED or DELIVERED."""
    kinds = [each.event.kind for each in told]
    entered = sum(family == Family.TIMELINE for family, _, _ in batch.puts)
    left = sum(family == Family.TIMELINE for family, _ in batch.deletes)
    assert (entered, left) == (kinds.count(EventKind.SCHEDULED), kinds.count(EventKind.DELIVERED))
    placed = sorted(key for family, key, _ in batch.puts if family == Family.QUEUE)
    said = sorted(
        each.event.topic_id.to_bytes(4, "big")
        + each.event.queue_id.to_bytes(2, "big")
        + each.queue_offset.to_bytes(8, "big")
        for each in told
        if each.event.kind in {EventKind.QUEUED, EventKind.DELIVERED}
    )
    assert placed == said


def _check_names(batch: Batch, told: list[Told]) -> None:
    """A new topic or group comes with its event."""
    made = sorted(int.from_bytes(key[1:], "big") for family, key, _ in batch.puts if family == 0 and key[:1] == b"n")
    said = sorted(
        each.event.topic_id or each.event.group_id
        for each in told
        if each.event.kind in {EventKind.TOPIC_CREATED, EventKind.GROUP_CREATED}
    )
    assert made == said


def _check_progress(before: dict[bytes, bytes], after: dict[bytes, bytes], told: list[Told]) -> None:
    """What a group finished, and what it hides or gets back, is what its events say, offset by offset."""
    by_offset: defaultdict[int, list[AuditEvent]] = defaultdict(list)
    for each in told:
        by_offset[each.queue_offset].append(each.event)
    ends = {EventKind.ACKED, EventKind.FILTERED}
    finished = {offset for offset, events in by_offset.items() if any(each.kind in ends for each in events)}
    assert _finished(after) - _finished(before) == finished
    was, now = _exceptions(before), _exceptions(after)
    changed = {offset for offset in now if was.get(offset) != now[offset]}
    assert changed <= by_offset.keys()
    for offset, events in by_offset.items():
        last = events[-1]
        assert sum(each.kind in ends for each in events) <= 1
        if last.kind in ends:
            assert offset not in now
        elif last.kind is EventKind.INVISIBLE_CHANGED:
            assert now[offset] == (last.attempt, last.time_ms)
        else:
            assert last.kind in {EventKind.LEASE_EXPIRED, EventKind.GIVEN_BACK}
            assert now[offset] == (last.attempt, 0)


def _finished(rows: dict[bytes, bytes]) -> set[int]:
    found: set[int] = set()
    for key, value in rows.items():
        kind, number = key[10], int.from_bytes(key[11:], "big")
        if kind == 1:
            found |= set(range(unpack_u64(value)))
        elif kind == 2:
            found |= {number * 1024 + at for at in range(1024) if value[at >> 3] >> (at & 7) & 1}
    return found


def _exceptions(rows: dict[bytes, bytes]) -> dict[int, tuple[int, int]]:
    """Offset to (attempt, visible at)."""
    return {
        int.from_bytes(key[11:], "big"): (int.from_bytes(value[:2], "big"), int.from_bytes(value[2:10], "big"))
        for key, value in rows.items()
        if key[10] == 3
    }


sends = st.tuples(st.just("send"), st.integers(0, 30), st.sampled_from((0, 0, 500, 1_500)), st.sampled_from(("", "x")))
receives = st.tuples(st.just("receive"), st.sampled_from(("one", "two")), st.integers(1, 8), st.sampled_from(("", "x")))
acks = st.tuples(st.just("ack"), st.integers(0, 50), st.integers(1, 4))
changes = st.tuples(st.just("change"), st.integers(0, 50), st.sampled_from((0, 700, 5_000)))
rounds = st.lists(
    st.tuples(st.lists(st.one_of(sends, sends, receives, receives, acks, changes), max_size=8), st.integers(0, 900)),
    min_size=5,
    max_size=25,
)


class Player:
    """Plays rounds of concurrent calls."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.rig = rig
        self.held: list[tuple[str, Delivery]] = []

    def call(self, name: str, *args: object) -> Coroutine[object, object, object]:
        """Return one call, not started yet."""
        work: Coroutine[object, object, object] = getattr(self, f"_{name}")(*args)
        return work

    async def _send(self, number: int, delay_ms: int, tag: str) -> None:
        at_ms = self.rig.clock.now_ms() + delay_ms if delay_ms else 0
        await self.rig.broker.send([an_envelope(f"m-{number}", tag=tag, deliver_at_ms=at_ms), an_envelope("m-0")])

    async def _receive(self, group: str, batch_max: int, tag: str) -> None:
        tags = [tag] if tag else []
        found = await receive(self.rig, group=group, batch_max=batch_max, tags=tags, invisible_ms=1_000)
        self.held += [(group, each) for each in found]

    async def _ack(self, pick: int, count: int) -> None:
        for group, delivery in self.held[pick % (len(self.held) + 1) :][:count]:
            await ack(self.rig, delivery, delivery, group=group)

    async def _change(self, pick: int, invisible_ms: int) -> None:
        for group, delivery in self.held[pick % (len(self.held) + 1) :][:1]:
            handle = delivery.receipt_handle
            work = self.rig.broker.change_invisible(group, delivery.topic, handle, invisible_ms)
            await asyncio.gather(work, return_exceptions=True)  # stale or finished by now


@settings(max_examples=60 * EFFORT)
@given(history=rounds)
def test_every_change_and_its_event_are_one_batch(history: list[tuple[list[tuple[object, ...]], int]]) -> None:
    """Whatever the calls were, and however the writer put them together."""
    engines: list[WatchedEngine] = []

    def watched(engine: Engine) -> Engine:
        engines.append(WatchedEngine(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        player = Player(rig)
        for calls, pass_ms in history:
            await asyncio.gather(*(player.call(str(name), *args) for name, *args in calls))
            rig.clock.advance(pass_ms)
            await rig.settle()
        assert not engines[0].broken, engines[0].broken

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False, queues=2, wrap=watched), scenario))


def test_the_watch_sees_every_kind(tmp_path: Path) -> None:
    """One plain history with each kind of event in it, so that the property above is not an empty one."""
    engines: list[WatchedEngine] = []

    def watched(engine: Engine) -> Engine:
        engines.append(WatchedEngine(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        player = Player(rig)
        await player.call("send", 1, 0, "x")
        await player.call("send", 2, 500, "x")
        rig.clock.advance(500)
        await rig.settle()
        await player.call("receive", "one", 8, "x")
        await player.call("change", 0, 700)
        await player.call("change", 1, 0)
        rig.clock.advance(700)
        await rig.settle()
        await player.call("receive", "one", 8, "")
        await player.call("ack", 2, 4)
        assert not engines[0].broken, engines[0].broken
        assert engines[0].seen == set(EventKind) - {EventKind.OPENED, EventKind.CLOSED, EventKind.GAP}

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=2, wrap=watched), scenario))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda batch: batch.puts.pop(0), "a row is missing"),
        (lambda batch: batch.puts.remove(next(put for put in batch.puts if put[0] == Family.AUDIT)), "an event is"),
    ],
)
def test_the_watch_can_fail(spoil: object, says: str) -> None:
    """A batch with an event too many or too few is found."""
    engines: list[WatchedEngine] = []

    class Spoilt(WatchedEngine):
        def write(self, batch: Batch) -> None:
            if any(put[0] == Family.QUEUE for put in batch.puts):
                batch.puts.sort(key=lambda put: put[0] != Family.QUEUE)
                assert callable(spoil)
                spoil(batch)
            super().write(batch)

    def spoilt(engine: Engine) -> Engine:
        engines.append(Spoilt(engine))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await Player(rig).call("send", 1, 0, "x")
        assert engines[0].broken, says

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False, queues=2, wrap=spoilt), scenario))


def test_a_bounded_outbox_says_what_it_cut(tmp_path: Path) -> None:
    """Events that had to go leave one that counts them, so sequences have no unexplained hole."""

    async def scenario(rig: EmbeddedRig) -> None:
        for number in range(200):
            await rig.broker.send([an_envelope(f"m-{number}")])
        told = list(read_outbox(rig.store))
        gaps = [(each.event.time_ms, gap_count(each.event)) for each in told if each.event.kind is EventKind.GAP]
        assert gaps
        missing = {first + step for first, count in gaps for step in range(count)}
        seen = {each.record.sequence for each in told}
        assert not missing & seen
        everything = range(1, rig.store.outbox_state.next_sequence)
        # Gap events can be cut in their turn; what they stood for lies in front of the oldest that is left.
        assert set(range(min(missing), everything.stop)) == (missing | seen)

    options = StoreOptions(outbox_bytes_max=4_000, gap_event=gap_event)
    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, options=options), scenario))
