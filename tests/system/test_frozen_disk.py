"""A disk that stalls, on a file system that is really frozen: the hook, its process, and what was acknowledged."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.wire.client import WireClient, a_message
from support.effort import EFFORT
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.faults.frozen_disk import FrozenDisk, Pauses, mounted
from support.rigs.producer.hook import AWAY
from support.rigs.producer.spool import QUIET
from support.rigs.producer.spool_driver import PATIENCE_S, command, lines, take_all
from support.rigs.replica.pair import Pair

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.daemon.run import EXIT_FENCED
from dmq.producer_store.spool import Spool
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.schema.keys import Family
from retry import Redelivery, Rejected, Spooled

pytestmark = pytest.mark.fault
_Health = health_pb2.HealthCheckResponse
FREEZE_S = 30.0 if EFFORT > 1 else 5.0
FREEZE_S_MAX = FREEZE_S + 60.0  # of a test on a machine that is slow: each ends its freeze itself
KEEP_S = 1.0
_MIB = 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FrozenDisk]:
    with mounted(tmp_path) as made:
        yield made


def unreachable(payload: bytes) -> None:
    raise AWAY


def test_sends_return_in_time_and_no_thread_stops(disk: FrozenDisk) -> None:
    """Each ``send`` returns by ``keep_timeout_s``, in doubt, while threads run on; all that was kept is there later."""
    pauses = Pauses()
    hook = Redelivery(Spool(disk.path / "spool"), keep_timeout_s=KEEP_S, autostart=False)
    hook.add_handler("t", unreachable)
    kept = sum(isinstance(hook.send("t", b"before"), Spooled) for _ in range(20))
    in_doubt = 0
    with disk.frozen(FREEZE_S_MAX), pauses.watched():
        end_s = time.monotonic() + FREEZE_S
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            outcome = hook.send("t", b"during")
            took_s = time.monotonic() - began_s
            assert isinstance(outcome, Rejected)
            assert outcome.is_uncertain
            assert took_s <= KEEP_S + 0.5 + 2 * pauses.longest_s
            in_doubt += 1
        assert hook.health().status == "degraded"
    pauses.check()
    hook.close()
    with Spool(disk.path / "spool", options=QUIET) as spool:
        assert kept == 20
        assert spool.stats().waiting == kept + in_doubt  # all were written once the disk answered


@pytest.mark.parametrize("bound", ["memtable", "log"])
def test_a_write_that_needs_a_new_log_stops_no_thread(disk: FrozenDisk, bound: str) -> None:
    """A full memtable or log is switched in a call that releases the GIL, so only the writer waits for the disk."""
    family = Family.META if bound == "memtable" else Family.QUEUE  # of 2 MiB, and of more than the log
    engine = RocksEngine(disk.path / "db", RocksOptions(wal_bytes_max=4 * _MIB if bound == "log" else 32 * _MIB))
    logs = {each.name for each in (disk.path / "db").glob("*.log")}
    pauses = Pauses()

    def write() -> None:
        for number in range(12):  # of less than the log's buffer
            batch = Batch()
            batch.puts.append((family, b"%08d" % number, bytes(_MIB)))
            engine.write(batch)

    writer = threading.Thread(target=write)
    with disk.frozen(FREEZE_S_MAX), pauses.watched():
        writer.start()
        writer.join(FREEZE_S)
        assert writer.is_alive(), "the test needs a write that waits for a new log"
        assert len(engine.get_many(family, [b"%08d" % 0])) == 1
    writer.join()
    pauses.check()
    assert {each.name for each in (disk.path / "db").glob("*.log")} != logs
    engine.close()


def test_a_kill_during_a_freeze_loses_nothing_acknowledged(disk: FrozenDisk) -> None:
    """A process that is killed while its writer waits for the disk has all that was answered ``Spooled``, after it."""
    started = command("put_until_killed", disk.path / "spool")
    with subprocess.Popen(started, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(100)]
        with disk.frozen(FREEZE_S_MAX):
            process.kill()
        heard += process.stdout.readlines()
    answered = {number for _, number in lines("".join(heard))}
    with Spool(disk.path / "spool", options=QUIET) as spool:
        there = set(take_all(spool, idle_s=0.1))
    assert answered <= there
    assert len(answered) >= 100


def test_a_daemon_reports_the_stall_and_answers_in_time(disk: FrozenDisk, tmp_path: Path) -> None:
    """``/healthz`` and the health service report it, new sends are refused, and later all is as it was."""
    with Daemon(disk.path / "data", metrics="127.0.0.1:0") as daemon, WireClient(daemon.address) as client:
        health = f"http://{daemon.metrics_address}/healthz"
        assert client.send(a_message("orders", "before")).status.code == wire.OK
        assert ask(health) == (200, "ready\n")
        assert health_of(daemon) == _Health.SERVING
        with disk.frozen(FREEZE_S_MAX):
            with pytest.raises(grpc.RpcError) as held:  # at the disk: it has no answer by its deadline
                client.send(a_message("orders", "held"), deadline_s=1)
            assert held.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert daemon.wait_for("disk_stalled", timeout_s=FREEZE_S_MAX)
            status, text = ask(health)
            assert status == 503
            assert health_of(daemon) == _Health.NOT_SERVING
            assert health_of(daemon, "liveness") == _Health.SERVING
            assert "the disk stalls" in text
            answer = client.send(a_message("orders", "refused"))
            assert answer.status.code == wire.TOO_MANY_REQUESTS
            assert "the disk stalls" in answer.status.message
            found = run_command("status", "--address", daemon.address)
            assert "the disk stalls" in found.stdout, found.stdout + found.stderr
        daemon.wait_for("disk_recovered", timeout_s=PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        while health_of(daemon) != _Health.SERVING:
            assert time.monotonic() < until_s
        assert ask(health) == (200, "ready\n")
        assert client.send(a_message("orders", "after")).status.code == wire.OK
        with disk.frozen(FREEZE_S_MAX):
            daemon.signal(signal.SIGKILL)
        daemon.wait(PATIENCE_S)
        daemon.restart()
        received = {each.message_id for each in client.drain("orders", "billing", 3)}
        assert received == {"before", "held", "after"}


def test_a_standby_replaces_a_primary_whose_disk_stalls(disk: FrozenDisk, tmp_path: Path) -> None:
    """The primary renews no lease during the stall, answers nothing OK after it, and ends as fenced. The write that
    waited for the disk is at the successor.
    """
    with closing(Pair(tmp_path, data=disk.path / "data")) as pair, WireClient(pair.primary.address) as client:
        stalled = pair.primary
        assert client.send(a_message("orders", "before")).status.code == wire.OK
        with disk.frozen(3 * FREEZE_S_MAX):
            with pytest.raises(grpc.RpcError):
                client.send(a_message("orders", "held"), deadline_s=1)
            pair.take_over()
            assert stalled.wait_for("lease_not_renewed", timeout_s=PATIENCE_S)
            assert stalled.wait_for("fenced", timeout_s=PATIENCE_S)
            with pytest.raises(grpc.RpcError):
                client.send(a_message("orders", "late"), deadline_s=1)
        assert stalled.wait(FREEZE_S_MAX) == EXIT_FENCED
        with WireClient(pair.primary.address) as successor:
            received = {each.message_id for each in successor.drain("orders", "billing", 2)}
        assert received == {"before", "held"}


def health_of(daemon: Daemon, service: str = "") -> int:
    """Return the answer of the health service of gRPC."""
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status)


def ask(url: str) -> tuple[int, str]:
    """Return the status and the text of an HTTP answer."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
