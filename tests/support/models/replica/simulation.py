"""Simulation of primaries and standbys on one object store, under a seeded scheduler.

The replication log, the lease, the roles and the standbys are those of the product, with their threads. The object
store, the clocks and the directories are simulated. Requests and answers are delayed, reordered, lost and refused; a
request may arrive after its sender gave up. Hosts crash between any two steps, stop and continue, end in order, and
lose their directories. Disks stall. Operators promote a standby of a live primary. The clocks of the hosts are hours
apart.

With direct links, the last copy of an answered batch is never removed: neither that of a primary whose member was lost,
nor that of a member whose primary was lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, cast
from unittest.mock import patch
from uuid import UUID

from support.models.replica import threads as simulated_threads
from support.models.replica.links import Network, ReceivedRow, SimulatedListener, SimulatedReceived
from support.models.replica.threads import Process, Scheduler, Task, current_task, request, wait_ms

from dmq.errors import DmqError, ReplicaFenced
from dmq.replication import following as following_module
from dmq.replication import lease as lease_module
from dmq.replication import log as log_module
from dmq.replication import role as role_module
from dmq.replication.lease import Lease, LeaseRecord
from dmq.replication.link import LINK, LinkRecord, LinkSender, StandbyLink
from dmq.replication.link import receiver as receiver_module
from dmq.replication.link import sender as sender_module
from dmq.replication.link import standby_link as standby_link_module
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import ReplicaUnavailable
from dmq.replication.role import Primacy, release_lease, release_link
from dmq.replication.segment import Segment, SegmentHead, decode_batch, decode_segment, segment_name
from dmq.replication.standby import DirectoryState, Standby
from dmq.store.engines.engine import Batch
from dmq.store.schema.cell.identity import Identity
from dmq.store.schema.cell.position import Position, decode_position
from dmq.store.schema.keys import META_POSITION, Family
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
    has_links: bool = False  # not a fault
    received: type[SimulatedReceived] = SimulatedReceived
    standby_link: type[StandbyLink] = StandbyLink
    sender: type[LinkSender] = LinkSender
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
    member: str = field(default_factory=partial(lambda numbers: f"m{next(numbers)}", count()))
    received: list[ReceivedRow] = field(default_factory=list)
    acknowledged: list[ReceivedRow] = field(default_factory=list)

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
        synced = sum(each.is_synced for each in self.received)
        del self.received[rng.randint(synced, len(self.received)) :]
        for each in self.received:
            each.is_synced = True

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

    def promote(self, epoch: int | None = None, is_held: Callable[[], bool] = lambda: True) -> None:
        """Apply the rest of the log; the clocks of the simulated hosts may be apart."""
        self._catch_up_last(epoch, is_held)
        cast("Directory", self._cell).is_original = True
        self.close()

    def _set_aside(self, moved: Any) -> None:  # noqa: ANN401 - private to the standby
        simulation = _host().simulation
        is_rebased = simulation.bugs.has_links and not moved.is_diverged
        assert is_rebased, f"a synchronous directory is not a prefix of the log: {moved}"
        directory = cast("Directory", self._cell)
        directory.batches = list(simulation.newest_base())
        directory.sync()

    def _keep_tail(self, received: Any, head: SegmentHead) -> None:  # noqa: ANN401 - simulated
        received.drop_before(self._position.store, head.epoch)


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
        self.network = Network()
        self.bases: list[list[tuple[bytes, bytes]]] = []
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
        record = LinkRecord.decode(self.rows.get(LINK))
        members = [host.directory.member for host in self.hosts]
        if record is not None and record.member not in ("", *members) and self._has_log_all():
            release_link(cast("Any", self))
        holders = [host for host in self.hosts if host.is_holder()]
        self.rng.choice(holders if holders and self.rng.random() < 0.6 else self.hosts).disturb()
        self.scheduler.at(self.rng.randint(100, (4 if self.bugs.has_links else 2) * TERM_MS), self._disturb)

    def _has_log_all(self) -> bool:
        """Return True if a takeover without the member and without the primary would lose nothing.

        An operator who releases the register earlier accepts a loss.
        """
        known = set(self.contents()[0])
        return all(each.batch in known for each in self.answered)

    def _check_holders(self) -> None:
        if self.bugs.has_two_holders or self.scheduler.now_ms < self._two_until_ms:
            return
        holders = [host.name for host in self.hosts if host.is_holder()]
        assert len(holders) <= 1, f"{holders} hold the lease at {self.scheduler.now_ms}"

    def segments(self) -> Iterator[Segment]:
        """Yield the log, and check that it is one chain."""
        number, checksum, epoch = 0, bytes(16), 0
        while (found := self.rows.get(segment_name(number + 1))) is not None:
            segment = decode_segment(found[0], segment_name(number + 1))
            assert segment.head.previous == checksum, f"segment {number + 1} does not follow"
            assert segment.head.epoch >= epoch, f"segment {number + 1} has an older epoch"
            number, checksum, epoch = number + 1, segment.checksum, segment.head.epoch
            yield segment

    def contents(self) -> tuple[list[bytes], int]:
        """Return the batches of the log, some only in bases, and its last epoch."""
        batches: list[bytes] = []
        last_batch = epoch = 0
        for segment in self.segments():
            head, epoch = segment.head, segment.head.epoch
            if head.first_batch > last_batch + 1:
                batches = [content for content, _ in self._base(head.number - 1, head.first_batch - 1) if content]
            batches += [value for batch in segment.batches for _, key, value in batch.puts if key == _ROW]
            last_batch = segment.last_batch
        return batches, epoch

    def newest_base(self) -> list[tuple[bytes, bytes]]:
        """Return the newest base that the log continues; empty if the log has none, and begins with the store."""
        heads = {each.head.number: each.head for each in self.segments()}
        return next((base for base in reversed(self.bases) if _continues(base, heads)), [])

    def _base(self, number: int, batch: int) -> list[tuple[bytes, bytes]]:
        heads = {each.head.number: each.head for each in self.segments()}
        for base in reversed(self.bases):
            position = decode_position(base[-1][1])
            # A put without an answer: the log has segments after its position, with batches that are in the base.
            if position.batch == batch and position.number <= number and _continues(base, heads):
                return base
        raise AssertionError(f"the log has a hole after segment {number}, and no base has it")

    def lacking(self, lost: Host | None) -> list[bytes]:
        """Return the answered batches that would be lost with the directory of a host, if acknowledgements are true.

        Without a host, return those that are lost.
        """
        batches, epoch = self.contents()
        known = set(batches)
        record = LinkRecord.decode(self.rows.get(LINK))
        for host in self.hosts:
            directory = host.directory
            if host is lost:
                continue
            position = directory.position()
            if directory.is_original and position is not None and position.epoch == epoch:
                known.update(directory.contents())
            if record is not None and (record.epoch, record.member) == (epoch, directory.member):
                rows = directory.received if lost is None else directory.acknowledged
                puts = [each for row in rows for each in decode_batch(row.batch.data).puts]
                known.update(value for _, key, value in puts if key == _ROW)
        return [each.batch for each in self.answered if each.batch not in known]

    def _check(self) -> None:
        """Check that the log is one chain with every answered batch once, in the order of their answers."""
        batches, epoch = self.contents()
        place = {batch: each for each, batch in enumerate(batches)}
        assert len(place) == len(batches), "a batch is in the log twice"
        lost = self.lacking(None)
        assert not lost, f"answered OK and not in the log: {lost[:3]}"
        latest_ms = 0
        logged = [each for each in self.answered if each.batch in place]
        assert self.bugs.has_links or len(logged) == len(self.answered)
        for each in sorted(logged, key=lambda each: place[each.batch]):
            assert each.answered_ms >= latest_ms, f"{each} is in the log after a batch that was appended later"
            latest_ms = max(latest_ms, each.begun_ms)
        for host in self.hosts:
            mine, position = host.directory.contents(), host.directory.position()
            if self.bugs.has_links and position is not None and position.epoch == epoch:
                mine = mine[: len(batches)]  # the rest was answered by the direct link
            assert batches[: len(mine)] == mine, f"{host.name} is no prefix of the log"

    # -- the object store ---------------------------------------------------------------------------------------------

    def deliver(self, work: Callable[[], object], task: Task, turn: int) -> None:
        """Deliver a request, and its answer to a turn of a thread, each late, or never; or refuse it."""
        scheduler = self.scheduler
        chance = self.rng.random() * (3 if self.bugs.has_links else 1)  # links come after registrations and renewals

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

    def list(self, prefix: str, after: str = "") -> list[str]:
        """Return names."""
        return sorted(each for each in self.rows if each.startswith(prefix) and each > after)

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Write a register if it has this ETag."""
        found = self.rows.get(name)
        if etag != (found[1] if found else None):
            return None
        self.rows[name] = data, f"e{next(self._etags)}"
        return self.rows[name][1]


