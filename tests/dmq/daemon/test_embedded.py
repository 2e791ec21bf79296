"""The embedded broker in an application's own process, opened by its address."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from support.rigs.rocketmq.classic import ALL, SEND_MS, joined, pull_some
from support.rigs.rocketmq.real_time import new_id

from broker_adapter.contracts.classic import MessageQueue, Outgoing, Start
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Message
from broker_adapter.queue_client.client import connect
from broker_adapter.queue_client.consumer import ConsumerOptions
from dmq.broker.in_process_client import EmbeddedClassic
from dmq.broker.operations.dead_letters import Letter
from dmq.daemon.embedded import open_embedded
from dmq.errors import StoreError, StoreLocked
from dmq.recovery import check_store
from dmq.store.files.cell import Cell
from retry.dead_letter import DeadFilter

pytestmark = pytest.mark.integration

TOPIC, GROUP = "orders", "workers"


async def send(client: EmbeddedClassic, body: bytes, *, delay_level: int = 0) -> MessageQueue:
    """Send a message to the last queue of the topic."""
    queue = (await client.route(TOPIC)).writable[-1]
    message = Message(topic=TOPIC, message_id=new_id(), body=body)
    await client.send("producers", queue, [Outgoing(message=message, delay_level=delay_level)], timeout_ms=SEND_MS)
    return queue


def test_a_process_opens_a_directory_once_for_all_its_clients(tmp_path: Path) -> None:
    """They see each other; the last one that closes gives it back, whole, and the next run finds all that was sent."""
    path = tmp_path / "dmq"

    async def first_run() -> None:
        a, b = await asyncio.gather(open_embedded(path, "a"), open_embedded(path, "b"))
        await joined(a, GROUP, TOPIC)
        queue = await send(b, b"now")
        await send(b, b"later", delay_level=1)
        assert [each.message.body for each in await pull_some(a, GROUP, queue)] == [b"now"]
        await b.close()
        pulled = await a.pull(GROUP, queue, ALL, 1, batch_max=1, wait_ms=60_000)
        assert [each.message.body for each in pulled.messages] == [b"later"]
        with pytest.raises(StoreLocked):
            Cell(path)
        closing = asyncio.ensure_future(a.close())
        await asyncio.sleep(0)
        again = await open_embedded(path)  # waits for the end of the run before
        await closing
        assert again.client_id
        await again.close()

    async def second_run() -> None:
        client = await open_embedded(path, "a")
        await joined(client, GROUP, TOPIC)
        queue = (await client.route(TOPIC)).readable[-1]
        assert [each.message.body for each in await pull_some(client, GROUP, queue)] == [b"now", b"later"]
        (found, _) = await pull_some(client, GROUP, queue)
        await client.send_back(GROUP, found, delay_level=-1, attempts_max=16)
        await client.send_back(GROUP, found, delay_level=18, attempts_max=16)
        await client.close()

    asyncio.run(first_run())
    asyncio.run(second_run())
    assert not check_store(path, lambda _: None).findings.count


def test_another_loop_and_a_foreign_store_are_refused(tmp_path: Path) -> None:
    """Whatever failed can be opened once it is mended."""

    async def run() -> None:
        client = await open_embedded(tmp_path / "dmq")
        with pytest.raises(Refused) as caught:
            await asyncio.to_thread(asyncio.run, open_embedded(tmp_path / "dmq"))
        assert caught.value.rule is Rule.REQUEST
        await client.close()
        taken = tmp_path / "taken"
        taken.write_text("a file")
        for _ in range(2):
            with pytest.raises(StoreError):
                await open_embedded(taken)
        taken.unlink()
        await (await open_embedded(taken)).close()

    asyncio.run(run())


def test_it_is_opened_by_its_address(tmp_path: Path) -> None:
    """As any cluster is."""

    async def run() -> None:
        seen = asyncio.Event()
        async with await connect(f"embedded:{tmp_path / 'dmq'}") as broker:
            producer = await broker.producer("producers")

            @broker.consumer(GROUP, {TOPIC: "*"}, ConsumerOptions(start=Start.FIRST_OFFSET))
            async def handle(batch: object) -> None:
                seen.set()

            await producer.send(Message(topic=TOPIC, message_id=new_id(), body=b"body"))
            async with asyncio.timeout(60):
                await seen.wait()

    asyncio.run(run())


@pytest.mark.parametrize("in_order", [False, True])
def test_the_error_of_a_handler_is_stored_with_the_dead_letter(tmp_path: Path, *, in_order: bool) -> None:
    """A queue client reports the exception of its handler, with its host and its client id."""

    async def run() -> None:
        async with await connect(f"embedded:{tmp_path / 'dmq'}") as broker:
            producer = await broker.producer("producers")
            options = ConsumerOptions(start=Start.FIRST_OFFSET, in_order=in_order, retries_max=0)

            @broker.consumer(GROUP, {TOPIC: "*"}, options)
            async def handle(batch: object) -> None:
                raise RuntimeError("no courier")

            await producer.send(Message(topic=TOPIC, message_id=new_id(), body=b"body"))
            looker = await open_embedded(tmp_path / "dmq")
            letters: list[Letter] = []
            async with asyncio.timeout(60):
                while not letters:
                    await asyncio.sleep(0.05)
                    with suppress(Refused):  # the group has no dead-letter queue yet
                        page = looker._broker.dead_letters.page
                        letters = (await page(GROUP, DeadFilter(), offset=0, limit=10, with_outcome=False)).letters
            (letter,) = letters
            assert letter.dead.failure is not None
            assert letter.dead.failure.error == "RuntimeError: no courier"
            assert letter.dead.failure.host
            assert letter.dead.failure.client_id
            await looker.close()

    asyncio.run(run())
