"""The embedded broker on a whole cell, a store with something of every kind in it, and what lies in a store."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from support.clients.embedded.failing import change
from support.forges.messages.half import a_half, prepare
from support.forges.messages.letters import a_message
from support.forges.store.spool_damage import flip
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, ack, receive
from support.rigs.store.rows import copy_at_rest

from broker_adapter.contracts.message import unpack_id
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.broker import EmbeddedBroker
from dmq.recovery import check_store
from dmq.recovery.reading.findings import CheckReport
from dmq.recovery.reading.loss_report import LOST_FILE
from dmq.recovery.reading.rows import read_waiting
from dmq.scheduler.scheduler import Scheduler
from dmq.store.schema.keys import TIMELINE_END, Family, queue_offset_of
from dmq.store.schema.messages.record import decode_queued
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event
from dmq.trail.ledger import LEDGER_KINDS
from dmq.trail.snapshots.layout import open_quiet

HOUR_MS = 3_600_000
READY, DELAYED = 240, 120
PULLERS, COMMITTED = "pullers", 50  # a group that pulls, and where it is in the first queue
_T = TypeVar("_T")
PAYLOAD_BYTES = 600  # so that a family has several blocks


class CellRig(EmbeddedRig):
    """As ``EmbeddedRig``, on a directory as a daemon has it."""

    def __init__(self, path: Path, clock: ManualClock | None = None) -> None:
        super().__init__(path, on_disk=True, queues=2, clock=clock)
        self.path = path

    async def open(self) -> None:
        options = StoreOptions(ballast_bytes=0, gap_event=gap_event, ledger_kinds=LEDGER_KINDS)
        self.store = Store.open(self.path, self.clock, options)
        self.broker = EmbeddedBroker(self.store, queues_per_topic=2)
        self.broker.leases._task.cancel()
        self.scheduler = Scheduler(
            self.store, self.broker.placement, self.broker.checks, on_failure=self.failures.append
        )

    def to_tables(self) -> None:
        """Bring everything from the log into tables."""
        shutil.rmtree(self._at_rest(), ignore_errors=True)
        self.store.checkpoint(self._at_rest())
        shutil.rmtree(self._at_rest())

    def _at_rest(self) -> Path:
        return self.path.with_name(f"{self.path.name}-at-rest")

    def image(self, target: Path) -> Path:
        """The directory as a SIGKILL would leave it now."""
        target.mkdir()
        shutil.copyfile(self.path / "CELL", target / "CELL")
        copy_at_rest(self.path / "rocksdb", target / "rocksdb")
        return target


def run_cell(path: Path, scenario: Callable[[CellRig], Awaitable[_T]], clock: ManualClock | None = None) -> _T:
    """Run a scenario on the broker of a cell, close the broker, and return the scenario's result."""

    async def run() -> _T:
        rig = CellRig(path, clock)
        await rig.open()
        try:
            return await scenario(rig)
        finally:
            await rig.close()

    return asyncio.run(run())


def killed_cell(
    folder: Path, scenario: Callable[[CellRig], Awaitable[object]], clock: ManualClock | None = None
) -> Path:
    """Run a scenario on a new cell in ``folder``; return the directory as a SIGKILL after it leaves it."""

    async def run(rig: CellRig) -> Path:
        await scenario(rig)
        return rig.image(folder / "whole")

    return run_cell(folder / "cell", run, clock)


def payload_of(message_id: str) -> bytes:
    """The random payload of a message, which no compression makes smaller."""
    return random.Random(message_id).randbytes(PAYLOAD_BYTES)


async def fill(rig: CellRig) -> dict[str, bytes]:
    """Bring something of every kind into a store; return the payloads of what is not finished, by message id.

    In two queues ``READY`` messages, of which the first 32 are finished and some failed; ``DELAYED`` that wait for an
    hour and more; a message group, half messages, dead letters.
    """
    now_ms = rig.clock.now_ms()
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(HOUR_MS,))
    ready = [a_message(f"r-{number}", body=payload_of(f"r-{number}")) for number in range(READY)]
    for start in range(0, READY, 20):  # so many batches
        await rig.broker.send(ready[start : start + 20])
    for number in range(DELAYED):
        late = a_message(f"d-{number}", body=payload_of(f"d-{number}"), deliver_at_ms=now_ms + (number + 1) * HOUR_MS)
        await rig.broker.send([late])
    await rig.broker.send([a_message(f"g-{number}", topic="fifo", message_group="g") for number in range(3)])
    await prepare(rig, *(a_half(f"h-{number}", a_message(f"h-{number}").payload) for number in range(3)))
    finished = [each for queue_id in (0, 1) for each in await receive(rig, queue_id=queue_id, batch_max=16)]
    await ack(rig, *finished)
    for each in await receive(rig, batch_max=4, renew_for="client-1"):
        await change(rig, each)  # a failure: it waits as a retry
    for each in await receive(rig, batch_max=2):
        await rig.broker.dead_letter(GROUP, TOPIC, each.receipt_handle, attempts=1)
    await rig.broker.pulls.commit_offset(PULLERS, TOPIC, 0, COMMITTED)
    done = {each.message_id for each in finished}
    return {
        name: payload_of(name)
        for name in (*(f"r-{at}" for at in range(READY)), *(f"d-{at}" for at in range(DELAYED)))
        if name not in done
    }


class Held(NamedTuple):
    """What a store holds."""

    waiting: dict[str, bytes]  # timeline values, by message id
    queued: dict[tuple[int, str], bytes]  # queue values, by topic id and message id
    ends: dict[tuple[int, int], tuple[int, int]]  # begin and end by topic id and queue id

    @property
    def ready(self) -> set[str]:
        """The ids of what is in queues."""
        return {name for _, name in self.queued}


def held(path: Path) -> Held:
    """Read a whole store."""
    engine = open_quiet(path / "rocksdb")
    found = Held({}, {}, {})
    try:
        for key, value in engine.scan(Family.TIMELINE, b"", TIMELINE_END, limit=10**6).rows:
            found.waiting[unpack_id(read_waiting(key, value).message_id)] = value
        for key, value in engine.scan(Family.QUEUE, b"", b"\xff" * 40, limit=10**6).rows:
            place, offset = (int.from_bytes(key[:4], "big"), int.from_bytes(key[4:6], "big")), queue_offset_of(key)
            found.queued[place[0], unpack_id(decode_queued(value).message_id)] = value
            found.ends[place] = (found.ends.get(place, (offset, 0))[0], offset + 1)
    finally:
        engine.close()
    return found


def flip_in(path: Path, at: float) -> None:
    """Turn a bit of a file, so far into it."""
    flip(path, int(path.stat().st_size * at))


def checked(path: Path) -> CheckReport:
    """Look through a store."""
    return check_store(path, lambda _: None)


def lost_lines(path: Path) -> list[dict[str, object]]:
    """What a salvage told to be lost."""
    return [json.loads(line) for line in (path / LOST_FILE).read_text(encoding="utf-8").splitlines()]


def files_of(path: Path) -> dict[str, bytes]:
    """Every file of a store but those that say who looked at it last."""
    found = {}
    for each in sorted(path.rglob("*")):
        with suppress(OSError):
            if each.is_file() and each.name != "LOCK" and not each.name.startswith("LOG"):
                found[str(each.relative_to(path))] = each.read_bytes()
    return found