def _continues(base: list[tuple[bytes, bytes]], heads: Mapping[int, SegmentHead]) -> bool:
    """Return True if the log continues a base: all segments with batches of the base are from its epoch."""
    position = decode_position(base[-1][1])
    number = position.number + 1
    while (head := heads.get(number)) is not None and head.first_batch <= position.batch:
        if head.epoch != position.epoch:
            return False
        number += 1
    return True


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
            is_bound = record is None or record.is_bound  # else an operator would decide
            if chance > 0.8 and is_bound and not self.simulation.lacking(self):
                self.directory = Directory()
            self._scheduler.at(pause_ms, self._start_again)

    def _end(self) -> None:
        self.process.kill()
        self.simulation.network.end(self.process)
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
        bugs, network = self.simulation.bugs, self.simulation.network
        options = LogOptions(is_sync=True, grace_s=1.0, every_s=0.5)
        log = bugs.log(objects, process, options, self._make_base if bugs.has_links else _no_base)
        primacy = Primacy(
            objects,
            objects,
            process,
            cast("Any", directory),
            address=self.name,
            term_ms=TERM_MS,
            on_lost=lambda reason: log.refuse(ReplicaFenced(reason)),
            listener=SimulatedListener(network) if bugs.has_links else None,
        )
        primacy.wait(may_begin=True)
        epoch = self._open(log, directory)
        sender = bugs.sender(log, objects, process, network.dial, store=_STORE, epoch=epoch, patience_s=TERM_MS / 1000)
        if bugs.has_links:
            sender.start()
        primacy.lead(epoch, "", log.bind, self._stalled_s, sender.offer)
        try:
            while not self._is_ending:
                self._write(log, directory)
                wait_ms(1 + self._scheduler.below(60))
        finally:
            sender.close()
            log.close()
            self.lease = None  # it is given up from here on
            is_complete = not log.status().lag_batches and not log.status().lag_bytes
            if is_complete:
                sender.leave()
            primacy.close(is_complete=is_complete)

    def _make_base(self, start: LogStart) -> int:
        assert start.store == _STORE
        wait_ms(self._rng.randint(1, 30))
        base = list(self.directory.batches)
        self.simulation.bases.append(base)
        return decode_position(base[-1][1]).batch

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


