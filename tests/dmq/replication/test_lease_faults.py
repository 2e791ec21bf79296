"""The lease on a real object store: partitions, hanging requests, stopped processes, two standbys."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from support.rigs.faults.fault_proxy import FaultProxy, Held, LostAnswer, LostRequest, always, once
from support.rigs.services.object_server import S3Server

from broker_adapter.runtime.clock import Clock, ManualClock, SystemClock
from dmq.replication.lease import Lease, LeaseKeeper
from dmq.replication.objects import ObjectStore, open_objects

pytestmark = pytest.mark.fault
TERM_MS = 2_000
_WAIT_S = 60.0


class Host:
    """A keeper with a clock of its own, and the reason for which it lost the lease."""

    def __init__(self, objects: ObjectStore, clock: Clock) -> None:
        self.lost: queue.Queue[str] = queue.Queue()
        self.keeper = LeaseKeeper(objects, clock, Lease(uuid4().hex, "host:8081", term_ms=TERM_MS), self.lost.put)
        self.keeper.start()


@pytest.fixture
def start(server: S3Server, proxy: FaultProxy) -> Iterator[Callable[..., Host]]:
    """Start a host, behind the proxy or next to it."""
    prefix = uuid4().hex
    hosts: list[Host] = []

    def started(clock: Clock, *, is_proxied: bool = False) -> Host:
        host = Host(server.open(prefix, port=proxy.port if is_proxied else None, timeout_s=TERM_MS / 2000), clock)
        hosts.append(host)
        return host

    yield started
    for host in hosts:
        host.keeper.close()


def _wait(is_so: Callable[[], bool]) -> None:
    """Wait for a state of a thread that reports no event."""
    until_s = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def _renewal(host: Host) -> int:
    record = host.keeper.record()
    return record.renewal if record else 0


def _is_renewed(host: Host, before: int) -> bool:
    return _renewal(host) > before


def _has_read(host: Host) -> bool:
    return host.keeper.record() is not None


def test_a_partitioned_primary_stops_and_the_standby_takes_over(start: Callable[..., Host], proxy: FaultProxy) -> None:
    """The holder behind the partition loses the lease by its own clock; the standby acquires it after the term."""
    clock = ManualClock(0)
    primary = start(clock, is_proxied=True)
    primary.keeper.acquire()
    assert primary.keeper.wait_held(_WAIT_S)
    standby = start(SystemClock())
    standby.keeper.acquire()
    proxy.refuse()
    clock.advance(TERM_MS)
    assert "not renewed" in primary.lost.get(timeout=_WAIT_S)
    assert standby.keeper.wait_held(_WAIT_S)
    assert primary.lost.empty()
    proxy.accept()


def test_a_hanging_request_does_not_hide_the_end_of_the_term(start: Callable[..., Host], proxy: FaultProxy) -> None:
    """The term ends although the thread that renews is in a call, and the late request changes nothing."""
    clock = ManualClock(0)
    primary = start(clock, is_proxied=True)
    primary.keeper.acquire()
    assert primary.keeper.wait_held(_WAIT_S)
    hanging = Held()
    proxy.plan = always(hanging)
    clock.advance(TERM_MS)
    assert primary.lost.get(timeout=_WAIT_S)
    standby = start(SystemClock())
    standby.keeper.acquire()
    assert standby.keeper.wait_held(_WAIT_S)
    hanging.release.set()


def test_a_renewal_with_a_lost_answer_is_found(start: Callable[..., Host], proxy: FaultProxy) -> None:
    """The holder reads the register, finds its own renewal, and stays the holder."""
    clock = ManualClock(0)
    primary = start(clock, is_proxied=True)
    primary.keeper.acquire()
    assert primary.keeper.wait_held(_WAIT_S)
    for _ in range(6):
        proxy.plan = once(LostAnswer())
        before = _renewal(primary)
        clock.advance(TERM_MS // 2)
        _wait(partial(_is_renewed, primary, before))
    assert primary.keeper.is_held()
    assert primary.lost.empty()


def test_a_primary_that_ends_in_order_releases_the_lease(start: Callable[..., Host]) -> None:
    """The standby acquires it although its clock stands still."""
    primary = start(ManualClock(0))
    primary.keeper.acquire()
    assert primary.keeper.wait_held(_WAIT_S)
    standby = start(ManualClock(0))
    standby.keeper.acquire()
    primary.keeper.close()
    assert standby.keeper.wait_held(_WAIT_S)
    assert primary.lost.empty()


def test_the_newest_directory_replaces_its_dead_process(start: Callable[..., Host]) -> None:
    """A holder of the directory's epoch is replaced at once, and notices it at its renewal; a later one is not."""
    primary = start(SystemClock())
    primary.keeper.acquire()
    assert primary.keeper.wait_held(_WAIT_S)
    early, newest = start(SystemClock()), start(SystemClock())
    early.keeper.acquire(dead_epoch=0)
    _wait(partial(_has_read, early))
    assert not early.keeper.is_held()
    newest.keeper.acquire(dead_epoch=1)
    assert newest.keeper.wait_held(_WAIT_S)
    assert primary.lost.get(timeout=_WAIT_S)


