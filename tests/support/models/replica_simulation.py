"""Simulation of primaries and standbys on one object store, under a seeded scheduler.

The replication log, the lease, the roles and the standbys are those of the product, with their threads. The object
store, the clocks and the directories are simulated. Requests and answers are delayed, reordered, lost and refused; a
request may arrive after its sender gave up. Hosts crash between any two steps, stop and continue, end in order, and
lose their directories. Disks stall. Operators promote a standby of a live primary. The clocks of the hosts are hours
apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, cast
from unittest.mock import patch
from uuid import UUID

from support.models import simulated_threads
from support.models.simulated_threads import Process, Scheduler, Task, current_task, request, wait_ms

from dmq.errors import DmqError, ReplicaFenced
from dmq.replication import following as following_module
from dmq.replication import lease as lease_module
from dmq.replication import log as log_module
from dmq.replication import role as role_module
from dmq.replication.lease import Lease, LeaseRecord
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import ReplicaUnavailable
from dmq.replication.role import Primacy, release_lease
from dmq.replication.segment import decode_segment, segment_name
from dmq.replication.standby import DirectoryState, Standby
from dmq.store.engines.engine import Batch
from dmq.store.schema.identity import Identity
from dmq.store.schema.keys import META_POSITION, Family
from dmq.store.schema.position import Position, decode_position
from dmq.store.writer.batch_log import LogMoved, LogStart

TERM_MS = 1_000
_TIMEOUT_MS = 300
_LATE_MS_MAX = 3_000
_TRAVEL_MS_MAX = 30
_STALLS = 0.005  # of the writes
_STORE = 7
_ROW = b"row"
_REFUSED = object()


@dataclass(frozen=True, slots=True)
class Bugs:
    """Faults that the checks must find."""

    has_no_fence: bool = False  # a segment replaces another one
    log: type[ReplicationLog] = ReplicationLog
    lease: type[Lease] = Lease
    has_two_holders: bool = False  # not a fault of its own: two processes may hold the lease


@dataclass(slots=True)
class Answered:
    """Batch that was answered OK: when it was appended, and when it was answered."""

    batch: bytes
    begun_ms: int
    answered_ms: int


@dataclass
class Directory:
    """Directory of a host, with its engine: a crash keeps some of the batches that are not synced."""

    batches: list[tuple[bytes, bytes]] = field(default_factory=list)  # content, position
    synced: int = 0
    is_original: bool = False
    is_copy: bool = False
    holders: list[str] = field(default_factory=list)

    @property
    def database(self) -> Directory:
        """The directory has nothing else."""
        return self

    def add_holder(self, holder: str) -> list[str]:
        """Record the holder of a process, and return those of the earlier ones."""
        *earlier, _ = self.holders = [*self.holders, holder]
        return earlier

    def write(self, batch: Batch) -> None:
        content, position = (
            next((v for _, key, v in batch.puts if key == each), b"") for each in (_ROW, META_POSITION)
        )
        self.batches.append((content, position))

    def sync(self) -> None:
        self.synced = len(self.batches)

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        assert (family, keys) == (Family.META, [META_POSITION])
        return [self.batches[-1][1] if self.batches else None]

    def close(self) -> None:
        """Keep the lock: each host has one process at a time."""

    def crash(self, rng: random.Random) -> None:
        """Lose some of the batches that are not synced."""
        del self.batches[rng.randint(self.synced, len(self.batches)) :]
        self.sync()

    def position(self) -> Position | None:
        """Return the position row."""
        (row,) = self.get_many(Family.META, [META_POSITION])
        return decode_position(row) if row is not None else None

    def contents(self) -> list[bytes]:
        """Return the batches of the writers."""
        return [content for content, _ in self.batches if content]


class FollowingDirectory(Standby):
    """Standby on a simulated directory."""

    def _open(self) -> None:
        directory = cast("Directory", self._cell)
        directory.is_original = False
        self._engine = cast("Any", directory)
        self._position = directory.position() or Position(_STORE, 0, 0, 0, bytes(16))

    def promote(self, is_held: Callable[[], bool] = lambda: True) -> None:
        """Apply the rest of the log; the clocks of the simulated hosts may be apart."""
        self.catch_up(is_last=True)
        if not is_held():
            raise ReplicaFenced("the lease ended")
        cast("Directory", self._cell).is_original = True
        self.close()

    def _set_aside(self, moved: Exception) -> None:
        raise AssertionError(f"a synchronous directory is not a prefix of the log: {moved}")


def _read_directory(directory: Directory) -> DirectoryState | None:
    position = directory.position()
    if position is None:
        return None
    return DirectoryState(Identity(_STORE, b""), directory.is_original, position.epoch, position)


class SimulatedObjects:
    """``ObjectStore`` of one process."""

    url = "simulation://objects"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def create(self, name: str, data: bytes) -> bool:
        return cast("bool", self._ask(partial(self._simulation.create, name, data)))

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        return cast("str | None", self._ask(partial(self._simulation.replace, name, data, etag)))

    def read(self, name: str) -> tuple[bytes, str] | None:
        return cast("tuple[bytes, str] | None", self._ask(partial(self._simulation.read, name)))

    def list(self, prefix: str, after: str = "") -> list[str]:
        rows = self._simulation.rows
        found = self._ask(lambda: sorted(each for each in rows if each.startswith(prefix) and each > after))
        return cast("list[str]", found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._ask(partial(self._simulation.rows.pop, name, None))

    def _ask(self, work: Callable[[], object]) -> object:
        answer = request(partial(self._simulation.deliver, work), _TIMEOUT_MS)
        if answer is None:
            raise ReplicaUnavailable("no answer")
        (result,) = cast("tuple[object]", answer)
        if result is _REFUSED:
            raise ReplicaUnavailable("503 SlowDown")
        return result


class Simulation:
    """One history. ``run`` raises ``AssertionError`` if it breaks a promise."""

    def __init__(self, seed: int, bugs: Bugs) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(self.rng)
        self.bugs = bugs
        self.rows: dict[str, tuple[bytes, str]] = {}
        self.answered: list[Answered] = []
        self.hosts: list[Host] = []
        self._etags = count()
        self._two_until_ms = 0  # a promotion: the old primary does not know of it yet

    def run(self, hosts: int, until_ms: int) -> None:
        """Run some hosts with faults, then check the log."""
        self.hosts = [Host(self, f"h{number}") for number in range(hosts)]
        self.scheduler.at(self.rng.randint(500, 2_000), self._disturb)
        try:
            self.scheduler.run(until_ms, self._check_holders)
        finally:
            for host in self.hosts:
                host.process.kill()
        self._check()

    def _disturb(self) -> None:
        """Disturb a host, more often the holder of the lease than another one; or promote its standby."""
        if self.rng.random() < 0.1:
            release_lease(cast("Any", self))
            self._two_until_ms = self.scheduler.now_ms + TERM_MS
        holders = [host for host in self.hosts if host.is_holder()]
        self.rng.choice(holders if holders and self.rng.random() < 0.6 else self.hosts).disturb()
        self.scheduler.at(self.rng.randint(100, 2 * TERM_MS), self._disturb)

    def _check_holders(self) -> None:
        if self.bugs.has_two_holders or self.scheduler.now_ms < self._two_until_ms:
            return
        holders = [host.name for host in self.hosts if host.is_holder()]
        assert len(holders) <= 1, f"{holders} hold the lease at {self.scheduler.now_ms}"

    def _check(self) -> None:
        """Check that the log is one chain with every answered batch once, in the order of their answers."""
        batches: list[bytes] = []
        number, checksum, epoch = 0, bytes(16), 0
        while (found := self.rows.get(segment_name(number + 1))) is not None:
            segment = decode_segment(found[0], segment_name(number + 1))
            assert segment.head.previous == checksum, f"segment {number + 1} does not follow"
            assert segment.head.epoch >= epoch, f"segment {number + 1} has an older epoch"
            number, checksum, epoch = number + 1, segment.checksum, segment.head.epoch
            batches += [value for batch in segment.batches for _, key, value in batch.puts if key == _ROW]
        place = {batch: each for each, batch in enumerate(batches)}
        assert len(place) == len(batches), "a batch is in the log twice"
        lost = [each.batch for each in self.answered if each.batch not in place]
        assert not lost, f"answered OK and not in the log: {lost[:3]}"
        latest_ms = 0
        for each in sorted(self.answered, key=lambda each: place[each.batch]):
            assert each.answered_ms >= latest_ms, f"{each} is in the log after a batch that was appended later"
            latest_ms = max(latest_ms, each.begun_ms)
        for host in self.hosts:
            mine = host.directory.contents()
            assert batches[: len(mine)] == mine, f"{host.name} is no prefix of the log"

    # -- the object store ---------------------------------------------------------------------------------------------

    def deliver(self, work: Callable[[], object], task: Task, turn: int) -> None:
        """Deliver a request, and its answer to a turn of a thread, each late, or never; or refuse it."""
        scheduler = self.scheduler
        chance = self.rng.random()

        def arrive() -> None:
            result = _REFUSED if 0.12 <= chance < 0.14 else work()
            if not 0.05 <= chance < 0.09:  # the answer is lost
                scheduler.wake_at(1 + scheduler.below(_TRAVEL_MS_MAX), task, turn, (result,))

        if chance < 0.05:
            scheduler.at(_TIMEOUT_MS + scheduler.below(_LATE_MS_MAX - _TIMEOUT_MS), arrive)
        elif not 0.09 <= chance < 0.12:  # the request is lost
            scheduler.at(1 + scheduler.below(_TRAVEL_MS_MAX), arrive)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one."""
        if name in self.rows and not self.bugs.has_no_fence:
            return False
        self.rows[name] = data, ""
        return True

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return an object."""
        return self.rows.get(name)

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Write a register if it has this ETag."""
        found = self.rows.get(name)
        if etag != (found[1] if found else None):
            return None
        self.rows[name] = data, f"e{next(self._etags)}"
        return self.rows[name][1]


