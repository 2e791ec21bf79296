"""How far a group has come: it never goes back, and a file of offsets is whole or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.consumer import Consumer
from broker_adapter.queue_client.consumer.offsets import BrokerOffsets, FileOffsets
from broker_adapter.queue_client.membership import Membership
from broker_adapter.runtime.clock import ManualClock

QUEUE = MessageQueue("orders", "a", 3)


class _Broker:
    """Keeps offsets, or fails to. Stands in for the fault."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.is_away = False

    async def commit_offset(self, _group: str, _queue: MessageQueue, offset: int) -> None:
        if self.is_away:
            raise BrokerUnavailable("away")
        self.commits.append(offset)

    async def committed_offset(self, _group: str, _queue: MessageQueue) -> int | None:
        return self.commits[-1]


class _Broker4:
    """Makes the table of a group at its first commit, as RocketMQ 4.9.7 does: two that come together make two tables.

    Stands in for the fault, which a real one shows once in a few hundred groups.
    """

    def __init__(self) -> None:
        self.table: dict[MessageQueue, int] | None = None
        self.commits = 0

    async def commit_offset(self, _group: str, queue: MessageQueue, offset: int) -> None:
        self.commits += 1
        table = self.table
        await asyncio.sleep(0)  # another thread of the broker
        if table is None:
            table = self.table = {}
        table[queue] = offset

    async def committed_offset(self, _group: str, queue: MessageQueue) -> int | None:
        return (self.table or {}).get(queue)


def test_first_commits_of_several_queues_are_all_kept() -> None:
    """Danger: a broker of RocketMQ 4 keeps one of those that come together, and says OK to all."""

    async def run() -> None:
        broker, queues = _Broker4(), [MessageQueue("orders", "a", number) for number in range(8)]
        offsets = BrokerOffsets(broker, "workers", ManualClock())  # type: ignore[arg-type]  # what it needs of one
        for number, queue in enumerate(queues):
            offsets.note(queue, number + 1)
        assert await offsets.flush()
        assert broker.table == {queue: number + 1 for number, queue in enumerate(queues)}
        assert broker.commits == len(queues)

    asyncio.run(run())


def test_a_queue_that_is_given_up_is_committed_again() -> None:
    """Another member's first commit may have replaced the table since: OK is not believed then, for half a minute."""

    async def run() -> None:
        broker = _Broker4()
        offsets = BrokerOffsets(broker, "workers", ManualClock())  # type: ignore[arg-type]  # what it needs of one
        offsets.note(QUEUE, 5)
        assert await offsets.flush()
        broker.table = {}
        assert await offsets.flush([QUEUE])
        assert broker.table == {QUEUE: 5}

    asyncio.run(run())


def test_a_first_commit_that_a_broker_loses_is_not_believed() -> None:
    """It is sent again, a few times, and by the next flush."""

    async def run() -> None:
        broker, losses = _Broker4(), 5

        async def commit(_group: str, queue: MessageQueue, offset: int) -> None:
            nonlocal losses
            losses -= 1
            broker.table = {queue: offset} if losses < 0 else {}

        broker.commit_offset = commit  # type: ignore[method-assign]
        offsets = BrokerOffsets(broker, "workers", ManualClock())  # type: ignore[arg-type]  # what it needs of one
        offsets.note(QUEUE, 5)
        assert not await offsets.flush()
        assert await offsets.flush()
        assert (broker.table, losses) == ({QUEUE: 5}, -1)

    asyncio.run(run())


def test_an_offset_never_goes_back_and_is_committed_now_and_then() -> None:
    """What could not be committed is tried again by the next flush, what could be after half a minute."""

    async def run() -> None:
        broker, clock = _Broker(), ManualClock()
        offsets = BrokerOffsets(broker, "workers", clock)  # type: ignore[arg-type]  # what it needs of one
        offsets.note(QUEUE, 5)
        offsets.note(QUEUE, 3)
        broker.is_away = True
        assert not await offsets.flush()
        broker.is_away = False
        assert await offsets.flush()
        assert await offsets.flush()
        assert broker.commits == [5]
        clock.advance(29_999)
        assert await offsets.flush()
        assert broker.commits == [5]
        clock.advance(1)
        assert await offsets.flush()
        assert broker.commits == [5, 5]

    asyncio.run(run())


@pytest.mark.parametrize("each", [Consumer._each, Membership._each])
def test_offsets_and_heartbeats_continue_after_any_earlier_failure(each: Callable[..., Any]) -> None:
    """Danger: an unexpected error ended them without a word."""

    async def run() -> None:
        again, errors = asyncio.Event(), [BrokerUnavailable("away"), LookupError("unexpected")]

        async def act() -> None:
            if errors:
                raise errors.pop()
            again.set()

        going_on = asyncio.ensure_future(each(SimpleNamespace(group="workers", client_id="c"), 1, act))
        await asyncio.wait_for(again.wait(), 30)
        going_on.cancel()

    asyncio.run(run())


def test_a_file_of_offsets_is_read_by_the_next_run(tmp_path: Path) -> None:
    """And it goes only forward as well."""

    async def run() -> None:
        path = tmp_path / "new" / "offsets.json"
        offsets = FileOffsets(path)
        assert await offsets.read(QUEUE) is None
        offsets.note(QUEUE, 5)
        offsets.note(QUEUE, 3)
        assert await offsets.flush()
        assert await FileOffsets(path).read(QUEUE) == 5

    asyncio.run(run())


@pytest.mark.parametrize("content", [b"", b"{}", b'{"offsets": [["orders", "a"]]}', b"\xff\xfe", b'{"offsets": [1]}'])
def test_a_damaged_file_of_offsets_is_refused(tmp_path: Path, content: bytes) -> None:
    """It says what to do: to go on without it would skip or repeat everything."""
    path = tmp_path / "offsets.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="restore it, or remove it"):
        FileOffsets(path)
