"""Fronts that die, hang or do not start, and a store process that ends: what the others do, and what is left."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from support.clients.wire.client import DEADLINE_S, WireClient, a_message, a_receive, received_of
from support.effort import EFFORT
from support.rigs.daemon.fronts import bent, until, until_gone, with_fronts
from support.rigs.daemon.process import STOP_S_MAX, Daemon
from support.rigs.faults.disk_shim import Shim

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.fault

TOPIC, GROUP = "orders", "workers"
_DEATHS = 3 if EFFORT == 1 else 6
PINGS_S = 0.2  # a front that hangs is found after ten of them
COME_BACK_S_MAX = 5.0  # far from the end of any lease


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "data", env=with_fronts()) as running:
        yield running


@contextmanager
def a_daemon(tmp_path: Path, *options: str, **settings: object) -> Iterator[Daemon]:
    """A daemon with two fronts that are bent; it was not started."""
    daemon = Daemon(tmp_path / "data", *options, env=with_fronts(), prefix=bent(**settings))
    try:
        yield daemon
    finally:
        daemon.close()


def send(client: WireClient, *message_ids: str, size: int = 10) -> None:
    assert client.send(*[a_message(TOPIC, each, b"x" * size) for each in message_ids]).status.code == wire.OK


def insist(client: WireClient, message_id: str) -> None:
    """Send until it is accepted, as clients do when they lost their connection."""
    until("the send", lambda: _accepts(client, message_id))


def _accepts(client: WireClient, message_id: str) -> bool:
    try:
        send(client, message_id)
    except grpc.RpcError:
        return False
    return True


def front_that_serves(daemon: Daemon, client: WireClient) -> psutil.Process:
    """The front that has a client's connection: the client is the only one."""
    (found,) = [each for each in daemon.fronts if _connections(each)]
    assert client.channel is not None
    return found


def _connections(process: psutil.Process) -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections(kind="tcp"))


def hold_up(client: WireClient, *, is_renewed: bool = False) -> Iterator[wire.ReceiveMessageResponse]:
    """Leave an answer of 8 MB half read, whose lease would last for long: flow control keeps its call open."""
    send(client, *[f"large-{number}" for number in range(8)], size=1_000_000)
    request = a_receive(TOPIC, GROUP, invisible_s=600)
    if is_renewed:  # as a push consumer's: the leases last as long as it lives
        request.auto_renew = True
    call = client.begin("ReceiveMessage", request)
    assert next(call).status.code == wire.OK
    return call


def poll(daemon: Daemon, client: WireClient, pool: ThreadPoolExecutor) -> Future[list[wire.ReceiveMessageResponse]]:
    """Have a receive wait for messages that are not there, and return once it does."""
    waiting = pool.submit(client.frames, "ReceiveMessage", a_receive(TOPIC, GROUP, wait_s=60), deadline_s=90)
    with AdminClient(daemon.address) as admin:
        until("it waits", lambda: any(each.quota == "polls" and each.used for each in admin.quotas()))
    return waiting


# -- a front that dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_renewed", [False, True], ids=["simple", "push"])
def test_messages_that_a_client_had_not_taken_come_at_once(daemon: Daemon, *, is_renewed: bool) -> None:
    """The answer was on its way when the front died: nobody waits for the end of a lease, which may never come."""
    with WireClient(daemon.address, "slow") as slow:
        call = hold_up(slow, is_renewed=is_renewed)
        front_that_serves(daemon, slow).kill()
        with pytest.raises(grpc.RpcError):
            list(call)
        with WireClient(daemon.address, "other") as other:
            began_s = time.monotonic()
            found = other.drain(TOPIC, GROUP, 8, within_s=COME_BACK_S_MAX)
            took_s = time.monotonic() - began_s
    assert max(each.attempt for each in found) == 2
    assert took_s < COME_BACK_S_MAX


def test_a_receive_that_waited_takes_no_message_with_it(daemon: Daemon) -> None:
    """Its client is gone with the front: a message that comes then goes to one that is there."""
    with WireClient(daemon.address, "gone") as gone, ThreadPoolExecutor(1) as pool:
        send(gone, "first")
        assert len(received_of(gone.frames("ReceiveMessage", a_receive(TOPIC, GROUP, invisible_s=600)))) == 1
        front = front_that_serves(daemon, gone)
        waiting = poll(daemon, gone, pool)
        front.kill()
        with pytest.raises(grpc.RpcError):
            waiting.result(DEADLINE_S)
        with WireClient(daemon.address, "there") as there:
            insist(there, "second")
            assert [each.message_id for each in there.receive(TOPIC, GROUP, wait_s=COME_BACK_S_MAX)] == ["second"]


