"""A process with a spool of its own, for tests that kill it, fork it, or take its disk away.

    python spool_driver.py <what> <root> [argument]

Started as a file. Each function below is a ``what``; it writes to standard output with one ``write`` per line, so that
a line is there whole or not at all, whenever the process is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import structlog

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.directories import adopt
from dmq.producer_store.entries.entries import Entries
from dmq.producer_store.spool import Spool, SpoolOptions
from dmq.store.engines.rocks import RocksEngine
from retry.sink import Death, Entry, Held, SinkError, SinkFull, SinkUnavailable

PATIENCE_S = 20.0
_BACKGROUND = ("num-running-flushes", "mem-table-flush-pending", "num-running-compactions", "compaction-pending")
_MIB = 1024 * 1024
CLOCK = SystemClock()


def say(*what: object) -> None:
    """Write a line at once, in one call."""
    os.write(1, json.dumps(what).encode() + b"\n")


def die() -> NoReturn:
    """End as SIGKILL ends a process: nothing is closed, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def entry(number: int, *, key: str = "", payload: bytes = b"payload", due_in_ms: int = 0) -> Entry:
    """Entry ``number``, due now; the higher its number, the younger its uid."""
    now_ms = CLOCK.now_ms()
    uid = number.to_bytes(16, "big")
    return Entry(
        type_name="orders", uid=uid, payload=payload, key=key, created_at_ms=now_ms, due_at_ms=now_ms + due_in_ms
    )


def numbers(taken: Sequence[Held]) -> list[int]:
    """The numbers of what was taken."""
    return [int.from_bytes(held.entry.uid, "big") for held in taken]


def take_all(spool: Spool, *, idle_s: float = 1.0, is_finished: bool = True) -> list[int]:
    """Take, and finish, until nothing more comes."""
    found: list[int] = []
    while taken := spool.take("orders", 100, idle_s):
        found += numbers(taken)
        if is_finished:
            for each in [spool.finish(held) for held in taken]:
                each.result(PATIENCE_S)
    return found


def share(root: Path, argument: str) -> None:
    """Put and take under a shared root until killed, or until standard input ends; tell of each put that was answered.

    A line ``["put", number]`` follows the answer, ``["took", number, key, when]`` goes before the finish: an entry that
    was told of as taken may come again, one that was told of as put must come.
    """
    first, keys = map(int, argument.split(","))
    options = SpoolOptions(adopt_every_s=0.2, durability="process")
    with Spool(root, options=options) as spool:
        say("open", spool.path.name)
        ends = threading.Event()
        threading.Thread(target=_end_with_input, args=(ends,), daemon=True).start()
        taker = threading.Thread(target=_take, args=(spool, ends))
        taker.start()
        number = first
        while not ends.is_set():
            batch = [
                (each, spool.put(entry(each, key=f"{first}-{each % keys}" if each % 2 else "")))
                for each in range(number, number + 8)
            ]
            for each, answer in batch:
                answer.result(PATIENCE_S)
                say("put", each)
            number += 8
            ends.wait(0.01)
        taker.join()
    say("closed")


def _end_with_input(ends: threading.Event) -> None:
    sys.stdin.read()
    ends.set()


def _take(spool: Spool, ends: threading.Event) -> None:
    while not ends.is_set():
        for held in spool.take("orders", 10, 0.05):
            number = int.from_bytes(held.entry.uid, "big")
            if number % 3 == 0 and held.entry.attempts == 0:
                spool.again(held, CLOCK.now_ms() + 50, is_counted=True)
                continue
            say("took", number, held.entry.key, CLOCK.monotonic_s())
            spool.finish(held)


def fill(root: Path, argument: str) -> None:
    """Put entries of three keys, and of none, bury some, and die."""
    spool = Spool(root, options=SpoolOptions(adopt_every_s=0))
    answers = [spool.put(entry(number, key=("", "a", "b", "c")[number % 4])) for number in range(int(argument))]
    for each in answers:
        each.result(PATIENCE_S)
    for number in range(10**6, 10**6 + 5):
        held = spool.put(entry(number), is_held=True).result(PATIENCE_S)
        assert held is not None
        spool.bury(held, Death.PERMANENT, "never").result(PATIENCE_S)
    say(spool.path.name)
    die()


