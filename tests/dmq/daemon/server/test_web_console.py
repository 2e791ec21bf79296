"""The console next to a daemon: it comes back after its end, ends with the daemon, and never disturbs it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from structlog.testing import capture_logs
from support.rigs.daemon.process import START_S_MAX, Daemon, run_to_end

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.runtime.extras import ExtraMissing
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.config.settings import CONSOLE_DEFAULT, DaemonConfig
from dmq.config.units import Address
from dmq.daemon.server.web import require_web, start_web

pytestmark = pytest.mark.integration


def test_a_console_is_started_again_and_ends_with_its_daemon(tmp_path: Path) -> None:
    """After a kill of the console the daemon serves on and starts another; after its own kill no console is left."""
    with Daemon(tmp_path / "data", env={**os.environ, "DMQ_CONSOLE": "127.0.0.1:0"}) as daemon:
        url = daemon.wait_for("console_serving", timeout_s=START_S_MAX)["url"]
        assert "Serving" in page(url)
        (first,) = consoles(daemon)
        first.kill()
        first.wait(START_S_MAX)
        assert "Serving" in page(url)  # the socket stays open: the request waits for the next process
        assert daemon.event("console_ended")["reason"] == "exit code -9"
        with AdminClient(daemon.address, timeout_s=START_S_MAX) as client:
            status = client.status()
        assert (status.state, status.console) == (wire.SERVING, url)
        (second,) = consoles(daemon)
        daemon.kill()
        second.wait(START_S_MAX)
        daemon.restart()
        assert "Serving" in page(daemon.wait_for("console_serving", timeout_s=START_S_MAX)["url"])
        (third,) = consoles(daemon)
        daemon.stop()
        third.wait(START_S_MAX)


def test_an_automatic_console_uses_another_port_if_its_own_is_taken(tmp_path: Path) -> None:
    """So that a second daemon on a host starts, and logs the address of its console."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(CONSOLE_DEFAULT)
            other.listen()
        except OSError:
            pass  # it is taken by another process of this host
        with Daemon(tmp_path / "data", env={**os.environ, "DMQ_CONSOLE": "auto"}) as daemon:
            url = daemon.wait_for("console_serving", timeout_s=START_S_MAX)["url"]
            assert str(CONSOLE_DEFAULT) in daemon.event("web_port_in_use")["reason"]
            assert str(CONSOLE_DEFAULT) not in url
            assert "Serving" in page(url)


def test_a_configured_address_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon whose operator chose the port of the console does not serve it elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("DMQ_CONSOLE", address)
        done = run_to_end(tmp_path / "data", "127.0.0.1:0")
    assert done.returncode == 1
    assert f"{address} is in use by another process (console)" in done.stderr


def test_without_its_extra_an_automatic_console_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon serves without it, and logs the command that installs it; a configured one is an error."""
    monkeypatch.setitem(sys.modules, "jinja2", None)  # as if it were not installed
    require_web(DaemonConfig())
    with pytest.raises(ExtraMissing, match=r"rock-dmq\[console\]"):
        require_web(DaemonConfig(console=Address("127.0.0.1", 0)))

    async def started() -> list[psutil.Process]:
        before = psutil.Process().children()
        async with AsyncExitStack() as stack:
            await start_web(DaemonConfig(), 1, SystemClock(), stack)
            return [each for each in psutil.Process().children() if each not in before]

    with capture_logs() as logged:
        assert asyncio.run(started()) == []
    (told,) = [each for each in logged if each["event"] == "web_not_installed"]
    assert (told["setting"], "pip install 'rock-dmq[console]'" in told["reason"]) == ("console", True)


def page(url: str) -> str:
    """Return the overview."""
    with urlopen(url, timeout=START_S_MAX) as answer:
        text: str = answer.read().decode()
    return text


def consoles(daemon: Daemon) -> list[psutil.Process]:
    """Return the console processes of the daemon."""
    return [each for each in psutil.Process(daemon.pid).children() if "dmq.console.serving" in each.cmdline()]
