"""Who reads at the end of a queue is served from memory; what is there is what a look at the store would find."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.forges.messages.letters import DEAD, PURGE, die, finish, only
from support.rigs.broker.rig import EmbeddedRig, ack, an_envelope, every_durable_broker, ids, receive, send, until

from broker_adapter.contracts.message import Delivery
from dmq.broker.groups import subscriptions as subscriptions_module
from dmq.store.schema.keys import Family
from dmq.store.writer.operations import Appended

pytestmark = pytest.mark.contract
LONG_MS = 60_000


class Looks:
    """Counts what the broker reads of the queues."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.count = 0
        self.before: Callable[[], object] = lambda: None
        self._read = rig.broker.store.get_many
        rig.broker.store.get_many = self._get_many  # type: ignore[method-assign]

    def _get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        if family is Family.QUEUE:
            self.count += 1
            self.before()
        return self._read(family, wanted)


async def wait_for(rig: EmbeddedRig, *, group: str = "readers") -> asyncio.Task[Sequence[Delivery]]:
    """Start a receive and return when it waits."""
    before = rig.receives_waiting
    receiving = asyncio.ensure_future(receive(rig, group=group, wait_ms=LONG_MS))
    await until(lambda: rig.receives_waiting > before)
    return receiving


@every_durable_broker()
async def test_a_message_that_just_came_needs_no_look_at_the_store(rig: EmbeddedRig) -> None:
    """For one group and for two; a group that comes later looks, and finds the same."""
    first, second = await wait_for(rig), await wait_for(rig, group="others")
    looks = Looks(rig)
    await send(rig, "m-1", "m-2")
    found = [*await first, *await receive(rig, group="readers")]
    others = [*await second, *await receive(rig, group="others")]
    assert sorted(ids(found)) == sorted(ids(others)) == ["m-1", "m-2"]
    assert looks.count == 0
    late = await receive(rig, group="late")
    assert sorted((each.message_id, each.payload) for each in late) == sorted(
        (each.message_id, each.payload) for each in found
    )


@every_durable_broker()
async def test_a_wake_up_for_a_gone_message_is_passed_on(rig: EmbeddedRig) -> None:
    """Two queues grew and one receive was woken, but its message is gone: who waits for the other queue hears of it."""
    await send(rig, *(f"m-{number}" for number in range(4)))
    await receive(rig)
    waits = [asyncio.ensure_future(receive(rig, queue_id=queue_id, wait_ms=LONG_MS)) for queue_id in (0, 1)]
    await until(lambda: rig.receives_waiting == 2)
    (found,) = rig.broker.subscriptions.all()
    on_appended = rig.broker.subscriptions.on_appended

    def and_one_is_gone(appended: Appended) -> None:
        on_appended(appended)
        found.queues[0].finish((1,))

    rig.broker.store.attach(asyncio.get_running_loop(), and_one_is_gone)
    await send(rig, "m-4", "m-5")
    assert ids(await waits[1]) == ["m-5"]
    waits[0].cancel()
    await asyncio.gather(*waits, return_exceptions=True)


@every_durable_broker(queues=1)
async def test_an_entry_in_memory_does_not_pass_one_being_read(rig: EmbeddedRig) -> None:
    """A receive reads old messages of a group while a new one comes: it waits its turn, and so does who asks for it."""
    await rig.broker.send([an_envelope(f"m-{number}", message_group="g") for number in range(2)])
    await receive(rig, topic="other")  # the group is there
    looks, may_read = Looks(rig), threading.Event()
    looks.before = may_read.wait
    reading = asyncio.ensure_future(receive(rig))
    await until(lambda: looks.count == 1)
    leased = rig.broker.receipts.epoch
    await rig.broker.send([an_envelope("m-2", message_group="g")])
    asking = asyncio.ensure_future(receive(rig, wait_ms=LONG_MS))
    for _ in range(100):  # the loop goes round
        await asyncio.sleep(0)
    looked, is_done = rig.broker.receipts.epoch - leased, asking.done()
    may_read.set()
    assert (looked, is_done) == (1, False), "it looks once, and waits"
    first = await reading
    assert ids(first) == ["m-0", "m-1"]
    assert not asking.done()
    await ack(rig, *first)
    assert ids(await asking) == ["m-2"]


@every_durable_broker()
async def test_nothing_is_cached_without_a_reader(rig: EmbeddedRig) -> None:
    """A topic that no group reads takes no memory."""
    await send(rig, "m-1")
    assert rig.broker.reader.recent.size_bytes == 0


@every_durable_broker(queues=1)
async def test_nothing_is_cached_for_a_reader_far_behind(rig: EmbeddedRig) -> None:
    """Its messages would be gone from memory before it comes to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subscriptions_module, "LAG_MAX", 2)
        patch.setattr(subscriptions_module, "_RECHECK_MESSAGES", 0)
        await receive(rig)  # the group is there, and at the end
        for number in range(3):
            await send(rig, f"m-{number}")
            assert rig.broker.reader.recent.size_bytes
        await send(rig, "m-3")
        assert not rig.broker.reader.recent.size_bytes
    assert ids(await receive(rig)) == [f"m-{number}" for number in range(4)]


@every_durable_broker(queues=1)
async def test_purged_letters_are_not_delivered_from_memory(rig: EmbeddedRig) -> None:
    """A group reads dead letters as they come: what was removed meanwhile, its next receive does not find."""
    await receive(rig, topic=DEAD, group="readers")
    await die(rig, an_envelope("m-1", payload=b"secret"))
    await finish(rig, replace(PURGE, filter=only("m-1")))
    await die(rig, an_envelope("m-2"))
    assert ids(await receive(rig, topic=DEAD, group="readers")) == ["m-2"]
