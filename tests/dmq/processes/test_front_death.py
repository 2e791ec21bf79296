"""A front that dies takes nothing with it but its connections: what the store process handed to it comes back."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from support.clients.wire.client import WireClient, a_message, a_receive
from support.rigs.daemon.process import Daemon

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.fault
_PATIENCE_S = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Two fronts. The first connection is the first one's, the second the other's."""
    with Daemon(tmp_path / "data", "--processes", "2", metrics="127.0.0.1:0") as daemon:
        yield daemon


def _wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it never happened"
        time.sleep(0.02)


def _leases(daemon: Daemon) -> int:
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=_PATIENCE_S) as answer:
        (line,) = (line for line in answer.read().decode().splitlines() if line.startswith("dmq_leases "))
    return int(float(line.split()[1]))


def _polls(daemon: Daemon) -> int:
    with AdminClient(daemon.address) as admin:
        return sum(quota.used for quota in admin.quotas() if quota.quota == "polls")


@pytest.mark.parametrize("is_renewed", [False, True], ids=["simple", "push"])
def test_messages_delivered_by_a_dead_front_come_back_at_once(daemon: Daemon, is_renewed: bool) -> None:
    """To the next consumer of the group, as the next attempt, and long before it would have become visible again."""
    first, _ = daemon.event("listening")["fronts"]
    receive = a_receive("orders", "billing", invisible_s=3600, wait_s=50)
    if is_renewed:
        receive.auto_renew = True
        receive.ClearField("invisible_duration")
    with WireClient(daemon.address, "lost") as lost, WireClient(daemon.address, "other") as other:
        for number, client in enumerate((lost, other)):  # from here on each has its connection
            assert client.send(a_message("elsewhere", f"other-{number}")).status.code == wire.OK
        waiting = lost.begin("ReceiveMessage", receive)
        _wait_until(lambda: _polls(daemon) > 0)
        os.kill(first, signal.SIGSTOP)  # it takes the message from the store process, and never gives it to its client
        assert other.send(a_message("orders", "m-1")).status.code == wire.OK
        _wait_until(lambda: _leases(daemon) == 1)
        os.kill(first, signal.SIGKILL)
        (came,) = other.drain("orders", "billing", 1, within_s=_PATIENCE_S)
        assert (came.message_id, came.attempt) == ("m-1", 2)
        with pytest.raises(grpc.RpcError) as ended:
            list(waiting)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert daemon.is_running


def test_a_front_opens_nothing_of_the_store(daemon: Daemon) -> None:
    """Neither by itself nor from its parent: a message that came through it was written by the other process."""
    with WireClient(daemon.address) as client:
        assert client.send(a_message("orders", "m-1")).status.code == wire.OK
    assert _files_below(daemon.pid, daemon.data)
    for pid in daemon.event("listening")["fronts"]:
        assert _files_below(pid, daemon.data) == []


def _files_below(pid: int, folder: Path) -> list[str]:
    process = psutil.Process(pid)
    opened = [each.path for each in process.open_files()] + [each.path for each in process.memory_maps()]
    return [path for path in opened if path.startswith(f"{folder}{os.sep}")]


def test_an_end_in_order_costs_no_attempt(daemon: Daemon) -> None:
    """What a push consumer was given just before a restart comes again as it would without fronts: the same attempt."""
    receive = a_receive("orders", "billing", wait_s=10)
    receive.auto_renew = True
    receive.ClearField("invisible_duration")
    with WireClient(daemon.address, "before") as before:
        assert before.send(a_message("orders", "m-1")).status.code == wire.OK
        (given,) = [each for each in before.begin("ReceiveMessage", receive) if each.HasField("message")]
        assert given.message.system_properties.delivery_attempt == 1
    daemon.stop()
    daemon.start()
    with WireClient(daemon.address, "behind") as behind:
        (came,) = behind.drain("orders", "billing", 1, within_s=_PATIENCE_S)
    assert (came.message_id, came.attempt) == ("m-1", 1)
