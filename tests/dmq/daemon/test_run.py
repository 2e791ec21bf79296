"""The daemon as a process: what keeps it from starting, how it ends, and how it comes back."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from support.clients.wire.client import WireClient, a_message, a_receive, received_of
from support.rigs.daemon.fronts import until
from support.rigs.daemon.process import Daemon, run_to_end

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.store.schema.keys import FORMAT_VERSION

pytestmark = pytest.mark.integration
_ANY = "127.0.0.1:0"
_TOPIC, _GROUP = "orders", "billing"


def _refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """Return why a daemon did not serve: one line of its log, the last one, and nothing of our inside."""
    assert ended.stdout == ""
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    (line,) = [event for event in events if event["level"] == "critical"]
    assert (line, line["event"], line["code"]) == (events[-1], "start_failed", ended.returncode)
    assert "Traceback" not in ended.stderr
    return str(line["error"])


def _filled(data: Path) -> None:
    """Make a store with messages in its queues and on its timeline, and leave it killed: they are in the WAL."""
    with Daemon(data) as daemon, WireClient(daemon.address) as client:
        _send_many(client, 50)
        daemon.kill()


def _send_many(client: WireClient, count: int, *, delay_ms: int = 3_600_000) -> list[str]:
    """Send ``count`` messages, every other one delayed, and return their ids."""
    later_ms = time.time_ns() // 1_000_000 + delay_ms
    ids = [f"id-{number:05}" for number in range(count)]
    for first in range(0, count, 50):
        batch = [
            a_message(_TOPIC, each, each.encode() * 20, deliver_at_ms=later_ms * (number % 2))
            for number, each in enumerate(ids[first : first + 50])
        ]
        assert client.send(*batch).status.code == wire.OK
    return ids


@contextmanager
def _listener() -> Iterator[str]:
    """Occupy a port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield f"127.0.0.1:{taken.getsockname()[1]}"


# -- not starting -----------------------------------------------------------------------------------------------------


def test_a_second_daemon_on_the_same_directory_is_refused(daemon: Daemon, data: Path) -> None:
    """One line that names the directory and the process that has it, exit code 1; the first one goes on."""
    ended = run_to_end(data, _ANY)
    assert ended.returncode == 1
    assert (
        f"{data} is in use by another process (pid {daemon.pid}) (only one process can use a directory: "
        in _refusal(ended)
    )
    with WireClient(daemon.address) as client:
        assert client.send(a_message(_TOPIC, "still-there")).status.code == wire.OK


def test_an_address_in_use_is_refused(data: Path) -> None:
    """One line that names the address, exit code 1, and nothing was touched: nothing was opened or made for it."""
    with _listener() as address:
        ended = run_to_end(data, address)
        assert ended.returncode == 1
        assert f"{address} is in use by another process" in _refusal(ended)
        assert not data.exists()
        _filled(data)
        there = sorted((path, path.stat().st_mtime_ns) for path in data.rglob("*"))
        assert run_to_end(data, address).returncode == 1
        assert sorted((path, path.stat().st_mtime_ns) for path in data.rglob("*")) == there


def test_a_chosen_metrics_address_in_use_is_refused(data: Path) -> None:
    """Somebody asked for this port: going on without it would be a surprise."""
    with _listener() as address:
        ended = run_to_end(data, _ANY, metrics=address)
    assert ended.returncode == 1
    assert f"{address} is in use by another process (metrics)" in _refusal(ended)


def test_the_default_metrics_port_in_use_is_replaced(data: Path) -> None:
    """Nobody asked for the port: a second daemon on the host takes another, and says so."""
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 9464))
            taken.listen()
        except OSError:
            pass  # it is in use already, which is all that is needed
        with Daemon(data, metrics="") as daemon:
            assert daemon.event("metrics_port_in_use")["instead"] == daemon.metrics_address
            daemon.stop()


