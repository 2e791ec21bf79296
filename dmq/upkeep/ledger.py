"""Comparing the ledger of a running store with its rows: from a checkpoint, in a process of its own.

    python -m dmq.upkeep.ledger CHECKPOINT

counts with a low priority and a pause behind each slice of rows. It answers with lines of JSON: ``{"looked": rows}``
now and then, at the end ``{"looked": rows, "differences": [...]}``; or with one line on stderr and 1. It ends when its
stdin does: then whoever asked for it is dead. What a killed daemon leaves, a checkpoint, the next one removes.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from dmq.audit.ledger import Difference, Ledger
from dmq.audit.snapshot_layout import open_quiet
from dmq.embedded.commits import look_at
from dmq.errors import StoreError
from dmq.store.engine import Engine, queue_end
from dmq.store.recount import KnownIds, Recount, read_ledger, recount_queues, recount_timeline
from dmq.store.store import Store

log = structlog.get_logger("dmq.daemon")

SHOWN_MAX = 1_000  # differences that are told one by one
_CHECKPOINT = ".ledger-"
_NICE = 10
_PAUSE_S = 0.001  # behind each slice
_ROWS_PER_PAUSE = 4_096
_TOLD_EVERY = 65_536  # rows
_IS_OVER = 3  # exit code of a process whose parent is dead


def compare(engine: Engine, breathe: Callable[[int], None] = lambda _: None) -> list[Difference]:
    """Return what the ledger of a store that nobody changes says otherwise than its rows; empty: it balances.

    ``breathe`` is called now and then with how many rows were looked at since. ``StoreCorrupt`` for what cannot be
    read.
    """
    known = KnownIds.of(engine)
    found: Recount = recount_queues(engine, known, partial(queue_end, engine), breathe=breathe)
    recount_timeline(engine, known, found, breathe)
    return Ledger(*read_ledger(engine), known).against_rows(found)


@dataclass(slots=True, kw_only=True)
class Verification:
    """One comparison. It runs while ``ended_at_ms`` is 0; an ``error`` says why nothing is known."""

    number: int  # in this run of the daemon
    started_at_ms: int
    expected: int  # rows, about
    looked: int = 0
    ended_at_ms: int = 0
    differences: int = 0
    first: tuple[Difference, ...] = ()  # at most ``SHOWN_MAX``
    error: str = ""


class LedgerVerifier:
    """One verification at a time. Use it as a context; belongs to the event loop, another thread waits."""

    def __init__(self, store: Store, data: Path) -> None:
        """``data`` is the directory of the cell. Removes what a killed run left there."""
        self._store = store
        self._data = data.absolute()
        self._last: Verification | None = None
        self._task: asyncio.Task[None] | None = None
        self._child: subprocess.Popen[str] | None = None
        self._is_closing = False
        for path in self._data.glob(f"{_CHECKPOINT}*"):
            shutil.rmtree(path, ignore_errors=True)

    async def verify(self) -> Verification:
        """Begin one, unless one is under way, and return it; ask how it goes with ``state``.

        ``BrokerUnavailable`` while the disk is almost full, ``Refused`` if the store keeps no ledger.
        """
        last = self._last
        if last is not None and not last.ended_at_ms:
            return last
        if self._store.ledger_head is None:
            raise no_ledger()
        if self._store.is_disk_low():
            raise BrokerUnavailable("nothing is verified while the disk is almost full")
        loop = asyncio.get_running_loop()
        expected = sum((await loop.run_in_executor(None, self._store.pending)).values())
        if self._last is not last:  # somebody else began one meanwhile
            return await self.verify()
        now_ms, number = self._store.clock.now_ms(), last.number + 1 if last is not None else 1
        made = self._last = Verification(number=number, started_at_ms=now_ms, expected=expected)
        self._task = loop.create_task(self._run(made), name="dmq-verify-ledger")
        self._task.add_done_callback(look_at)
        return made

    def state(self, number: int) -> Verification:
        """Return the one with a number; ``Refused(NOT_FOUND)`` if it is not the last one of this run."""
        if self._last is None or self._last.number != number:
            why = "no such verification, or another one came after it, or the daemon was started anew"
            raise Refused(Rule.NOT_FOUND, why, value=number)
        return self._last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is under way."""
        self._is_closing = True
        if self._child is not None:
            self._child.kill()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, made: Verification) -> None:
        clock = self._store.clock
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._compare, made)
        except (StoreError, OSError, ValueError) as error:
            made.error = " ".join(str(error).split())
        made.ended_at_ms = max(1, clock.now_ms())
        if made.error:
            log.error("ledger_not_verified", error=made.error)
        elif made.differences:
            log.error("ledger_does_not_balance", differences=made.differences, first=str(made.first[0]))
        else:
            log.info("ledger_verified", rows=made.looked, took_ms=made.ended_at_ms - made.started_at_ms)

    def _compare(self, made: Verification) -> None:
        path = self._data / f"{_CHECKPOINT}{secrets.token_hex(6)}"
        try:
            self._store.checkpoint(path)
            with (
                tempfile.TemporaryFile("w+", encoding="utf-8") as said,
                subprocess.Popen(
                    [sys.executable, "-m", "dmq.upkeep.ledger", str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    encoding="utf-8",
                ) as child,
            ):
                self._child = child
                if self._is_closing:
                    child.kill()
                try:
                    self._listen(child, made)
                finally:
                    child.kill()
                    child.wait()
                    self._child = None
                if not made.error and child.returncode and not made.ended_at_ms:
                    said.seek(0)
                    made.error = said.read(1_000).strip() or f"the process that counts ended with {child.returncode}"
        finally:
            for each in (path, path.with_name(f"{path.name}.tmp")):  # RocksDB's name while it makes one
                shutil.rmtree(each, ignore_errors=True)

    def _listen(self, child: subprocess.Popen[str], made: Verification) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            told = json.loads(line)
            made.looked = int(told["looked"])
            if "differences" in told:
                made.differences = int(told["count"])
                made.first = tuple(Difference(*each) for each in told["differences"])
                child.wait()
                return
        child.wait()
        if not child.returncode:
            made.error = "the process that counts ended without an answer"


def no_ledger() -> Refused:
    """Return the refusal where the store keeps no ledger."""
    why = "this store keeps no ledger: what it would begin with is damaged; see 'dmq store check'"
    return Refused(Rule.REQUEST, why)


# -- the other process -------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Compare the checkpoint that is named; return the exit code."""
    os.nice(_NICE)
    threading.Thread(target=_end_with_parent, name="dmq-parent", daemon=True).start()
    looked = since_pause = told = 0

    def breathe(rows: int) -> None:
        nonlocal looked, since_pause, told
        looked += rows
        since_pause += rows
        if since_pause >= _ROWS_PER_PAUSE:
            since_pause = 0
            threading.Event().wait(_PAUSE_S)
        if looked - told >= _TOLD_EVERY:
            told = looked
            _tell({"looked": looked})

    try:
        engine = open_quiet(Path(arguments[0]))
        try:
            found = compare(engine, breathe)
        finally:
            engine.close()
    except (StoreError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    _tell({"looked": looked, "count": len(found), "differences": found[:SHOWN_MAX]})
    return 0


def _tell(answer: dict[str, object]) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not through a buffer: its lock would be held when the process ends
        pass
    os._exit(_IS_OVER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
