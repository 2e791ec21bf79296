"""The embedded broker with a clock that moves within an operation, and calls that overlap: no message is forgotten."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from support.effort import EFFORT, SEED
from support.models.broker.progress_check import assert_progress
from support.rigs.broker.moving_clock import MovingClock
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, an_envelope, play, receive, until

from broker_adapter.contracts.errors import Refused

pytestmark = pytest.mark.property
CLIENTS = ("client-1", "client-2")
STEPS = 60
LONG_MS = 10**9
AFTER_ALL_MS = 4 * 3_600_000  # after every lease, renewal and retry


class Clients:
    """Producers and consumers of one group, and their receipt handles, also those that are no longer valid."""

    def __init__(self, rig: EmbeddedRig, random: Random) -> None:
        self.rig = rig
        self.random = random
        self.sent = 0
        self.handles: list[str] = []
        self.waiting: set[asyncio.Task[None]] = set()

    async def send(self) -> None:
        """Send a few messages, mostly to one queue; some have a message group, some are due later."""
        envelopes = []
        for _ in range(self.random.randint(1, 16)):
            self.sent += 1
            at_ms = self.rig.clock.now_ms() + self.random.randint(1, 40) if self.random.random() < 0.2 else 0
            group = self.random.choice(("", "", "", "a", "b"))
            envelope = an_envelope(f"m-{self.sent}", message_group=group, deliver_at_ms=at_ms)
            envelopes.append(envelope if group else envelope._replace(queue_id=self.random.choice((0, 1, 1, 1))))
        await self.rig.broker.send(envelopes)

    async def receive(self, wait_ms: int = 0) -> None:
        """Receive with a lease of a few ms, or with one that is renewed."""
        found = await receive(
            self.rig,
            batch_max=self.random.randint(1, 8),
            invisible_ms=self.random.randint(1, 60),
            wait_ms=wait_ms,
            renew_for=self.random.choice(("", "", *CLIENTS)),
        )
        self.handles += [each.receipt_handle for each in found]

    async def receive_later(self) -> None:
        """Receive as soon as there is a message."""
        task = asyncio.ensure_future(self.receive(LONG_MS))
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)

    async def abandon(self) -> None:
        """Cancel a call, as the server does when the client disconnects."""
        calls = (self.receive, self.receive, self.finish, self.finish)
        task = asyncio.ensure_future(self.random.choice(calls)())
        for _ in range(self.random.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def finish(self) -> None:
        """Acknowledge, hide, return or give up with any handle."""
        if not self.handles:
            return
        broker, handles = self.rig.broker, self.random.sample(self.handles, min(3, len(self.handles)))
        with suppress(Refused):
            match self.random.randrange(6):
                case 0 | 1:
                    await broker.ack(GROUP, TOPIC, handles)
                case 2 | 3:
                    ms, suspend = self.random.choice((0, 1, 20)), self.random.random() < 0.5
                    await broker.change_invisible(GROUP, TOPIC, handles[0], ms, suspend=suspend)
                case 4:
                    await broker.not_taken(GROUP, [(TOPIC, each) for each in handles])
                case _:
                    await broker.send_back(GROUP, TOPIC, handles[0], self.random.choice((-1, 0, 1)))

    async def be_seen(self) -> None:
        """Send a heartbeat or unregister."""
        call = self.rig.broker.client_seen if self.random.random() < 0.5 else self.rig.broker.client_gone
        call(self.random.choice(CLIENTS))

    async def end_leases(self) -> None:
        """Time passes, and expired leases end."""
        self.rig.clock.advance(self.random.choice((0, 1, 20, 1_000, 31_000)))
        await self.rig.broker.leases.expire()

    async def stop_waiting(self) -> None:
        """Cancel the receives that wait."""
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)

    async def rest(self) -> None:
        """Return when nothing is under way."""

        def is_at_rest() -> bool:
            failing = self.rig.broker.failures._task
            return self.rig.receives_waiting == len(self.waiting) and (failing is None or failing.done())

        while True:
            await until(is_at_rest)
            await self.rig.settle()
            if is_at_rest():
                return


async def play_history(rig: EmbeddedRig, random: Random) -> None:
    """Overlapping calls; after each round nothing waits in vain, and at the end every message is finished."""
    await rig.set_group(GROUP, max_attempts=6, delays_ms=(5, 50))
    clients = Clients(rig, random)
    calls = [clients.send, clients.receive, clients.receive, clients.finish, clients.finish]
    calls += [clients.receive_later, clients.abandon, clients.be_seen, clients.end_leases]
    for _ in range(STEPS):
        await asyncio.gather(*(random.choice(calls)() for _ in range(random.randint(1, 5))))
        await clients.rest()
        assert_progress(rig.broker)
        if random.random() < 0.04:
            await clients.stop_waiting()
            await rig.restart(End.KILL)
    await clients.stop_waiting()
    for _ in range(12):
        await rig.pass_ms(AFTER_ALL_MS)
        while found := await receive(rig):
            await rig.broker.ack(GROUP, TOPIC, [each.receipt_handle for each in found])
    assert rig.broker.lease_count == 0
    assert all(queue.floor == queue.end for found in rig.broker.subscriptions.all() for queue in found.all_queues)
    assert not rig.store.pending()


@pytest.mark.parametrize("run", range(8 * EFFORT))
def test_no_message_is_forgotten(run: int, tmp_path: Path) -> None:
    """A lease without a timer, or a message that nothing makes available again, would wait for a restart."""
    seed = SEED + run
    print(f"DMQ_TEST_SEED={seed}")
    rig = EmbeddedRig(tmp_path, on_disk=False, queues=2, clock=MovingClock(seed))
    asyncio.run(play(rig, lambda rig: play_history(rig, Random(seed))))
