"""Comparison of the ledger of a running store with its rows, in a separate process to disturb the daemon least.

    python -m dmq.runtime.background dmq.recovery.check.ledger DATABASE DIRECTORY

The process opens the database as its secondary and writes ``{"looked": 0}``. The daemon answers with a line on stdin if
the opened state is complete. The process then counts at the lowest priority, with a pause after each slice of rows. It
writes lines of JSON: ``{"looked": rows}`` periodically, and ``{"looked": rows, "count": number, "differences": [...]}``
at the end. On an error it writes one line to stderr and exits with 1. It ends when its stdin is closed, because the
daemon is then dead. The next daemon removes the directory of RocksDB's log that a killed daemon leaves.

A checkpoint would be the simpler snapshot. Making one takes RocksDB 40 to 75 ms on a small machine, mostly for syncs,
and rocksdict holds Python's lock for that time. All messages that become due in the meantime would be late.
"""

from __future__ import annotations

import asyncio
import json
import os
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

from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.io import look_at
from dmq.errors import StoreError
from dmq.runtime.background import background, die_with_parent, end_with_stdin
from dmq.store import Store
from dmq.store.engines.engine import Engine, queue_end
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.writer.recount import KnownIds, Recount, read_ledger, recount_queues, recount_timeline
from dmq.trail.ledger import Difference, Ledger

log = structlog.get_logger("dmq.daemon")

SHOWN_MAX = 1_000  # differences listed one by one
_DIRECTORY = ".ledger-"
_TRIES = 20  # to open the database while no log is removed; at 25,000 messages/s one is removed per second
_PAUSE_S = 0.005  # after each slice, which takes about as long
_ROWS_PER_PAUSE = 2_048
_TOLD_EVERY = 65_536  # rows
_IS_OVER = 3  # exit code after the death of the parent


def compare(engine: Engine, breathe: Callable[[int], None] = lambda _: None) -> list[Difference]:
    """Return the differences between the ledger and the rows of a store that does not change; empty: it balances.

    ``breathe`` is called periodically with the number of rows read since its last call. Raise ``StoreCorrupt`` for
    unreadable rows.
    """
    known = KnownIds.of(engine)
    found: Recount = recount_queues(engine, known, partial(queue_end, engine), breathe=breathe)
    recount_timeline(engine, known, found, breathe)
    return Ledger(*read_ledger(engine), known).against_rows(found)


@dataclass(slots=True, kw_only=True)
class Verification:
    """One comparison. It runs while ``ended_at_ms`` is 0; a non-empty ``error`` explains why there is no result."""

    number: int  # counted from 1 in each run of the daemon
    started_at_ms: int
    expected: int  # approximate number of rows
    looked: int = 0
    ended_at_ms: int = 0
    differences: int = 0
    first: tuple[Difference, ...] = ()  # at most ``SHOWN_MAX``
    error: str = ""


class LedgerVerifier:
    """Runs one verification at a time. A context manager; it belongs to the event loop, another thread waits."""

    def __init__(self, store: Store, data: Path) -> None:
        """Remove the files of a killed run; ``data`` is the directory of the cell."""
        self._store = store
        self._data = data.absolute()
        self._last: Verification | None = None
        self._task: asyncio.Task[None] | None = None
        self._child: subprocess.Popen[str] | None = None
        self._is_closing = False
        for path in self._data.glob(f"{_DIRECTORY}*"):
            shutil.rmtree(path, ignore_errors=True)

    async def verify(self) -> Verification:
        """Start a verification unless one is running, and return it; query its progress with ``state``.

        Raise ``Refused`` if the store keeps no ledger.
        """
        last = self._last
        if last is not None and not last.ended_at_ms:
            return last
        if self._store.ledger_head is None:
            raise no_ledger()
        loop = asyncio.get_running_loop()
        expected = sum((await loop.run_in_executor(None, self._store.pending)).values())
        if self._last is not last:  # another caller started one in the meantime
            return await self.verify()
        now_ms, number = self._store.clock.now_ms(), last.number + 1 if last is not None else 1
        made = self._last = Verification(number=number, started_at_ms=now_ms, expected=expected)
        self._task = loop.create_task(self._run(made), name="dmq-verify-ledger")
        self._task.add_done_callback(look_at)
        return made

    def state(self, number: int) -> Verification:
        """Return the verification with a number; raise ``Refused(NOT_FOUND)`` if it is not the last one of this run."""
        if self._last is None or self._last.number != number:
            why = "unknown verification: replaced by a later one, or the daemon was restarted"
            raise Refused(Rule.NOT_FOUND, why, value=number)
        return self._last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the running verification."""
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
        if self._is_closing and not made.differences:
            made.error = "the daemon stopped meanwhile"
            log.info("ledger_not_verified", error=made.error)
        elif made.error:
            log.error("ledger_not_verified", error=made.error)
        elif made.differences:
            log.error("ledger_unbalanced", differences=made.differences, first=str(made.first[0]))
        else:
            log.info("ledger_verified", rows=made.looked, took_ms=made.ended_at_ms - made.started_at_ms)

    def _compare(self, made: Verification) -> None:
        with tempfile.TemporaryDirectory(prefix=_DIRECTORY, dir=self._data, ignore_cleanup_errors=True) as directory:
            for _ in range(_TRIES):
                if self._is_closing or self._is_told(made, Path(directory)):
                    return
        made.error = made.error or f"the store changes too fast: its log went on at each of {_TRIES} tries; try again"

    def _is_told(self, made: Verification, directory: Path) -> bool:
        """Run a counting process; return False if the files that it opened were about to be removed."""
        database, oldest_log = self._store.read_beside()
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as said,
            subprocess.Popen(
                background("dmq.recovery.check.ledger", database, directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                encoding="utf-8",
            ) as child,
        ):
            self._child = child
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                is_open = not self._is_closing and bool(child.stdout.readline())
                is_whole = is_open and self._store.read_beside()[1] == oldest_log
                if is_whole:
                    made.error = ""
                    child.stdin.write("\n")
                    child.stdin.flush()
                    self._listen(child, made)
                if self._is_closing:
                    return True
                if (not is_open or is_whole) and child.wait() and not made.error:
                    said.seek(0)
                    made.error = said.read(1_000).strip() or f"the process that counts ended with {child.returncode}"
            finally:
                child.kill()
                child.wait()
                self._child = None
        return is_whole

    def _listen(self, child: subprocess.Popen[str], made: Verification) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            told = json.loads(line)
            made.looked = int(told["looked"])
            if "differences" in told:
                made.differences = int(told["count"])
                made.first = tuple(Difference(*each) for each in told["differences"])
                return
        if not child.wait():
            made.error = "the process that counts ended without an answer"


def no_ledger() -> Refused:
    """Return the refusal for a store without a ledger."""
    why = "this store keeps no ledger: the rows for its start are damaged; see 'dmq store check'"
    return Refused(Rule.REQUEST, why)


# -- the other process -------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Compare the database in ``arguments``; return the exit code."""
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
        database, directory = map(Path, arguments)
        engine = RocksEngine(database, RocksOptions(secondary=directory, open_files_max=-1))
        try:
            _tell({"looked": 0})
            if os.read(sys.stdin.fileno(), 1) != b"\n":
                return _IS_OVER
            end_with_stdin()
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


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
