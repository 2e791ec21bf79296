"""Cancelling, moving and firing against the hand-over: a message is delivered or cancelled, never both, never neither.

``DMQ_TEST_SEED`` repeats the choices of a run, not its timing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.effort import EFFORT, SEED
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, ack, an_envelope, receive

from broker_adapter.contracts.message import pack_id, unpack_id
from dmq.broker.delayed.changes import ChangeOutcome, Meant
from dmq.broker.sending.placement import Placement
from dmq.scheduler.scheduler import Scheduler
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, body_facts
from dmq.store.store import StoreOptions
from dmq.store.writer.operations import HandOver
from dmq.trail.events import EventKind, gap_event

pytestmark = [pytest.mark.property, pytest.mark.timeout(120 * EFFORT)]
MESSAGES = 600 if EFFORT == 1 else 10_000
OVER_MS = 10
Calls = dict[str, list[bytes]]  # packed ids by what is done to them


class Meddling(Placement):
    """Between the scheduler's read and its commit a part of what it holds is changed, and a part beside its commit."""

    def __init__(self, rig: EmbeddedRig, rng: random.Random) -> None:
        super().__init__(rig.broker.names)
        self._rig = rig
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self.late: list[asyncio.Future[None]] = []
        self.cancelled: set[str] = set()
        self.outcomes: Counter[tuple[str, ChangeOutcome]] = Counter()
        self.until_ms: dict[str, int] = {}  # what was rescheduled to, of those that were not cancelled after

    def hand_over(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[HandOver]:
        """Read is done."""
        draws: dict[bool, Calls] = {True: {}, False: {}}
        for _, value in rows:
            message_id, _ = body_facts(value[WAITING_HEADER_BYTES:])
            what = self._rng.choice(("", "", "cancel", "reschedule", "fire"))
            draws[self._rng.random() < 0.5].setdefault(what, []).append(message_id)
        asyncio.run_coroutine_threadsafe(self._change(draws[True]), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._start, draws[False])
        return super().hand_over(rows, now_ms)

    def _start(self, calls: Calls) -> None:
        self.late.append(asyncio.ensure_future(self._change(calls)))

    async def _change(self, calls: Calls) -> None:
        await asyncio.gather(*(self._do(what, ids) for what, ids in calls.items() if what))

    async def _do(self, what: str, ids: list[bytes]) -> None:
        broker = self._rig.broker.delayed
        meant = [Meant(each) for each in ids]
        if what == "cancel":
            changed = await broker.cancel(TOPIC, meant)
        elif what == "fire":
            changed = await broker.fire(TOPIC, meant)
        else:
            changed = await broker.reschedule(TOPIC, meant, self._rig.clock.now_ms() + self._rng.randrange(1, OVER_MS))
        for message_id, (outcome, at_ms) in zip(map(unpack_id, ids), changed, strict=True):
            self.outcomes[what, outcome] += 1
            if outcome is ChangeOutcome.DONE and what == "cancel":
                self.cancelled.add(message_id)
            elif outcome is ChangeOutcome.DONE:
                self.until_ms[message_id] = at_ms


@pytest.mark.parametrize("on_disk", [True, False], ids=["rocksdb", "memory"])
def test_either_delivered_or_cancelled(tmp_path: Path, *, on_disk: bool) -> None:
    """The answers say which, none comes before the time that was set last, and the trail and the counts agree."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)

    async def scenario() -> None:
        rig = EmbeddedRig(tmp_path, on_disk=on_disk, options=StoreOptions(gap_event=gap_event))
        await rig.open()
        began_ms = rig.clock.now_ms()
        names = [f"m-{number}" for number in range(MESSAGES)]
        for start in range(0, MESSAGES, 500):
            some = names[start : start + 500]
            # Every tenth belongs to a message group: those take another way through the scheduler.
            await rig.broker.send(
                [
                    an_envelope(
                        each,
                        deliver_at_ms=began_ms + 1 + rng.randrange(OVER_MS),
                        message_group="g" if number % 10 == 0 else "",
                    )
                    for number, each in enumerate(some)
                ]
            )
        placement = Meddling(rig, rng)
        rig.scheduler = Scheduler(rig.store, placement, rig.broker.checks, on_failure=rig.failures.append)
        loop = asyncio.get_running_loop()
        came_ms: dict[str, int] = {}
        while sum(rig.store.pending().values()):
            rig.clock.advance(1)
            while (await loop.run_in_executor(None, rig.scheduler.turn)).handed_over:
                pass
            await asyncio.gather(*placement.late)
            while found := await receive(rig, batch_max=1_000):
                assert not {each.message_id for each in found} & came_ms.keys(), "twice"
                came_ms |= dict.fromkeys((each.message_id for each in found), rig.clock.now_ms())
                await ack(rig, *found)
        assert not placement.cancelled & came_ms.keys(), "both"
        assert placement.cancelled | came_ms.keys() == set(names), "neither"
        assert all(came_ms[each] >= at_ms for each, at_ms in placement.until_ms.items() if each in came_ms), "early"
        check_trail(rig, placement)
        assert not rig.failures
        await rig.close()

    asyncio.run(scenario())


def check_trail(rig: EmbeddedRig, placement: Meddling) -> None:
    """Each entry has one end, with the time that was set last before it; who was too late was told so."""
    set_ms: dict[bytes, int] = {}
    ended: set[bytes] = set()
    for _, event in read_outbox(rig.store):
        match event.kind:
            case EventKind.SCHEDULED | EventKind.RESCHEDULED:
                assert event.message_id not in ended
                set_ms[event.message_id] = event.time_ms
            case EventKind.DELIVERED | EventKind.RECALLED:
                assert event.message_id not in ended
                ended.add(event.message_id)
                assert event.time_ms == set_ms[event.message_id]
                assert (event.kind is EventKind.RECALLED) == (unpack_id(event.message_id) in placement.cancelled)
    assert len(ended) == MESSAGES
    for what in ("cancel", "reschedule", "fire"):
        assert placement.outcomes[what, ChangeOutcome.DONE], f"no {what} was in time"
    assert (
        placement.outcomes["cancel", ChangeOutcome.TOO_LATE] + placement.outcomes["reschedule", ChangeOutcome.TOO_LATE]
    )
    assert not placement.outcomes["cancel", ChangeOutcome.UNKNOWN]
    assert len({pack_id(each) for each in placement.cancelled}) == placement.outcomes["cancel", ChangeOutcome.DONE]
