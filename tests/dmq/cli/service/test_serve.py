"""Starting the daemon and the demo: flags become configuration, failures one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from support.rigs.commands.fake_admin_client import run_dmq as run

from dmq.config.settings import DaemonConfig
from dmq.errors import StoreLocked


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DaemonConfig]:
    """Stands in for the daemon; remembers its configurations and ends with 0."""
    monkeypatch.chdir(tmp_path)
    configurations: list[DaemonConfig] = []

    def serve(config: DaemonConfig, _: Mapping[str, str]) -> int:
        configurations.append(config)
        return 0

    daemon = ModuleType("dmq.daemon")
    monkeypatch.setattr(daemon, "run", serve, raising=False)
    monkeypatch.setitem(sys.modules, "dmq.daemon", daemon)
    return configurations


def test_serve_needs_no_flag(served: list[DaemonConfig]) -> None:
    """One command, no configuration."""
    assert run("serve").exit_code == 0
    assert served == [DaemonConfig()]
    assert not served[0].metrics_listen_is_explicit


def test_serve_passes_its_flags_on(served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag is a key of the configuration, and beats the environment."""
    monkeypatch.setenv("DMQ_BROKER_NAME", "variable")
    flags = {
        "data": "d",
        "listen": "[::1]:0",
        "metrics_listen": "off",
        "processes": "2",
        "durability": "process",
        "delay_levels": "1s 2s",
        "delay_max": "1d",
        "queues_per_topic": "2",
        "group_start": "latest",
        "idempotency_window": "1m",
        "disk_low_water_bytes": "1MiB",
        "shutdown_grace": "1s",
        "broker_name": "flag",
        "log_level": "debug",
        "log_format": "json",
    }
    arguments = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]
    assert run("serve", *arguments).exit_code == 0
    numbers = {"processes": 2, "queues_per_topic": 2, "disk_low_water_bytes": 2**20}
    assert served[0].shown() == DaemonConfig().shown() | flags | numbers


def test_serve_reads_the_file_it_is_given(served: list[DaemonConfig]) -> None:
    """By flag or by variable."""
    with open("a.toml", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("queues_per_topic = 3\n")
    assert run("serve", "--config", "a.toml").exit_code == 0
    assert run("serve", env={"DMQ_CONFIG": "a.toml"}).exit_code == 0
    assert [config.queues_per_topic for config in served] == [3, 3]


def test_a_wrong_configuration_is_a_usage_error_with_a_line_per_fault(served: list[DaemonConfig]) -> None:
    """Nothing is started."""
    result = run("serve", "--listen", "x", "--durability", "maybe", "--log-format", "console")
    assert (result.exit_code, result.stdout, served) == (2, "", [])
    assert len(result.stderr.splitlines()) == 2
    assert all(line.startswith("dmq: --") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StoreLocked("dmq-data is in use by process 7"), "dmq: dmq-data is in use by process 7\n"),
        (PermissionError(13, "Permission denied", "dmq-data"), "dmq: [Errno 13] Permission denied: 'dmq-data'\n"),
    ],
)
def test_a_daemon_that_cannot_start_is_one_line(
    served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """Exit code 1, no traceback."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(sys.modules["dmq.daemon"], "run", fail)
    result = run("serve")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", text)


def test_the_exit_code_of_the_daemon_is_ours(served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that ends because its storage failed ends the command likewise."""
    monkeypatch.setattr(sys.modules["dmq.daemon"], "run", lambda *_: 1)
    assert run("serve").exit_code == 1


def test_interrupting_ends_with_130(served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells have it."""

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["dmq.daemon"], "run", interrupt)
    assert run("serve").exit_code == 130


def test_demo_passes_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code says whether anything was lost."""
    asked: list[dict[str, object]] = []

    def play(**flags: object) -> int:
        asked.append(flags)
        return 1

    demo = ModuleType("dmq.demo")
    monkeypatch.setattr(demo, "run", play, raising=False)
    monkeypatch.setitem(sys.modules, "dmq.demo", demo)
    assert run("demo", "--messages", "5", "--seconds", "2", "--no-kill").exit_code == 1
    assert asked == [{"messages": 5, "seconds": 2.0, "keep_data": False, "kill": False, "failover": False}]


def test_no_variable_of_ours_is_set() -> None:
    """The environment is clean, except for the form that this worker runs (``support.forms``)."""
    assert not [name for name in os.environ if name.startswith("DMQ_") and name != "DMQ_COMPILED"]