def test_connections_wait_while_no_front_is_there(daemon: Daemon) -> None:
    """All fronts die at once: a client that connects then is served by the next one, and not turned away."""
    dead = daemon.fronts
    for each in dead:
        each.kill()
    until_gone(dead)
    with WireClient(daemon.address) as client:
        send(client, "patient")
    until("both are back", lambda: len(daemon.fronts) == 2)


def test_many_deaths_leave_nothing_behind(daemon: Daemon) -> None:
    """Descriptors, threads and processes of the store process are as many as before."""
    store = psutil.Process(daemon.pid)

    def has() -> tuple[int, int, int]:
        return store.num_fds(), store.num_threads(), len(store.children())

    with WireClient(daemon.address) as client:
        insist(client, "before")
        before = has()
        for number in range(_DEATHS):
            front = front_that_serves(daemon, client)
            front.kill()
            insist(client, f"after-{number}")
            until("as many as before", lambda: len(store.children()) == len(daemon.fronts) == 2)
        until("as before", lambda: has() == before)
    ended = daemon.events("front_ended")
    assert [each["why"] for each in ended] == ["killed by SIGKILL"] * _DEATHS


# -- a front that hangs -----------------------------------------------------------------------------------------------


def test_a_front_that_hangs_is_replaced_and_the_other_serves_meanwhile(tmp_path: Path) -> None:
    """Clients of the one that hangs get another once it is found; new ones are served before that."""
    with a_daemon(tmp_path, patience={"ping_s": PINGS_S}) as daemon:
        daemon.start()
        with WireClient(daemon.address, "first") as client:
            send(client, "before")
            front = front_that_serves(daemon, client)
            front.suspend()
            stuck = ThreadPoolExecutor(1).submit(insist, client, "in doubt")
            for number in range(8):
                with WireClient(daemon.address, f"new-{number}") as other:
                    insist(other, f"meanwhile-{number}")
            until_gone([front])
            stuck.result(STOP_S_MAX)
        (told,) = daemon.events("front_unresponsive")
        assert told["pid"] == front.pid
        until("there are two again", lambda: len(daemon.fronts) == 2)
        with WireClient(daemon.address, "reader") as reader:
            ids = ["before", "in doubt", *[f"meanwhile-{number}" for number in range(8)]]
            found = reader.drain(TOPIC, GROUP, len(ids))
        assert sorted(each.message_id for each in found) == sorted(ids)
        daemon.stop()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_no_front_outlives_the_store_process(daemon: Daemon) -> None:
    """One of them is stopped when the store process is killed: all are gone, the port is free, and a restart serves."""
    with WireClient(daemon.address) as client:
        send(client, "kept")
        fronts = daemon.fronts
        assert len(fronts) == 2
        fronts[0].suspend()
        daemon.kill()
        until_gone(fronts)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", daemon.port))
        daemon.restart()
        assert [each.message_id for each in client.receive(TOPIC, GROUP, wait_s=5)] == ["kept"]
    assert not [path for path in daemon.data.rglob("*") if path.is_socket()]


def test_a_front_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """One is stopped, the other ends its long polls with an answer: the end is in order, within the grace."""
    with a_daemon(tmp_path, "--shutdown-grace", "60s", patience={"ping_s": PINGS_S}) as daemon:
        daemon.start()
        with WireClient(daemon.address) as client, ThreadPoolExecutor(1) as pool:
            send(client, "once")
            assert len(client.receive(TOPIC, GROUP, invisible_s=600)) == 1
            serving = front_that_serves(daemon, client)
            waiting = poll(daemon, client, pool)
            (other,) = [each for each in daemon.fronts if each != serving]
            other.suspend()
            daemon.stop()
            assert received_of(waiting.result(DEADLINE_S)) == []
        assert other.pid in {each["pid"] for each in daemon.events("front_unresponsive")}