class Host:
    """A host: its directory, its clock, and the process that runs on it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.directory = Directory()
        self.simulation = simulation
        self._rng = simulation.rng
        self._scheduler = simulation.scheduler
        self._offset_ms = self._rng.randint(-3_600_000, 3_600_000)
        self.lease: Lease | None = None
        self._is_ending = False
        self._began_ms: int | None = None  # of the write at the disk
        self.start()

    def is_holder(self) -> bool:
        """Return True while the process believes that it holds the lease."""
        return self.lease is not None and self.lease.is_held(self.process.boot_ms())

    def start(self) -> None:
        """Start a process on the directory."""
        self._is_ending, self._began_ms = False, None
        self.process = Process(self._scheduler, self, self._offset_ms)
        self.process.start(self._live)

    def disturb(self) -> None:
        """Stop, end or kill the process, or lose the directory as well; then begin again."""
        if self.process.is_dead:
            return
        chance = self._rng.random()
        pause_ms = self._rng.randint(10, 3 * TERM_MS)
        if chance < 0.5:
            self.process.stopped_until_ms = self._scheduler.now_ms + pause_ms
        elif chance < 0.6:
            self._is_ending = True
        else:
            record = self.lease.record if self.lease is not None else None
            self._end()
            if chance > 0.8 and (record is None or record.is_bound):  # else an operator would decide
                self.directory = Directory()
            self._scheduler.at(pause_ms, self._start_again)

    def _end(self) -> None:
        self.process.kill()
        self.lease = None
        self.directory.crash(self._rng)

    def _start_again(self) -> None:
        if self.process.is_dead:
            self.start()

    # -- the process --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        process = self.process
        with suppress(DmqError):
            self._serve(process)
        self._scheduler.at(0, lambda: self._exit(process))

    def _exit(self, process: Process) -> None:
        if process is self.process and not process.is_dead:
            self._end()
            self._scheduler.at(self._rng.randint(50, 500), self._start_again)

    def _serve(self, process: Process) -> None:
        objects, directory = SimulatedObjects(self.simulation), self.directory
        log = self.simulation.bugs.log(objects, process, LogOptions(is_sync=True, grace_s=1.0), _no_base)
        primacy = Primacy(
            objects,
            objects,
            process,
            cast("Any", directory),
            address=self.name,
            term_ms=TERM_MS,
            on_lost=lambda reason: log.refuse(ReplicaFenced(reason)),
        )
        primacy.wait(may_begin=True)
        epoch = self._open(log, directory)
        primacy.lead(epoch, "", log.bind, self._stalled_s)
        try:
            while not self._is_ending:
                self._write(log, directory)
                wait_ms(1 + self._scheduler.below(60))
        finally:
            log.close()
            self.lease = None  # it is given up from here on
            primacy.close(is_complete=not log.status().lag_batches)

    def _open(self, log: ReplicationLog, directory: Directory) -> int:
        while True:
            position = directory.position()
            log.begin(cast("Any", directory), LogStart(_STORE, position.epoch if position else 0, None, None))
            position = directory.position()
            epoch = position.epoch + 1 if position else 1
            with suppress(LogMoved):
                self._append(log, directory, opens=epoch)
                directory.is_original = True
                return epoch

    def _write(self, log: ReplicationLog, directory: Directory) -> None:
        begun_ms = self._scheduler.now_ms
        content = self._append(log, directory)
        self.simulation.answered.append(Answered(content, begun_ms, self._scheduler.now_ms))

    def _append(self, log: ReplicationLog, directory: Directory, *, opens: int = 0) -> bytes:
        content = self._rng.randbytes(8)
        batch = Batch()
        batch.puts.append((Family.META, _ROW, content))
        log.append(batch, opens=opens)
        self._began_ms = self._scheduler.now_ms
        wait_ms(self._scheduler.below(4 * TERM_MS if self._rng.random() < _STALLS else 3))
        directory.write(batch)
        wait_ms(self._scheduler.below(3))
        directory.sync()
        self._began_ms = None
        return content

    def _stalled_s(self) -> float:
        return 0.0 if self._began_ms is None else (self._scheduler.now_ms - self._began_ms) / 1000


def _no_base(start: LogStart) -> int:
    raise AssertionError(f"a synchronous log needs no base: {start}")


class _Silent:
    """A logger without lines."""

    def info(self, event: str, **fields: object) -> None:
        """Log nothing."""

    warning = error = info


def _host() -> Host:
    return cast("Host", current_task().process.host)


def _lease_of(holder: str, address: str, *, term_ms: int) -> Lease:
    host = _host()
    host.lease = host.simulation.bugs.lease(holder, address, term_ms=term_ms)
    return host.lease


@contextmanager
def simulated_modules() -> Iterator[None]:
    """Run ``dmq.replication`` in simulated processes."""
    with ExitStack() as stack:
        for module in (lease_module, log_module, role_module):
            stack.enter_context(patch.object(module, "threading", simulated_threads))
            stack.enter_context(patch.object(module, "log", _Silent()))
        stack.enter_context(patch.object(LeaseRecord, "decode", lru_cache(LeaseRecord.decode)))  # all hosts read it
        pool = simulated_threads.ThreadPoolExecutor
        stack.enter_context(patch.object(following_module, "ThreadPoolExecutor", pool))
        stack.enter_context(
            patch.multiple(
                role_module,
                Cell=lambda directory: directory,
                Standby=FollowingDirectory,
                read_directory=_read_directory,
                Lease=_lease_of,
                uuid4=lambda: UUID(int=_host().simulation.rng.getrandbits(128)),
            )
        )
        yield