def _remove_current(data: Path) -> None:
    (data / "rocksdb" / "CURRENT").unlink()


def _remove_database(data: Path) -> None:
    shutil.rmtree(data / "rocksdb")


def _flip_manifest(data: Path) -> None:
    _flip(next((data / "rocksdb").glob("MANIFEST-*")))


def _flip_log(data: Path) -> None:
    """Damage a WAL record that others follow: not a tail cut short, which a kill may leave."""
    _flip(max((data / "rocksdb").glob("*.log"), key=lambda path: path.stat().st_size))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _garble_marker(data: Path) -> None:
    (data / "CELL").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    "damage", [_remove_current, _remove_database, _flip_manifest, _flip_log, _garble_marker], ids=lambda f: f.__name__
)
def test_a_damaged_store_is_refused_each_time(data: Path, damage: Callable[[Path], None]) -> None:
    """Damage is loud: one line, exit code 1, at the second try as well; it never looks like an empty store."""
    _filled(data)
    damage(data)
    for _ in range(2):
        ended = run_to_end(data, _ANY)
        assert ended.returncode == 1, ended.stderr
        assert str(data) in _refusal(ended)
        assert "'dmq store check' lists the damage" in _refusal(ended)


def test_a_newer_format_is_refused(data: Path) -> None:
    """A store of a newer Rock-DMQ stays as it is; the line says both versions."""
    with Daemon(data) as daemon:
        daemon.stop()
    marker = json.loads((data / "CELL").read_text(encoding="utf-8"))
    (data / "CELL").write_text(json.dumps({**marker, "format_version": 99}), encoding="utf-8")
    ended = run_to_end(data, _ANY)
    assert ended.returncode == 1
    assert "format version 99" in _refusal(ended)
    assert f"knows {FORMAT_VERSION} and older" in _refusal(ended)


