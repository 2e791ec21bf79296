"""Committed offsets of a group: kept by the brokers, or in a file for broadcasting."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from broker_adapter.contracts.classic import ClassicBroker
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog

_log = LibraryLog("broker_adapter.queue_client.consumer")


_TOLD_AGAIN_S = 30.0  # RocketMQ's clients commit all offsets every 5 s


_FIRST_COMMITS_MAX = 3  # attempts for an offset that the broker keeps losing


class _Kept(NamedTuple):
    offset: int
    at_s: float


class Offsets(Protocol):
    """Offsets at which consumption continues. ``note`` only updates memory; ``flush`` makes noted offsets durable."""

    async def read(self, queue: MessageQueue) -> int | None:
        """Return the committed offset, or ``None`` if there is none. Raises the errors of the broker."""
        ...

    def note(self, queue: MessageQueue, offset: int) -> None:
        """Record an offset; a lower one is ignored."""
        ...

    def move(self, queue: MessageQueue, offset: int) -> None:
        """Note an offset, also a lower one, after a reset by the broker or an operator."""
        ...

    def forget(self, queue: MessageQueue) -> None:
        """Stop reporting a released queue: it has another owner."""
        ...

    async def flush(self, queues: Iterable[MessageQueue] | None = None, /) -> bool:
        """Commit the noted offsets of these queues, also committed ones again, or of all queues as needed.

        Return True if all are committed. Later calls retry failures.
        """
        ...


class BrokerOffsets:
    """Offsets kept by the broker of each queue.

    An offset is committed again from time to time: the queue's last owner may have committed a lower one later.

    A broker of RocketMQ 4 (4.9.7: ``ConsumerOffsetManager.commitOffset``) creates the table of a group and topic on its
    first commit. For concurrent first commits it creates several tables, keeps one, and answers OK to all. So the first
    commit at a broker is sent alone and read back. Other members of the group may still replace the table.
    """

    def __init__(self, broker: ClassicBroker, group: str, clock: Clock) -> None:
        self._broker = broker
        self._group = group
        self._clock = clock
        self._noted: dict[MessageQueue, int] = {}
        self._kept: dict[MessageQueue, _Kept] = {}
        self._first: dict[tuple[str, str], asyncio.Lock] = {}  # by topic and broker, until the broker has the table
        self._has_table: set[tuple[str, str]] = set()

    async def read(self, queue: MessageQueue) -> int | None:
        return await self._broker.committed_offset(self._group, queue)

    def note(self, queue: MessageQueue, offset: int) -> None:
        self._noted[queue] = max(offset, self._noted.get(queue, 0))

    def move(self, queue: MessageQueue, offset: int) -> None:
        self._noted[queue] = offset

    def forget(self, queue: MessageQueue) -> None:
        self._noted.pop(queue, None)
        self._kept.pop(queue, None)

    async def flush(self, queues: Iterable[MessageQueue] | None = None, /) -> bool:
        due = [
            (queue, self._noted[queue])
            for queue in (list(self._noted) if queues is None else queues)
            if queue in self._noted and (queues is not None or not self._is_kept(queue))
        ]
        return all(await asyncio.gather(*(self._commit(queue, offset) for queue, offset in due)))

    def _is_kept(self, queue: MessageQueue) -> bool:
        kept = self._kept.get(queue)
        return (
            kept is not None
            and kept.offset == self._noted[queue]
            and self._clock.monotonic_s() - kept.at_s < _TOLD_AGAIN_S
        )

    async def _commit(self, queue: MessageQueue, offset: int) -> bool:
        try:
            if not await self._commit_first(queue, offset):
                await self._broker.commit_offset(self._group, queue, offset)
        except BrokerError as error:
            _log.warning("offset_commit_failed", group=self._group, queue=str(queue), offset=offset, error=str(error))
            return False
        if queue in self._noted:
            self._kept[queue] = _Kept(offset, self._clock.monotonic_s())
        return True

    async def _commit_first(self, queue: MessageQueue, offset: int) -> bool:
        """Commit the first offset of a topic at its broker, alone. Return False if the table already exists."""
        place = queue.topic, queue.broker
        if place in self._has_table:
            return False
        async with self._first.setdefault(place, asyncio.Lock()):
            if place in self._has_table:
                return False
            for _ in range(_FIRST_COMMITS_MAX):
                await self._broker.commit_offset(self._group, queue, offset)
                if await self._broker.committed_offset(self._group, queue) == offset:
                    break
            else:
                raise BrokerUnavailable(f"the broker answers OK to offset {offset} and does not have it")
            self._has_table.add(place)
        del self._first[place]
        return True


class FileOffsets:
    """Offsets in a file of this client, replaced as a whole: a crash leaves the old file or the new one.

    ``ValueError`` for a file with other content: to continue without it would skip or repeat all messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = _read(path)
        self._is_kept = True

    async def read(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    def note(self, queue: MessageQueue, offset: int) -> None:
        if offset > self._offsets.get(queue, -1):
            self._offsets[queue] = offset
            self._is_kept = False

    def move(self, queue: MessageQueue, offset: int) -> None:
        self._offsets[queue] = offset
        self._is_kept = False

    def forget(self, queue: MessageQueue) -> None:
        """Keep the offset: a queue that is acquired again continues there."""

    async def flush(self, _queues: Iterable[MessageQueue] | None = None, /) -> bool:
        if self._is_kept:
            return True
        rows = [[*queue, offset] for queue, offset in sorted(self._offsets.items())]
        try:
            await asyncio.to_thread(_replace, self._path, json.dumps({"offsets": rows}, indent=1).encode())
        except OSError as error:
            _log.warning("offsets_write_failed", path=str(self._path), error=str(error))
            return False
        self._is_kept = rows == [[*queue, offset] for queue, offset in sorted(self._offsets.items())]
        return True


def _read(path: Path) -> dict[MessageQueue, int]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        rows = json.loads(content)["offsets"]
        return {MessageQueue(str(topic), str(broker), int(number)): int(at) for topic, broker, number, at in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a file of offsets ({error}): restore it, or remove it to start like a new client"
        ) from None


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
