"""How far a group has come: it never goes back, and a file of offsets is whole or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker_adapter.clock import ManualClock
from broker_adapter.consumer import Consumer
from broker_adapter.consumer.offsets import BrokerOffsets, FileOffsets
from broker_adapter.errors import BrokerUnavailable
from broker_adapter.membership import Membership
from broker_adapter.message_queue import MessageQueue

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
def test_offsets_and_heartbeats_go_on_whatever_went_wrong_before(each: Callable[..., Any]) -> None:
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
