"""Reading messages for many who ask at once: a batch of bytes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.rigs.store.rows import TOPIC, append

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.io.reader import READ_BYTES_MAX, Reader
from dmq.store.engines.engine import Rows
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.store import Store, StoreOptions

MIB = 1024 * 1024
LARGE, COUNT = MIB, 40
MOST_AT_ONCE = READ_BYTES_MAX + LARGE + 1_000  # the last message may not fit
QUEUES = [GroupQueue(1, TOPIC, number) for number in range(COUNT)]


class Counting(MemoryEngine):
    """Counts the bytes of messages that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def get_many(self, family: Family, keys: Any) -> list[bytes | None]:  # noqa: ANN401
        found = super().get_many(family, keys)
        self.read_bytes += sum(len(each) for each in found if each is not None and family is Family.QUEUE)
        return found

    def scan(self, family: Family, start: bytes, stop: bytes, **bounds: Any) -> Rows:  # noqa: ANN401
        found = super().scan(family, start, stop, **bounds)
        self.read_bytes += sum(len(value) for _, value in found.rows if family is Family.QUEUE)
        return found


def run(scenario: Callable[[Reader, Counting], Coroutine[Any, Any, None]], *, in_one_queue: bool) -> None:
    """Play a scenario with so many large messages: each in a queue of its own, or all in the first one."""

    async def play() -> None:
        engine = Counting()
        store = Store(engine, SystemClock(), StoreOptions())
        reader = Reader(store, asyncio.get_running_loop())
        try:
            body = bytes(LARGE)
            store.commit([append(each, queue_id=0 if in_one_queue else each, payload=body) for each in range(COUNT)])
            engine.read_bytes = 0
            await scenario(reader, engine)
        finally:
            reader.close()
            store.close()

    asyncio.run(play())


def test_simultaneous_readers_share_a_batch() -> None:
    """Danger: 400 receives of 23 bytes each had gigabytes read before any of it was counted."""

    async def scenario(reader: Reader, engine: Counting) -> None:
        told: list[tuple[int, int]] = []

        async def ask(number: int) -> None:
            (found,) = await reader.messages([(QUEUES[number], 0)])
            told.append((number, engine.read_bytes))
            assert len(found.payload) == LARGE

        await asyncio.gather(*(ask(number) for number in range(COUNT)))
        assert [number for number, _ in told] == list(range(COUNT))
        for already, (_, read_bytes) in enumerate(told):
            assert read_bytes <= already * (LARGE + 1_000) + 2 * MOST_AT_ONCE  # one batch told, and the next one read

    run(scenario, in_one_queue=False)


@pytest.mark.parametrize("in_one_queue", [False, True])
def test_the_first_ones_suffice_on_request(in_one_queue: bool) -> None:
    """Of one queue, which is scanned, and of many; who does not say so gets all of them."""

    async def scenario(reader: Reader, engine: Counting) -> None:
        places = [(QUEUES[0], each) if in_one_queue else (QUEUES[each], 0) for each in range(COUNT)]
        cut = await reader.messages(places, is_cut=True)
        assert READ_BYTES_MAX <= sum(len(each.payload) for each in cut) <= MOST_AT_ONCE
        assert engine.read_bytes <= MOST_AT_ONCE + 8_000
        whole = await reader.messages(places)
        assert len(whole) == COUNT
        assert [each.message_id for each in whole[: len(cut)]] == [each.message_id for each in cut]

    run(scenario, in_one_queue=in_one_queue)


def test_an_unreadable_message_fails_its_own_look_alone() -> None:
    """Those before it and behind it, of the same turn, are read."""

    async def scenario(reader: Reader, _: Counting) -> None:
        asked = [[(QUEUES[1], 0)], [(QUEUES[2], 0), (QUEUES[2], 9)], [(QUEUES[3], 0)]]
        found = await asyncio.gather(*(reader.messages(places) for places in asked), return_exceptions=True)
        assert [isinstance(each, BrokerUnavailable) for each in found] == [False, True, False]

    run(scenario, in_one_queue=False)


def test_a_departed_reader_is_not_read_for() -> None:
    """A receive whose client left while others' messages were read."""

    async def scenario(reader: Reader, engine: Counting) -> None:
        asking = [asyncio.ensure_future(reader.messages([(queue, 0)])) for queue in QUEUES]
        first: list[QueuedMessage] = await asking[0]
        for each in asking[1:]:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert len(first) == 1
        assert len(await reader.messages([(QUEUES[1], 0)])) == 1
        assert engine.read_bytes <= 2 * MOST_AT_ONCE + 2 * LARGE

    run(scenario, in_one_queue=False)