def adopt_and_die(root: Path, argument: str) -> None:
    """Take over what is there, in small units, and die at a step: a commit here or there, or the removal."""
    steps = int(argument)
    spool = Spool(root, options=SpoolOptions(adopt_every_s=0))
    step = 0

    def die_in_time() -> None:
        nonlocal step
        step += 1
        if step == steps:
            die()

    say("adopted", adopt_in_steps(spool, die_in_time), step)
    spool.close()


def adopt_in_steps(spool: Spool, at_step: Callable[[], None]) -> int:
    """Take over what is there, in small units; tell of each step between which a kill makes a difference."""
    settle, per_unit, remove = adopt._Move._settle, adopt._PER_UNIT, spool._root.remove

    def settle_in_parts(move: adopt._Move) -> None:
        at_step()  # nothing of it is known to be durable
        for each in move._waiting:
            each.result(PATIENCE_S)
        at_step()  # it is here, and still there
        settle(move)
        at_step()  # it is gone there

    def remove_in_parts(path: Path, orphan: Entries, own: Path) -> None:
        at_step()
        remove(path, orphan, own)
        at_step()

    adopt._PER_UNIT = 4
    setattr(adopt._Move, "_settle", settle_in_parts)  # noqa: B010 - for mypy, which thinks it bound
    setattr(spool._root, "remove", remove_in_parts)  # noqa: B010
    try:
        return spool._adopter.adopt()
    finally:
        adopt._PER_UNIT = per_unit
        setattr(adopt._Move, "_settle", settle)  # noqa: B010


def fork(root: Path, argument: str) -> None:
    """Fork a process with an open spool; the child tries everything, the parent goes on."""
    spool = Spool(root, options=SpoolOptions(adopt_every_s=0.05))
    spool.put(entry(1)).result(PATIENCE_S)
    (held,) = spool.take("orders", 1, PATIENCE_S)
    lock = spool.entries.lock
    if argument == "locked":
        lock.acquire()  # as another thread may hold it at that very moment
    let_go, lets_go = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        calls = {
            "put": lambda: spool.put(entry(2)),
            "put held": lambda: spool.put(entry(2), is_held=True),
            "has_waiting": lambda: spool.has_waiting("orders", "a"),
            "take": lambda: spool.take("orders", 1, 5.0),
            "finish": lambda: spool.finish(held),
            "again": lambda: spool.again(held, 0, is_counted=True),
            "bury": lambda: spool.bury(held, Death.PERMANENT, "no"),
            "dead": lambda: spool.dead("orders"),
            "requeue": lambda: spool.requeue("orders", [b"?" * 16]),
            "stats": spool.stats,
            "types": lambda: spool.types,
        }
        started_s = CLOCK.monotonic_s()
        said = {name: _raised_by(call) for name, call in calls.items()}
        spool.close()
        os.write(lets_go, b"!")
        say("child", said, CLOCK.monotonic_s() - started_s < 2)
        sys.stdout.flush()
        if argument == "outlives":
            signal.alarm(60)
            signal.pause()
        os._exit(7)
    if argument == "locked":
        lock.release()
    if argument == "outlives":
        os.read(let_go, 1)  # the child has used the spool, and closed it
        spool.close()
        again = Spool(root, options=SpoolOptions(adopt_every_s=0))
        say("parent", again.path == spool.path, numbers(again.take("orders", 9, PATIENCE_S)))
        again.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return
    _, status = os.waitpid(child, 0)
    spool.finish(held).result(PATIENCE_S)
    spool.put(entry(3)).result(PATIENCE_S)
    say("parent", os.waitstatus_to_exitcode(status), numbers(spool.take("orders", 9, PATIENCE_S)))
    spool.close()


def _raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test says which
        return type(error).__name__
    return "nothing"


def disk_full(root: Path, argument: str) -> None:
    """Fill a small disk with entries until they are refused; then make room, twice."""
    del argument
    options = SpoolOptions(adopt_every_s=0, free_bytes_min=24 * _MIB)
    with Spool(root, options=options) as spool:
        put: list[int] = []
        refused = ""
        while not refused:
            number = len(put) + 1
            try:
                spool.put(entry(number, payload=os.urandom(64 * 1024))).result(PATIENCE_S)
                put.append(number)
            except SinkFull as error:
                refused = error.limit
        say("refused", refused, spool.refused_total, len(put) > 10)
        _wait_for(lambda: is_quiet(spool))  # a table that is being written takes room after it was measured
        ballast = root / "somebody else's"
        with ballast.open("wb") as file:  # not ours: it takes nearly all that is left
            free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
            os.posix_fallocate(file.fileno(), 0, max(1, free - _MIB))
        taken = spool.take("orders", 5, PATIENCE_S)
        for held in taken:
            spool.finish(held).result(PATIENCE_S)
        say("finished", numbers(taken) == put[:5])
        ballast.unlink()
        found = [*numbers(taken), *take_all(spool)]
        say("taken", found == put, spool.stats().waiting, spool.reopened_total)