def test_a_front_that_dies_while_the_daemon_ends_is_not_started_again(tmp_path: Path) -> None:
    """It had a call in flight; the end is in order all the same, and does not wait for the rest of the grace."""
    with Daemon(tmp_path / "data", "--shutdown-grace", "60s", env=with_fronts()) as daemon:
        with WireClient(daemon.address) as client:
            held = hold_up(client)  # noqa: F841 - the call ends with its last reference
            front = front_that_serves(daemon, client)
            daemon.signal(signal.SIGTERM)
            daemon.wait_for("stopping", timeout_s=STOP_S_MAX)
            until("the other one ended", lambda: daemon.fronts == [front])
            front.kill()
            assert daemon.wait(STOP_S_MAX) == 0
        assert not daemon.events("front_ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_ends_in_order(daemon: Daemon, number: signal.Signals) -> None:
    """As a terminal and a service manager send it: fronts leave it to the store process, and polls get their answer."""
    with WireClient(daemon.address) as client, ThreadPoolExecutor(1) as pool:
        send(client, "once")
        assert len(client.receive(TOPIC, GROUP, invisible_s=600)) == 1
        waiting = poll(daemon, client, pool)
        fronts = daemon.fronts
        for each in fronts:
            each.send_signal(number)
        daemon.stop(number)
        assert received_of(waiting.result(DEADLINE_S)) == []
    until_gone(fronts)
    assert not daemon.events("front_ended")


def test_a_second_sigterm_leaves_no_front(tmp_path: Path) -> None:
    """Whoever cannot wait sends it again: the store process ends at once, and its fronts with it."""
    options = "--shutdown-grace", "60s"
    with Daemon(tmp_path / "data", *options, env=with_fronts()) as daemon, WireClient(daemon.address) as client:
        held = hold_up(client)  # noqa: F841 - the call ends with its last reference
        fronts = daemon.fronts
        daemon.signal(signal.SIGTERM)
        daemon.wait_for("stopping", timeout_s=STOP_S_MAX)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(STOP_S_MAX) == -signal.SIGTERM
        until_gone(fronts)


def test_a_storage_failure_ends_all(tmp_path: Path) -> None:
    """Exit code 1, no answer but an error, and no front is left."""
    shim = Shim(tmp_path)
    with Daemon(tmp_path / "data", env={**with_fronts(), **shim.environment}) as daemon:
        with WireClient(daemon.address) as client:
            send(client, "stored")
            fronts = daemon.fronts
            shim.fail()
            with pytest.raises((grpc.RpcError, AssertionError)):
                send(client, "not stored")
            assert daemon.wait(STOP_S_MAX) == 1
        assert daemon.events("storage_failed")
        until_gone(fronts)


# -- fronts that do not start -----------------------------------------------------------------------------------------


def _refusal(daemon: Daemon) -> str:
    """Start it, and return the one line with which it does not serve."""
    daemon.spawn()
    assert daemon.wait(STOP_S_MAX) == 1
    events = [json.loads(line) for line in daemon.log().splitlines() if line.startswith("{")]
    (line,) = [event for event in events if event["level"] == "critical"]
    assert (line, line["event"]) == (events[-1], "start_failed")
    assert "Traceback" not in daemon.log()
    return str(line["error"])


def test_a_front_of_another_version_is_refused(tmp_path: Path) -> None:
    """Another one was installed under a daemon that starts: one line says both, and exit code 1."""
    with a_daemon(tmp_path, version="0.0.other") as daemon:
        said = _refusal(daemon)
    assert "and this daemon of 0.0.other: restart it" in said


def test_a_python_that_does_not_start_is_reported(tmp_path: Path) -> None:
    """One line, exit code 1: it ended by itself, or is not there."""
    with a_daemon(tmp_path, executable="/bin/false") as daemon:
        assert "a front process did not start (exit code 1)" in _refusal(daemon)
    with a_daemon(tmp_path, executable=str(tmp_path / "nowhere")) as daemon:
        assert "a front process cannot be started: No such file or directory" in _refusal(daemon)


def test_a_front_that_does_not_start_again_ends_the_daemon_once_no_other_serves(tmp_path: Path) -> None:
    """It is tried again as long as the other one serves; without that one the daemon says why and ends with 1."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec "$REAL_PYTHON" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    patience = {"again_s": (0.0, 0.1), "failures_max": 3}
    prefix = ["env", f"REAL_PYTHON={bent()[0]}", *bent(patience=patience, executable=str(python))]
    with Daemon(tmp_path / "data", env=with_fronts(), prefix=prefix) as daemon, WireClient(daemon.address) as client:
        send(client, "before")
        serving = front_that_serves(daemon, client)
        (other,) = [each for each in daemon.fronts if each != serving]
        python.write_text(f"#!/bin/sh\nuntil [ -e '{tmp_path}/fail' ]; do sleep 0.05; done\nexit 3\n", encoding="utf-8")
        other.kill()
        until("its end is told", lambda: daemon.events("front_ended"))
        send(client, "meanwhile")
        (tmp_path / "fail").touch()
        until("it was tried more often than is allowed", lambda: len(daemon.events("front_ended")) > 5)
        send(client, "after all that")
        serving.kill()
        assert daemon.wait(STOP_S_MAX) == 1
        assert "a front process did not start (exit code 3)" in daemon.event("serving_failed")["error"]
        until_gone([serving])
