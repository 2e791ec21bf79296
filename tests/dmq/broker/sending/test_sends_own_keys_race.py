"""Replacement against the hand-over: a message is delivered or replaced, never both and never neither.

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
from support.forges.messages.own_keys import keyed, waiting_under_keys
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import EmbeddedRig, ack, receive

from broker_adapter.contracts.message import pack_id, unpack_id
from dmq.broker.sending.placement import Placement
from dmq.scheduler.scheduler import Scheduler
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, body_facts
from dmq.store.store import StoreOptions
from dmq.store.writer.operations import HandOver
from dmq.trail.events import EventKind, gap_event

pytestmark = pytest.mark.property

KEYS, OVER_MS, ROUNDS = 500 * EFFORT, 10, 4


class Interrupted(Placement):
    """Between the scheduler's read and its commit: some of what it holds is replaced, more is while it commits."""

    def __init__(self, rig: EmbeddedRig, rng: random.Random) -> None:
        super().__init__(rig.broker.names)
        self._rig = rig
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self.sent: list[str] = []
        self.late: list[asyncio.Future[None]] = []

    async def send_all(self, names: Sequence[str]) -> None:
        """Send messages side by side, each under the key that its name begins with; a few are not delayed."""

        async def one(name: str) -> None:
            at_ms = 0 if self._rng.random() < 0.1 else self._rig.clock.now_ms() + 1 + self._rng.randrange(OVER_MS)
            group = "g" if self._rng.random() < 0.1 else ""
            await self._rig.broker.send([keyed(name, at_ms, key=name.split("-", maxsplit=1)[0], message_group=group)])

        self.sent += names
        await asyncio.gather(*map(one, names))

    def hand_over(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[HandOver]:
        """Read is done; replace a third of it now, a third beside the commit, a few times over."""
        taken = [unpack_id(body_facts(value[WAITING_HEADER_BYTES:])[0]) for _, value in rows]
        later = [_next(each) for each in taken if int(each.split("-")[1]) < ROUNDS]
        draws = {each: self._rng.randrange(3) for each in later}
        now = self.send_all([each for each in later if draws[each] == 0])
        asyncio.run_coroutine_threadsafe(now, self._loop).result(30)
        self._loop.call_soon_threadsafe(self._start, [each for each in later if draws[each] == 1])
        return super().hand_over(rows, now_ms)

    def _start(self, names: list[str]) -> None:
        self.late.append(asyncio.ensure_future(self.send_all(names)))


def _next(name: str) -> str:
    key, number = name.split("-")
    return f"{key}-{int(number) + 1}"


@pytest.mark.parametrize("on_disk", [True, False], ids=["rocksdb", "memory"])
def test_a_replacement_between_the_read_and_the_commit_of_a_hand_over(tmp_path: Path, on_disk: bool) -> None:
    """What was replaced meanwhile is not handed over, the rest is; each replacement comes, unless it is replaced."""
    print(f"DMQ_TEST_SEED={SEED}")

    async def scenario() -> None:
        rig = EmbeddedRig(tmp_path, on_disk=on_disk, options=StoreOptions(gap_event=gap_event))
        await rig.open()
        placement = Interrupted(rig, random.Random(SEED))
        await placement.send_all([f"k{number}-0" for number in range(KEYS)])
        rig.scheduler = Scheduler(rig.store, placement, rig.broker.checks, on_failure=rig.failures.append)
        loop = asyncio.get_running_loop()
        while rig.store.pending():
            rig.clock.advance(1)
            while (await loop.run_in_executor(None, rig.scheduler.turn)).handed_over:
                pass
            await asyncio.gather(*placement.late)
        came: Counter[str] = Counter()
        while found := await receive(rig, batch_max=1000):
            came.update(each.message_id for each in found)
            await ack(rig, *found)
        told = [each.event for each in read_outbox(rig.store)]
        replaced = [unpack_id(each.message_id) for each in told if each.kind is EventKind.REPLACED]
        assert set(came.values()) == {1}
        assert len(set(replaced)) == len(replaced) > KEYS // 10
        assert sorted([*came, *replaced]) == sorted(placement.sent)
        at_once = {each.message_id for each in told if each.kind is EventKind.QUEUED}
        assert not at_once & {pack_id(each) for each in replaced}
        assert waiting_under_keys(rig.store) == {}
        assert not rig.failures
        await rig.close()

    asyncio.run(scenario())
