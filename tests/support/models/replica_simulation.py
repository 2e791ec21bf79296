"""Simulation of primaries and standbys on one object store, under a seeded scheduler.

Lease and segments are those of the product; the object store, the clocks and the hosts are simulated. Requests and
answers are delayed, reordered and lost; a request may arrive after its sender gave up. Hosts crash, stop and continue,
and lose their directories. Their clocks are hours apart.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dmq.replication.lease import LEASE, Lease, LeaseRecord, LeaseWrite
from dmq.replication.segment import SegmentHead, decode_segment, encode_batch, encode_segment, segment_name
from dmq.store.engines.engine import Batch
from dmq.store.schema.keys import Family
from dmq.store.schema.position import NO_CHECKSUM

TERM_MS = 1_000
_TIMEOUT_MS = 300
_LATE_MS_MAX = 3_000
_STORE = 7
_NONCE_BYTES = 16

Steps = Generator[Any, Any, None]  # yields requests, receives their answers


class Unanswered(Exception):
    """The request was not answered in time; it may have had its effect, or may have it later."""


@dataclass(frozen=True, slots=True)
class Bugs:
    """Faults that the checks must find."""

    answers_first: bool = False  # OK before the put is answered
    has_no_fence: bool = False  # a segment replaces another one
    has_no_nonce: bool = False  # a segment that exists counts as the own one
    lease: type[Lease] = Lease


@dataclass
class Directory:
    """Durable state of a host: the batches that it applied, and its position."""

    batches: list[bytes] = field(default_factory=list)
    number: int = 0
    epoch: int = 0
    checksum: bytes = NO_CHECKSUM


class Simulation:
    """One history. ``run`` raises ``AssertionError`` if it breaks a promise."""

    def __init__(self, seed: int, bugs: Bugs) -> None:
        self.rng = random.Random(seed)
        self.bugs = bugs
        self.now_ms = 0
        self.rows: dict[str, tuple[bytes, str]] = {}
        self.acknowledged: list[bytes] = []
        self.hosts: list[Host] = []
        self._etags = count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay_ms: int, event: Callable[[], None]) -> None:
        """Run an event later."""
        heapq.heappush(self._events, (self.now_ms + delay_ms, next(self._order), event))

    def run(self, hosts: int, until_ms: int) -> None:
        """Run some hosts with faults, then check the log."""
        self.hosts = [Host(self, f"h{number}") for number in range(hosts)]
        for host in self.hosts:
            host.start()
            self.at(self.rng.randint(500, until_ms), host.disturb)
        while self._events and self.now_ms < until_ms:
            self.now_ms, _, event = heapq.heappop(self._events)
            event()
            holders = [host.name for host in self.hosts if host.is_holder()]
            assert len(holders) <= 1, f"{holders} hold the lease at {self.now_ms}"
        self.check()

    def check(self) -> None:
        """Check that the log is one chain with every acknowledged batch once, and that directories are prefixes."""
        batches: list[bytes] = []
        number, checksum, epoch = 0, NO_CHECKSUM, 0
        while (found := self.rows.get(segment_name(number + 1))) is not None:
            segment = decode_segment(found[0], segment_name(number + 1))
            assert segment.head.previous == checksum, f"segment {number + 1} does not follow"
            assert segment.head.epoch >= epoch, f"segment {number + 1} has an older epoch"
            number, checksum, epoch = number + 1, segment.checksum, segment.head.epoch
            batches += _of(segment.batches)
        lost = set(self.acknowledged) - set(batches)
        assert not lost, f"acknowledged and not in the log: {sorted(lost)[:3]}"
        assert len(batches) == len(set(batches)), "a batch is in the log twice"
        for host in self.hosts:
            mine = host.directory.batches
            assert batches[: len(mine)] == mine, f"{host.name} is no prefix of the log"

    # -- the object store ---------------------------------------------------------------------------------------------

    def request(self, request: tuple[Any, ...], answer: Callable[[Any], None]) -> None:
        """Deliver a request and its answer, each late, or never."""
        chance = self.rng.random()
        is_late = chance < 0.05

        def arrive() -> None:
            result = self._execute(*request)
            if not 0.05 <= chance < 0.09:  # the answer is lost
                self.at(self.rng.randint(1, 30), lambda: answer(result))

        if not 0.09 <= chance < 0.12:  # the request is lost
            self.at(self.rng.randint(_TIMEOUT_MS, _LATE_MS_MAX) if is_late else self.rng.randint(1, 30), arrive)
        self.at(_TIMEOUT_MS, lambda: answer(Unanswered()))

    def _execute(self, method: str, name: str, data: bytes = b"", etag: str | None = None) -> object:
        found = self.rows.get(name)
        if method == "read":
            return found
        if method == "create":
            if found is not None and not self.bugs.has_no_fence:
                return False
            self.rows[name] = data, ""
            return True
        if etag != (found[1] if found else None):
            return None
        self.rows[name] = data, f"e{next(self._etags)}"
        return self.rows[name][1]


class Host:
    """A host: its directory, its clock, and the process that runs on it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.directory = Directory()
        self._simulation = simulation
        self._offset_ms = simulation.rng.randint(-3_600_000, 3_600_000)
        self._lease: Lease | None = None
        self._steps: Steps | None = None
        self._stopped_until_ms = 0
        self._starts = 0

    def now_ms(self) -> int:
        """Return the time by the clock of this host."""
        return self._simulation.now_ms + self._offset_ms

    def is_holder(self) -> bool:
        """Return True while the process believes that it holds the lease."""
        return self._lease is not None and self._lease.is_held(self.now_ms())

    def start(self) -> None:
        """Start a process on the directory."""
        self._starts += 1
        self._lease = self._simulation.bugs.lease(f"{self.name}-{self._starts}", self.name, term_ms=TERM_MS)
        self._steps = self._live(self._lease)
        self._continue(self._steps, None)

    def disturb(self) -> None:
        """Stop or kill the process, or lose the directory as well; then begin again."""
        rng = self._simulation.rng
        chance = rng.random()
        pause_ms = rng.randint(10, 4 * TERM_MS)
        if chance < 0.5:
            self._stopped_until_ms = self._simulation.now_ms + pause_ms
        else:
            self._steps = self._lease = None
            if chance > 0.75:
                self.directory = Directory()
            self._simulation.at(pause_ms, self.start)
        self._simulation.at(pause_ms + rng.randint(500, 4_000), self.disturb)

    def _continue(self, steps: Steps, answer: object) -> None:
        """Pass an answer to the process; a stopped one gets it when it continues."""
        if steps is not self._steps:
            return
        wait_ms = self._stopped_until_ms - self._simulation.now_ms
        if wait_ms > 0:
            self._simulation.at(wait_ms, lambda: self._continue(steps, answer))
            return
        try:
            request = steps.throw(answer) if isinstance(answer, Unanswered) else steps.send(answer)
        except StopIteration:
            self._steps = self._lease = None
            self._simulation.at(self._simulation.rng.randint(50, 500), self._start_again)
            return
        if isinstance(request, int):
            self._simulation.at(request, lambda: self._continue(steps, None))
            return
        is_answered = False

        def answered(result: object) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                self._continue(steps, result)

        self._simulation.request(request, answered)

    def _start_again(self) -> None:
        if self._steps is None:
            self.start()

    # -- the process --------------------------------------------------------------------------------------------------

    def _live(self, lease: Lease) -> Steps:
        yield from self._follow(lease)
        rng = self._simulation.rng
        epoch = self.directory.epoch + 1
        opening = b"opening %s" % rng.randbytes(8).hex().encode()
        if not (yield from self._append(epoch, opening, lease)):
            return
        while not lease.is_lost(self.now_ms()):
            yield from self._keep(lease, epoch)
            batch = rng.randbytes(8)
            if self._simulation.bugs.answers_first:
                self._simulation.acknowledged.append(batch)
            if not (yield from self._append(epoch, batch, lease)):
                return
            self._simulation.acknowledged.append(batch)
            yield rng.randint(1, 60)

    def _follow(self, lease: Lease) -> Steps:
        """Follow the log until the lease is acquired and the end of the log is reached."""
        while True:
            try:
                while (found := (yield "read", segment_name(self.directory.number + 1))) is not None:
                    self._apply(found[0])
                if lease.is_held(self.now_ms()):
                    return
                lease.note_read((yield "read", LEASE), self.now_ms())
                write = lease.plan_acquisition(self.now_ms())
                if write is not None:
                    yield from self._write(lease, write)
                    continue
            except Unanswered:
                pass
            yield self._simulation.rng.randint(20, 120)

    def _keep(self, lease: Lease, epoch: int) -> Steps:
        """Renew the lease if that is due."""
        try:
            if lease.needs_read():
                lease.note_read((yield "read", LEASE), self.now_ms())
            write = lease.plan_renewal(self.now_ms(), epoch=epoch, is_bound=True)
            if write is not None:
                yield from self._write(lease, write)
        except Unanswered:
            pass

    def _write(self, lease: Lease, write: LeaseWrite) -> Steps:
        assert LeaseRecord.decode(write.record.encode()) == write.record
        etag = yield "replace", LEASE, write.record.encode(), write.etag
        lease.note_answer(write, etag, self.now_ms())

    def _append(self, epoch: int, content: bytes, lease: Lease) -> Generator[Any, Any, bool]:
        """Put a segment until the log has one at its number; return False if that is another one."""
        batch = Batch()
        batch.puts.append((Family.META, b"row", content))
        here = self.directory
        nonce = self._simulation.rng.randbytes(_NONCE_BYTES)
        head = SegmentHead(_STORE, epoch, here.number + 1, len(here.batches) + 1, 0, nonce, here.checksum)
        data, _ = encode_segment(head, [encode_batch(batch)])
        name = segment_name(head.number)
        while True:
            try:
                is_written = (yield "create", name, data) or self._simulation.bugs.has_no_nonce
                if not is_written:
                    found = yield "read", name
                    if found is None:
                        continue
                    if decode_segment(found[0], name).head.nonce != nonce:
                        return False
                self._apply(data)
                return True
            except Unanswered:
                yield from self._keep(lease, epoch)

    def _apply(self, data: bytes) -> None:
        segment = decode_segment(data, "segment")
        here = self.directory
        here.batches += _of(segment.batches)
        here.number, here.epoch, here.checksum = segment.head.number, segment.head.epoch, segment.checksum


def _of(batches: Any) -> list[bytes]:  # noqa: ANN401 - a sequence of batches
    return [value for batch in batches for _, _, value in batch.puts]