def is_quiet(spool: Spool) -> bool:
    """Whether RocksDB neither writes a table nor is about to."""
    engine = spool.entries.store._engine
    assert isinstance(engine, RocksEngine)
    return not any(each.property_int_value(f"rocksdb.{work}") for each in engine._dicts for work in _BACKGROUND)


def disk_runs_out(root: Path, argument: str) -> None:
    """Let the disk run out under the spool, then give room back: it goes on by itself, with all it acknowledged."""
    del argument
    options = SpoolOptions(adopt_every_s=0, free_bytes_min=0)
    with (root / "room").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 28 * _MIB)  # more than its log, which it may write again as tables
    with Spool(root, options=options) as spool:
        acknowledged: list[int] = []
        in_doubt = 0
        while not in_doubt:
            number = len(acknowledged) + 1
            try:
                spool.put(entry(number, payload=os.urandom(64 * 1024))).result(PATIENCE_S)
                acknowledged.append(number)
            except SinkUnavailable:
                in_doubt = number
                (root / "room").unlink()
        _wait_for(lambda: spool.reopened_total > 0)
        found = take_all(spool)
        missing = set(acknowledged) - set(found)
        say("mended", len(missing), len(found) - len(set(found)), set(found) - set(acknowledged) <= {in_doubt})
        spool.put(entry(in_doubt + 1)).result(PATIENCE_S)
        say("goes on", take_all(spool) == [in_doubt + 1])


def sync_fails(root: Path, argument: str) -> None:
    """One sync fails, in the middle of sixteen threads' puts; ``argument`` is the file that makes it fail."""
    fails = Path(argument)
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        held = spool.put(entry(1), is_held=True).result(PATIENCE_S)
        assert held is not None
        acknowledged: list[int] = []
        doubtful: list[int] = []
        threads = [threading.Thread(target=_put_until, args=(spool, n, acknowledged, doubtful)) for n in range(16)]
        for each in threads:
            each.start()
        _wait_for(lambda: len(acknowledged) > 200)
        fails.touch()
        _wait_for(lambda: bool(doubtful))
        fails.unlink()
        for each in threads:
            each.join()
        _wait_for(lambda: spool.reopened_total > 0)
        spool.finish(held).result(PATIENCE_S)
        found = take_all(spool)
        say(
            "mended",
            spool.reopened_total,
            len(set(acknowledged) - set(found)),
            len(found) - len(set(found)),
            set(found) <= {*acknowledged, *doubtful},
            1 in found,
        )


def put_until_killed(root: Path, _: str) -> None:
    """Put, one entry after the other; tell of each put that was answered."""
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as spool:
        for number in itertools.count(1):
            spool.put(entry(number)).result()
            say("put", number)


def _put_until(spool: Spool, thread: int, acknowledged: list[int], doubtful: list[int]) -> None:
    number = 100 + thread
    while True:
        answer: Future[Held | None]
        try:
            answer = spool.put(entry(number))
            answer.result(PATIENCE_S)
        except SinkError:
            doubtful.append(number)
            return
        acknowledged.append(number)
        number += 16


def _wait_for(holds: Callable[[], bool]) -> None:
    until_s = CLOCK.monotonic_s() + PATIENCE_S
    while not holds():
        assert CLOCK.monotonic_s() < until_s
        threading.Event().wait(0.005)


def command(what: str, root: Path, argument: str = "", *, before: Sequence[str] = ()) -> list[str]:
    """Return the command line of a driver."""
    return [*before, sys.executable, __file__, what, str(root), argument]


def run(
    what: str,
    root: Path,
    argument: str = "",
    *,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run a driver to its end."""
    return subprocess.run(
        command(what, root, argument, before=before),
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )


def lines(output: str) -> list[list[Any]]:
    """What a driver said; the last line of one that was killed may be cut."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("[") and line.endswith("]")]


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is said is not to be cut up
    globals()[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