def test_an_outage_protects_a_successor(start: Callable[..., Host], proxy: FaultProxy) -> None:
    """A restarted process that could not reach the store does not replace the primary that took over meanwhile."""
    proxy.plan = always(LostRequest())
    first, late = start(SystemClock()), start(SystemClock(), is_proxied=True)
    first.keeper.acquire()
    assert first.keeper.wait_held(_WAIT_S)
    late.keeper.acquire(dead_epoch=1)
    first.keeper.close()
    successor = start(SystemClock())
    successor.keeper.acquire()
    assert successor.keeper.wait_held(_WAIT_S)
    proxy.plan = None
    for _ in range(2):  # the first record may be one that it is about to replace
        _wait(partial(_is_renewed, late, _renewal(late)))
    assert not late.keeper.is_held()
    assert successor.lost.empty()


def test_one_of_two_standbys_takes_over(start: Callable[..., Host]) -> None:
    """Both contend for the lease of a primary that stopped; one holds it, the other follows."""
    clock = ManualClock(0)
    primary = start(clock)
    primary.keeper.acquire()
    assert primary.keeper.wait_held(_WAIT_S)
    clock.advance(TERM_MS)
    theirs = ManualClock(0)
    standbys = [start(theirs) for _ in range(2)]
    for standby in standbys:
        standby.keeper.acquire()
        _wait(partial(_has_read, standby))
    theirs.advance(TERM_MS)
    _wait(lambda: any(standby.keeper.is_held() for standby in standbys))
    winner = next(standby for standby in standbys if standby.keeper.is_held())
    (other,) = (standby for standby in standbys if standby is not winner)
    _wait(lambda: other.keeper.record() == winner.keeper.record())
    assert not other.keeper.is_held()


def _hold(url: str, messages: object) -> None:
    """Hold the lease, and report its acquisition and its loss."""
    host = Host(open_objects(url), SystemClock())
    host.keeper.acquire()
    assert host.keeper.wait_held(_WAIT_S)
    messages.put("held")  # type: ignore[attr-defined]
    messages.put(host.lost.get(timeout=_WAIT_S))  # type: ignore[attr-defined]


def test_a_stopped_process_has_lost_the_lease_when_it_continues(tmp_path: Path) -> None:
    """SIGSTOP, takeover, SIGCONT: the old primary notices at once."""
    spawn = multiprocessing.get_context("spawn")
    messages = spawn.Queue()
    primary = spawn.Process(target=_hold, args=(tmp_path.as_uri(), messages), daemon=True)
    primary.start()
    assert messages.get(timeout=_WAIT_S) == "held"
    assert primary.pid is not None
    os.kill(primary.pid, signal.SIGSTOP)
    standby = Host(open_objects(tmp_path.as_uri()), SystemClock())
    standby.keeper.acquire()
    assert standby.keeper.wait_held(_WAIT_S)
    os.kill(primary.pid, signal.SIGCONT)
    assert messages.get(timeout=_WAIT_S)
    primary.join(_WAIT_S)
    standby.keeper.close()
