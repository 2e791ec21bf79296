"""The real daemon under a wall clock that is stepped by a year for 0.6 s, followed or held, with kills around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clients.wire.client import Received, WireClient, a_message
from support.effort import drawn
from support.rigs.daemon.process import Daemon
from support.rigs.faults.wall_shim import WallShim

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.fault
YEAR_MS = 365 * 24 * 3_600_000
HOUR_MS = 3_600_000
GLITCH_S = 0.6
DELAY_S = 1.0
PATIENCE_S = 30.0
TOPIC, GROUP = "orders", "workers"


def until(what: str, holds: Callable[[], object]) -> None:
    """Wait for something that happens by itself."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.05)


@contextmanager
def a_daemon(tmp_path: Path, **settings: str) -> Iterator[tuple[Daemon, WallShim]]:
    """A daemon whose clock a test steps."""
    shim = WallShim(tmp_path)
    env = {**os.environ, **shim.environment, **{f"DMQ_{key.upper()}": value for key, value in settings.items()}}
    with Daemon(tmp_path / "data", env=env) as daemon:
        yield daemon, shim


def steps(daemon: Daemon) -> int:
    with AdminClient(daemon.address) as admin:
        return int(admin.clock().steps)


def receive_one(client: WireClient, invisible_s: int) -> Received:
    (found,) = client.receive(TOPIC, GROUP, invisible_s=invisible_s, wait_s=5)
    return found


def send_delayed(client: WireClient, message_id: str) -> None:
    """Send a message that is due ``DELAY_S`` later."""
    delayed = a_message(TOPIC, message_id, properties={"TIMER_DELAY_MS": str(int(DELAY_S * 1000))})
    delayed.system_properties.message_type = wire.DELAY
    assert client.send(delayed).status.code == wire.OK


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_delay_keeps_its_length_through_any_report_of_a_step(tmp_path: Path, processes: str) -> None:
    """Sent over two connections right before and behind a step of an hour, and back: not early, and not stuck."""
    with (
        a_daemon(tmp_path, clock_jump_max="off", processes=processes) as (daemon, shim),
        WireClient(daemon.address, "first") as first,
        WireClient(daemon.address, "second") as second,
    ):
        for turn, ahead_ms in enumerate((HOUR_MS, 0, HOUR_MS, 0)):
            sent_s: dict[str, float] = {}
            for when in ("before", "behind"):
                for number, client in enumerate((first, second)):
                    message_id = f"{when}-{turn}-{number}"
                    sent_s[message_id] = time.monotonic() if when == "behind" else 0.0
                    send_delayed(client, message_id)
                if when == "before":
                    shim.step(ahead_ms)
            until_s = time.monotonic() + PATIENCE_S
            while sent_s:
                assert time.monotonic() < until_s, sent_s
                for each in first.receive(TOPIC, GROUP, wait_s=1):
                    took_s = time.monotonic() - sent_s.pop(each.message_id)
                    assert took_s >= DELAY_S, (each.message_id, took_s)


@pytest.mark.parametrize(
    ("kill_at", "jump_max", "processes"),
    drawn(
        [
            ("never", "off", "1"),
            ("never", "off", "2"),
            ("never", "10m", "1"),
            ("never", "10m", "2"),
            ("ahead", "off", "1"),
            ("ahead", "10m", "1"),
            ("ahead", "10m", "2"),
            ("back", "off", "1"),
            ("back", "off", "2"),
            ("back", "10m", "1"),
        ],
        2,
    ),
)
def test_a_glitch_leaves_nothing_stuck(tmp_path: Path, jump_max: str, kill_at: str, processes: str) -> None:
    """A lease that was changed, and a delay of a second, both begun while the clock was a year ahead."""
    with a_daemon(tmp_path, clock_jump_max=jump_max, processes=processes) as (daemon, shim):
        with WireClient(daemon.address) as client:
            assert client.send(a_message(TOPIC, "leased")).status.code == wire.OK
            leased = receive_one(client, 10)
            shim.step(YEAR_MS)
            until("the step is seen", lambda: steps(daemon) == 1)
            assert client.change_invisible(TOPIC, GROUP, leased, 10_000).status.code == wire.OK
            send_delayed(client, "delayed")
        if kill_at == "ahead":
            daemon.kill()
            daemon.restart()
        time.sleep(GLITCH_S)
        if kill_at == "back":
            daemon.kill()
        shim.step(0)
        if kill_at == "back":
            daemon.restart()
        with WireClient(daemon.address) as client:
            found = {each.message_id: each for each in client.drain(TOPIC, GROUP, 2, within_s=PATIENCE_S)}
        assert sorted(found) == ["delayed", "leased"]


def test_hand_over_waits_beyond_a_large_step_until_it_is_accepted(tmp_path: Path) -> None:
    """What is due tomorrow is not handed over because a clock says that it is next year; an operator may say so."""
    with a_daemon(tmp_path) as (daemon, shim), AdminClient(daemon.address) as admin:
        with WireClient(daemon.address) as client:
            at_ms = int(time.time() * 1000) + 24 * 3_600_000
            assert client.send(a_message(TOPIC, "tomorrow", deliver_at_ms=at_ms)).status.code == wire.OK
            shim.step(YEAR_MS)
            until("the step is seen", lambda: admin.clock().is_held)
            assert client.receive(TOPIC, GROUP, wait_s=1) == []
            daemon.kill()
            daemon.restart()
            assert admin.clock().is_held
        with WireClient(daemon.address) as client:
            assert client.receive(TOPIC, GROUP, wait_s=1) == []
            answer = admin.accept_clock("a test says so")
            assert (answer.has_changed, answer.clock.is_held, answer.clock.is_steady) == (True, False, True)
            daemon.kill()
            daemon.restart()
        clock = admin.clock()
        assert (clock.is_held, clock.is_steady, clock.steps) == (False, True, 0)
        with WireClient(daemon.address) as client:
            assert [each.message_id for each in client.receive(TOPIC, GROUP, wait_s=5)] == ["tomorrow"]
        assert "clock_held" in daemon.log()
        assert "clock_accepted" in daemon.log()
