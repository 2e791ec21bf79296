"""The console next to a daemon: it comes back after its end, ends with the daemon, and never disturbs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from support.rigs.daemon import START_S_MAX, Daemon, free_port

from dmq.admin import admin_v1 as wire
from dmq.admin.client.client import AdminClient
from dmq.config.settings import ConfigError, load

pytestmark = pytest.mark.integration


def test_a_console_is_started_again_and_ends_with_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill of the console the daemon serves on and starts another; after its own kill no console is left."""
    monkeypatch.setenv("DMQ_CONSOLE", f"127.0.0.1:{free_port()}")
    with Daemon(tmp_path / "data") as daemon:
        url = daemon.wait_for("console_serving", timeout_s=START_S_MAX)["url"]
        with urlopen(url, timeout=START_S_MAX) as page:
            assert "Serving" in page.read().decode()
        (first,) = consoles(daemon)
        first.kill()
        wait_until(lambda: len(daemon.events("console_serving")) == 2)
        assert daemon.event("console_ended")["reason"] == "exit code -9"
        with urlopen(url, timeout=START_S_MAX) as page:
            assert "Serving" in page.read().decode()
        with AdminClient(daemon.address, timeout_s=START_S_MAX) as client:
            assert client.status().state == wire.SERVING
        (second,) = consoles(daemon)
        daemon.kill()
        second.wait(START_S_MAX)
        daemon.restart()
        daemon.wait_for("console_serving", timeout_s=START_S_MAX)
        (third,) = consoles(daemon)
        daemon.stop()
        third.wait(START_S_MAX)


def test_a_taken_port_is_logged_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon serves without a console, and names the address."""
    with Daemon(tmp_path / "other") as other:
        monkeypatch.setenv("DMQ_CONSOLE", other.address)
        with Daemon(tmp_path / "data") as daemon:
            reason = daemon.wait_for("console_ended", timeout_s=START_S_MAX)["reason"]
            assert f"cannot listen on {other.address}" in reason
            assert daemon.is_running


@pytest.mark.parametrize("address", ["0.0.0.0:8082", "10.0.0.1:8082", "console.example:8082", "8082"])
def test_a_console_has_a_loopback_address(address: str) -> None:
    """Others could use it without an access key."""
    with pytest.raises(ConfigError, match="console"):
        load({"console": address})
    assert load({"console": "off"}).console is None


def consoles(daemon: Daemon) -> list[psutil.Process]:
    """Return the console processes of the daemon."""
    return [each for each in psutil.Process(daemon.pid).children() if "console" in each.cmdline()]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return once it is so."""
    until_s = time.monotonic() + START_S_MAX
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)