def _standby_link_of(*arguments: Any) -> StandbyLink:  # noqa: ANN401 - passed on
    return _host().simulation.bugs.standby_link(*arguments)


@contextmanager
def simulated_modules() -> Iterator[None]:
    """Run ``dmq.replication`` in simulated processes."""
    with ExitStack() as stack:
        for module in (lease_module, log_module, role_module, sender_module, receiver_module):
            stack.enter_context(patch.object(module, "threading", simulated_threads))
            stack.enter_context(patch.object(module, "log", _Silent()))
        stack.enter_context(patch.object(LeaseRecord, "decode", lru_cache(LeaseRecord.decode)))  # all hosts read it
        stack.enter_context(patch.object(standby_link_module, "log", _Silent()))
        stack.enter_context(patch.object(log_module, "_LINK_S", 0.05))
        stack.enter_context(patch.object(receiver_module, "SILENCE_S", 1.0))
        stack.enter_context(patch.multiple(sender_module, ANSWER_S=0.3, _SIGN_OF_LIFE_S=0.1, _AGAIN_S=0.1))
        pool = simulated_threads.ThreadPoolExecutor
        stack.enter_context(patch.object(following_module, "ThreadPoolExecutor", pool))
        stack.enter_context(
            patch.multiple(
                role_module,
                Cell=lambda directory: directory,
                Standby=FollowingDirectory,
                read_directory=_read_directory,
                Lease=_lease_of,
                ReceivedBatches=lambda directory, makes: _host().simulation.bugs.received(directory, makes=makes),
                StandbyLink=_standby_link_of,
                uuid4=lambda: UUID(int=_host().simulation.rng.getrandbits(128)),
            )
        )
        yield