def test_a_directory_that_cannot_be_written_is_refused(data: Path) -> None:
    """One line that says so, exit code 1."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere: the same refusal is tested with a file in the way")
    data.mkdir(mode=0o500)
    ended = run_to_end(data, _ANY)
    assert ended.returncode == 1
    assert f"{data} cannot be written" in _refusal(ended)


@pytest.mark.parametrize(
    "options", [("--durability", "maybe"), ("--delay-levels", "1s soon"), ("--queues-per-topic", "0"), ("--nonsense",)]
)
def test_a_bad_configuration_is_a_usage_error(data: Path, options: tuple[str, ...]) -> None:
    """Exit code 2, the option is named, and nothing was created."""
    ended = run_to_end(data, _ANY, *options)
    assert ended.returncode == 2
    said = ended.stderr if options == ("--nonsense",) else _refusal(ended)  # that one is the parser's
    assert options[0] in said
    assert "Traceback" not in ended.stderr
    assert not data.exists()


# -- ending -----------------------------------------------------------------------------------------------------------


def _telemetry(client: WireClient) -> tuple[Any, queue.Queue[Any]]:
    """Open a telemetry stream as a consumer does, and return it once the settings came back."""
    commands: queue.Queue[Any] = queue.Queue()
    settings = wire.Settings(client_type=wire.SIMPLE_CONSUMER)
    settings.subscription.group.name = _GROUP
    commands.put(wire.TelemetryCommand(settings=settings))
    stream = client.open("Telemetry", iter(commands.get, None))
    assert next(stream).settings.subscription.group.name == _GROUP
    return stream, commands


def test_sigterm_ends_open_calls_in_order_and_loses_nothing(daemon: Daemon) -> None:
    """Long polls get a proper empty answer, telemetry streams end, sends are answered or cut; what was OK is kept."""
    accepted: list[str] = []

    def keep_sending(number: int) -> None:
        with WireClient(daemon.address, f"sender-{number}") as sender:
            for turn in range(100_000):
                try:
                    answer = sender.send(a_message(_TOPIC, f"{number}-{turn}"), deadline_s=5)
                except grpc.RpcError:
                    return  # the daemon is gone
                if answer.status.code == wire.OK:
                    accepted.append(f"{number}-{turn}")

    with WireClient(daemon.address) as client, ThreadPoolExecutor(max_workers=20) as pool:
        client.ask("QueryRoute", wire.QueryRouteRequest(topic=wire.Resource(name="silent")))
        polls = [
            pool.submit(client.frames, "ReceiveMessage", a_receive("silent", _GROUP, wait_s=20), deadline_s=30)
            for _ in range(10)
        ]
        stream, commands = _telemetry(client)
        senders = [pool.submit(keep_sending, number) for number in range(2)]
        until("sends are answered", lambda: len(accepted) > 20)
        began_s = time.monotonic()
        daemon.stop()
        took_s = time.monotonic() - began_s
        assert [received_of(poll.result(1)) for poll in polls] == [[]] * 10
        assert list(stream) == [], "the stream ends without an error"
        commands.put(None)
        for sender in senders:
            sender.result(10)
    assert took_s < 5, "well within the grace of 10 s: nothing had to be waited for"
    daemon.restart()
    with WireClient(daemon.address) as client:
        found = client.drain(_TOPIC, _GROUP, len(accepted))
    assert {each.message_id for each in found} >= set(accepted)


def _hold_up(client: WireClient) -> Iterator[wire.ReceiveMessageResponse]:
    """Leave an answer of 8 MiB half read: flow control keeps its call open on the server. Returns the call."""
    for number in range(8):
        assert client.send(a_message("large", f"large-{number}", b"x" * 1_000_000)).status.code == wire.OK
    call: Iterator[wire.ReceiveMessageResponse] = client.begin("ReceiveMessage", a_receive("large", _GROUP))
    assert next(call).status.code == wire.OK
    return call


def test_a_second_sigterm_ends_at_once(data: Path) -> None:
    """Whoever cannot wait for the grace period sends the signal again; the store survives that like any kill."""
    with Daemon(data, "--shutdown-grace", "60s") as daemon, WireClient(daemon.address) as client:
        held = _hold_up(client)  # noqa: F841 - the call ends with its last reference
        daemon.signal(signal.SIGTERM)
        daemon.wait_for("stopping", timeout_s=5)
        began_s = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(5) == -signal.SIGTERM
        assert time.monotonic() - began_s < 2
        daemon.restart()
        assert client.receive("large", _GROUP)


def test_the_grace_period_is_kept(data: Path) -> None:
    """A client that does not read its answer holds the shutdown up for as long as the grace period, and not longer."""
    with Daemon(data, "--shutdown-grace", "1s") as daemon, WireClient(daemon.address) as client:
        held = _hold_up(client)  # noqa: F841 - the call ends with its last reference
        began_s = time.monotonic()
        daemon.stop()
        assert 0.9 < time.monotonic() - began_s < 4


def test_ctrl_c_ends_in_order(daemon: Daemon) -> None:
    """SIGINT is SIGTERM for people."""
    daemon.stop(signal.SIGINT)
    assert daemon.event("stopped")["code"] == 0


# -- coming back ------------------------------------------------------------------------------------------------------


def test_ready_again_quickly_after_sigkill(daemon: Daemon) -> None:
    """5000 messages later, a killed daemon is back after seconds of work, and has them all."""
    with WireClient(daemon.address) as client:
        ids = _send_many(client, 5000, delay_ms=1)
        daemon.kill()
        daemon.restart()
        used = psutil.Process(daemon.pid).cpu_times()
        assert used.user + used.system < 5  # of the processor, whatever else the machine is doing
        assert daemon.event("store_opened")["was_closed"] is False
        found = client.drain(_TOPIC, _GROUP, len(ids))
    assert sorted(each.message_id for each in found) == ids
    daemon.stop()
    daemon.restart()
    assert daemon.event("store_opened")["was_closed"] is True
