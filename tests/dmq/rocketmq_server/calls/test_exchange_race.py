"""Receives that are cancelled, answered, not taken and cut off by dead fronts, in any order.

Choices are drawn by a seed, which a failure tells; ``DMQ_TEST_SEED`` repeats it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from support.effort import EFFORT, SEED
from support.rigs.broker.joined import Joined, port_of
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, an_envelope, play, until

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.message import Delivery, SendReceipt
from dmq.rocketmq_server.calls.exchange import Receive, Received

pytestmark = pytest.mark.property
STEPS = 400
LONG_MS = 60_000
LEASE_MS = 3_600_000  # of a delivery: none ends while clients come and go
IN_DOUBT_MS = 1_001  # what a socket took so long ago its client has


class Life:
    """What one message went through, as far as clients can know."""

    def __init__(self) -> None:
        self.attempts = range(1, 2)  # of which the next delivery may be
        self.holder: Delivery | None = None  # the delivery that a client has
        self.front: Joined | None = None  # that it came by
        self.is_renewed = False
        self.taken_at_ms = 0
        self.is_sent = self.is_done = False


class Machine:
    """Fronts, clients and their messages."""

    def __init__(self, rig: EmbeddedRig, seed: int) -> None:
        self._rig = rig
        self._draw = random.Random(seed)
        self._lives: dict[str, Life] = {}
        self._receiving: dict[asyncio.Task[Received], tuple[Joined, bool]] = {}
        self._fronts: list[Joined] = []
        self.cancelled = self.killed = self.untaken = 0

    async def run(self) -> None:
        self._port = port_of(self._rig.broker, self._rig.clock)
        self._fronts = [await self._front() for _ in range(2)]
        for _ in range(STEPS):
            (step,) = self._draw.choices(
                [self._send, self._receive, self._cancel, self._turn, self._ack, self._kill, self._pass_time],
                [6, 8, 4, 12, 6, 1, 2],
            )
            await step()
            self._look()
        await self._end()

    async def _front(self) -> Joined:
        return await Joined(self._port, self._rig.clock).open()

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        names = [f"m-{len(self._lives) + number}" for number in range(self._draw.randint(1, 3))]
        self._lives |= {name: Life() for name in names}
        sending = self._draw.choice(self._fronts).store.send([an_envelope(name) for name in names], ())
        sending.then(partial(self._sent, names))
        if self._draw.random() < 0.5:
            await until(lambda: self._lives[names[0]].is_sent)

    def _sent(self, names: Sequence[str], sent: Deferred[Sequence[SendReceipt]]) -> None:
        for name in names:
            self._lives[name].is_sent = sent.error is None  # in doubt, if its front died

    async def _receive(self) -> None:
        is_renewed = self._draw.random() < 0.5
        wanted = Receive(GROUP, Subscription(TOPIC), self._draw.randint(1, 4), LEASE_MS, LONG_MS, is_renewed)
        front = self._draw.choice(self._fronts)
        task = asyncio.ensure_future(front.store.receive(wanted, f"client-{len(self._receiving)}", ()))
        self._receiving[task] = front, is_renewed

    async def _cancel(self) -> None:
        if self._receiving:
            self._draw.choice(list(self._receiving)).cancel()
            self.cancelled += 1

    async def _turn(self) -> None:
        for _ in range(self._draw.randint(1, 8)):
            await asyncio.sleep(0)

    async def _ack(self) -> None:
        held = [(name, life) for name, life in self._lives.items() if life.holder is not None]
        for name, life in self._draw.sample(held, min(len(held), 3)):
            await self._done(name, life)

    async def _done(self, name: str, life: Life) -> None:
        assert life.holder is not None
        handle, front = life.holder.receipt_handle, self._draw.choice(self._fronts)
        life.is_done, life.holder = True, None  # it must not come again, whenever the answer does
        results = await front.store.ack(GROUP, TOPIC, [handle])
        assert not any(results), (name, results)

    async def _kill(self) -> None:
        front = self._draw.choice(self._fronts)
        self._fronts.remove(front)
        self._look()
        front.kill()
        self.killed += 1
        its_own = [task for task, (of, _) in self._receiving.items() if of is front]
        for task in its_own:  # whatever they got, nobody is there to pass it on
            del self._receiving[task]
            task.cancel()
        await asyncio.gather(*its_own, return_exceptions=True)
        await until(lambda: front.behind.is_lost and front.front.is_lost)
        for life in self._lives.values():
            if life.holder is None:  # it may have been on its way
                life.attempts = range(life.attempts.start, life.attempts.stop + 1)
            elif life.front is front and self._rig.clock.boot_ms() - life.taken_at_ms < IN_DOUBT_MS:
                life.holder = (
                    None  # it comes again: at once, or when its lease ends, if the front had said that it is taken
                )
        self._fronts.append(await self._front())

    async def _pass_time(self) -> None:
        await self._settle()  # what is taken is known to be
        self._rig.clock.advance(IN_DOUBT_MS)

    async def _settle(self) -> None:
        for front in self._fronts:
            await front.quiet()
        await until(lambda: not self._port.service.exchange._giving_back)
        await self._rig.settle()

    # -- what clients see ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what receives got, or do not."""
        for task, (front, is_renewed) in list(self._receiving.items()):
            if not task.done():
                continue
            del self._receiving[task]
            if task.cancelled():
                continue
            received = task.result()
            is_taken = self._draw.random() < 0.7
            self._came(received.deliveries, front if is_taken else None, is_renewed=is_renewed)
            received.over(is_taken)
            self.untaken += not is_taken and bool(received.deliveries)

    def _came(self, deliveries: Sequence[Delivery], front: Joined | None, *, is_renewed: bool) -> None:
        """Note who has them: clients of a front, or nobody."""
        for each in deliveries:
            life = self._lives[each.message_id]
            assert not life.is_done, f"{each.message_id} was acknowledged, and comes again"
            assert life.holder is None, f"{each.message_id} is somebody's, and somebody else gets it"
            attempt = each.delivery_attempt
            assert attempt in life.attempts, f"{each.message_id}: attempt {attempt}, not of {life.attempts}"
            life.attempts = range(attempt + 1, attempt + 2)
            if front is not None:
                life.holder, life.front, life.is_renewed = each, front, is_renewed
                life.taken_at_ms = self._rig.clock.boot_ms()

    async def _end(self) -> None:
        """Finish everything: all that was sent is there, once."""
        for task in self._receiving:
            task.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)
        self._look()
        await self._settle()
        for name, life in self._lives.items():
            if life.holder is not None:
                await self._done(name, life)
        self._rig.clock.advance(LEASE_MS)
        await self._settle()
        wanted = Receive(GROUP, Subscription(TOPIC), 32, LEASE_MS, 0, False)
        while (received := await self._port.service.exchange.receive(wanted, "last", ())).deliveries:
            self._came(received.deliveries, self._fronts[0], is_renewed=False)
            for each in received.deliveries:
                await self._done(each.message_id, self._lives[each.message_id])
        lost = [name for name, life in self._lives.items() if life.is_sent and not life.is_done]
        assert not lost, f"neither handed out nor there: {lost}"
        for front in self._fronts:
            await front.quiet()
            assert not front.host._handed
            assert not front.host._tasks
            assert not front.store._waiting
            await front.close()


@pytest.mark.parametrize("run", range(8 * EFFORT))
def test_nothing_is_lost_and_nothing_is_handed_out_twice_without_reason(run: int, tmp_path: Path) -> None:
    """Whatever happens around the answers: who holds a message holds it alone, at the attempt that it should be."""
    seed = SEED + run
    print(f"seed {seed}")

    async def scenario(rig: EmbeddedRig) -> None:
        machine = Machine(rig, seed)
        await machine.run()
        print(f"{machine.cancelled} cancelled, {machine.untaken} not taken, {machine.killed} fronts killed")

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))
