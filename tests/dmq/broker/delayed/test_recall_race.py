"""Recall against the hand-over, thousands of times: a message is delivered or recalled, never both and never neither.

``DMQ_TEST_SEED`` repeats the choices of a run, not its timing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from support.effort import EFFORT, SEED
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, ack, an_envelope, receive, until

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import pack_id
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.sending.placement import Placement
from dmq.scheduler.scheduler import Scheduler
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, body_facts
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import HandOver
from dmq.trail.events import EventKind, gap_event

pytestmark = [pytest.mark.property, pytest.mark.timeout(120 * EFFORT)]
BATCH, OVER_MS = 500, 10
MESSAGES = 4_000 if EFFORT > 1 else 1_500


class Outcomes:
    """What every recall was told."""

    def __init__(self) -> None:
        self.recalled: set[str] = set()
        self.refused: dict[str, str] = {}  # and why

    async def recall(self, broker: EmbeddedBroker, handles: dict[str, str], message_ids: Iterable[str]) -> None:
        """Recall messages, all at once."""

        async def one(message_id: str) -> None:
            try:
                receipt = await broker.recall(TOPIC, handles[message_id])
            except Refused as refused:
                self.refused[message_id] = refused.why
            else:
                assert receipt.message_id == message_id
                self.recalled.add(message_id)

        await asyncio.gather(*(one(each) for each in message_ids))


class Interrupted(Placement):
    """Between the scheduler's read and its commit: some of what it holds is recalled, more is while it commits."""

    def __init__(self, rig: EmbeddedRig, handles: dict[str, str], outcomes: Outcomes, rng: random.Random) -> None:
        super().__init__(rig.broker.names)
        self._rig = rig
        self._handles = handles
        self._outcomes = outcomes
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self.names_by_id = {pack_id(each): each for each in handles}
        self.late: list[asyncio.Future[None]] = []

    def hand_over(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[HandOver]:
        """Read is done; recall a third of it now, a third beside the commit."""
        taken = [self.names_by_id[body_facts(value[WAITING_HEADER_BYTES:])[0]] for _, value in rows]
        draws = {each: self._rng.randrange(3) for each in taken}
        now = self._outcomes.recall(self._rig.broker, self._handles, [each for each in taken if draws[each] == 0])
        asyncio.run_coroutine_threadsafe(now, self._loop).result(30)
        later = [each for each in taken if draws[each] == 1]
        self._loop.call_soon_threadsafe(self._start, later)
        return super().hand_over(rows, now_ms)

    def _start(self, message_ids: list[str]) -> None:
        work = self._outcomes.recall(self._rig.broker, self._handles, message_ids)
        self.late.append(asyncio.ensure_future(work))


async def send_all(broker: EmbeddedBroker, times_ms: dict[str, int]) -> dict[str, str]:
    """Send delayed messages and return their handles."""
    handles: dict[str, str] = {}
    waiting = list(times_ms.items())
    for start in range(0, len(waiting), BATCH):
        batch = waiting[start : start + BATCH]
        # Every tenth belongs to a message group: those take another way through the scheduler.
        envelopes = [
            an_envelope(each, deliver_at_ms=at_ms, message_group=f"g{number % 7}" if number % 10 == 0 else "")
            for number, (each, at_ms) in enumerate(batch)
        ]
        handles |= {each.message_id: each.recall_handle for each in await broker.send(envelopes)}
    return handles


async def check(rig: EmbeddedRig, sent: set[str], outcomes: Outcomes) -> None:
    """Each message came once or was recalled, exactly one of them; the trail and the counts say the same."""
    came: Counter[str] = Counter()
    while found := await receive(rig, batch_max=1000):
        came.update(each.message_id for each in found)
        await ack(rig, *found)
    assert set(came.values()) <= {1}
    assert not outcomes.recalled & came.keys(), "both"
    assert outcomes.recalled | came.keys() == sent, "neither"
    assert outcomes.refused.keys() <= came.keys()
    assert all("delivered at" in why for why in outcomes.refused.values())
    told = Counter(each.event.kind for each in read_outbox(rig.broker.store))
    assert told[EventKind.RECALLED] == len(outcomes.recalled)
    # what was due already when it was accepted never waited
    assert told[EventKind.DELIVERED] + told[EventKind.QUEUED] == len(came)
    assert not sum(rig.store.pending().values())


@pytest.mark.parametrize("on_disk", [True, False], ids=["rocksdb", "memory"])
def test_a_recall_between_the_read_and_the_commit_of_a_hand_over(tmp_path: Path, on_disk: bool) -> None:
    """The scheduler holds the row already: what was recalled meanwhile it does not hand over, and the rest it does."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng, outcomes = random.Random(SEED), Outcomes()

    async def scenario() -> None:
        rig = EmbeddedRig(tmp_path, on_disk=on_disk, options=StoreOptions(gap_event=gap_event))
        await rig.open()
        began_ms = rig.clock.now_ms()
        times_ms = {f"m-{number}": began_ms + 1 + rng.randrange(OVER_MS) for number in range(MESSAGES)}
        handles = await send_all(rig.broker, times_ms)
        placement = Interrupted(rig, handles, outcomes, rng)
        rig.scheduler = Scheduler(rig.store, placement, rig.broker.checks, on_failure=rig.failures.append)
        loop = asyncio.get_running_loop()
        for _ in range(OVER_MS + 1):
            rig.clock.advance(1)
            while (await loop.run_in_executor(None, rig.scheduler.turn)).handed_over:
                pass
        await asyncio.gather(*placement.late)
        assert len(outcomes.recalled) > MESSAGES // 4, "hardly anything was recalled in time"
        assert len(outcomes.refused) > MESSAGES // 40, "hardly anything was recalled too late"
        await check(rig, set(handles), outcomes)
        assert not rig.failures
        await rig.close()

    asyncio.run(scenario())


def test_recalls_at_the_delivery_time(tmp_path: Path) -> None:
    """A running scheduler and a client that recalls each message when it is due, give or take a few milliseconds."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng, outcomes, clock = random.Random(SEED), Outcomes(), SystemClock()

    async def scenario() -> None:
        rig = EmbeddedRig(tmp_path, on_disk=True)
        rig.store = Store(RocksEngine(tmp_path / "real"), clock, StoreOptions(gap_event=gap_event))
        rig.broker = EmbeddedBroker(rig.store)
        rig.scheduler = Scheduler(rig.store, rig.broker.placement, rig.broker.checks, on_failure=rig.failures.append)
        rig.scheduler.start()
        handles, times_ms = dict[str, str](), dict[str, int]()
        first_ms, over_ms, lead_ms = 0, 2_000, 2_500
        while first_ms <= clock.now_ms():  # a machine that stalled sent them when they were due: others are sent
            first_ms, sent = clock.now_ms() + lead_ms, len(handles)
            times_ms = {f"m-{sent + number}": first_ms + rng.randrange(over_ms) for number in range(MESSAGES)}
            handles |= await send_all(rig.broker, times_ms)
            lead_ms *= 2
        moments = sorted((at_ms + round(rng.gauss(0, 4)), each) for each, at_ms in times_ms.items())
        tasks = []
        for at_ms, message_id in moments:
            while clock.now_ms() < at_ms:  # noqa: ASYNC110 - time is what is waited for
                await asyncio.sleep(0.0005)
            tasks.append(asyncio.ensure_future(outcomes.recall(rig.broker, handles, [message_id])))
        await asyncio.gather(*tasks)
        await until(lambda: not sum(rig.store.pending().values()))
        assert outcomes.recalled, "nothing was recalled in time"
        assert outcomes.refused, "nothing was recalled too late"
        await check(rig, set(handles), outcomes)
        assert not rig.failures
        await rig.close()

    asyncio.run(scenario())
