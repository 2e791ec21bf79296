"""What can be known before a start is said before the store is touched; and files that are read while it serves."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from support.rigs.daemon.process import START_S_MAX, Daemon, run_command

pytestmark = pytest.mark.integration
_KEYS = '[keys.shop]\nsecret = "s"\nadmin = true\n'


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of access keys that is right."""
    path = tmp_path / "keys.toml"
    path.write_text(_KEYS, encoding="utf-8")
    path.chmod(0o600)
    return path


def test_all_faults_are_reported_by_both_and_nothing_is_touched(tmp_path: Path) -> None:
    """``dmq config check`` says in lines what ``dmq serve`` ends with in one, each with 1; the folder is as it was."""
    (tmp_path / "file").touch()
    wrong = "data = 'file/data'\nacl = 'no.toml'\ntls_certificate = 'no.pem'\nlisten = '192.0.2.1:7'\n"
    (tmp_path / "dmq.toml").write_text(f"{wrong}log_format = 'json'\n", encoding="utf-8")
    there = sorted(tmp_path.rglob("*"))
    checked = run_command("config", "check", cwd=tmp_path)
    problems = checked.stdout.splitlines()
    assert (checked.returncode, len(problems)) == (1, 4), checked
    served = run_command("serve", cwd=tmp_path)
    last = json.loads(served.stderr.splitlines()[-1])
    assert (served.returncode, last["event"]) == (1, "start_failed"), served
    assert last["error"] == "; ".join(problems)
    assert sorted(tmp_path.rglob("*")) == there


def test_a_start_on_an_almost_full_disk_is_logged(tmp_path: Path) -> None:
    """Sends are refused from the beginning, and the log gives the reason and both figures."""
    env = {**os.environ, "DMQ_DISK_LOW_WATER_BYTES": "1024TiB"}
    with Daemon(tmp_path / "data", env=env, processes=1) as daemon:
        told = daemon.event("disk_low_sends_refused")
        assert (told["level"], told["low_water_bytes"]) == ("warning", 2**50)
        assert 0 < told["free_bytes"] < 2**50


def test_the_trail_of_a_disk_that_is_away_keeps_no_daemon_from_serving(tmp_path: Path) -> None:
    """The check says it; the daemon serves, and its export tells it."""
    (tmp_path / "file").touch()
    data, trail = tmp_path / "data", tmp_path / "file" / "trail"
    checked = run_command("config", "check", "--data", str(data), "--trail", str(trail), cwd=tmp_path)
    assert (checked.returncode, "directory of trail" in checked.stdout) == (1, True), checked
    with Daemon(data, "--trail", str(trail)) as daemon:
        daemon.stop()


def test_a_check_next_to_the_daemon_skips_its_ports(tmp_path: Path) -> None:
    """So it can be asked before a restart; to anybody else the port is taken."""
    data = tmp_path / "data"
    with Daemon(data) as daemon:
        options = ("config", "check", "--listen", daemon.address)
        beside = run_command(*options, "--data", str(data), "-o", "json", cwd=tmp_path)
        assert json.loads(beside.stdout) == {"is_good": True, "problems": [], "pid": daemon.pid, "cluster": []}
        other = run_command(*options, "--data", str(tmp_path / "other"), cwd=tmp_path)
        assert (other.returncode, "is in use by another process" in other.stdout) == (1, True), other
        daemon.stop()
    after = run_command(*options, "--data", str(data), cwd=tmp_path)
    assert (after.returncode, after.stdout) == (0, "a daemon can start with these settings\n")


def test_a_connection_that_was_closed_is_no_taken_port(tmp_path: Path) -> None:
    """What the system keeps of connections after the end of a daemon is in nobody's way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            server.accept()[0].close()
            client.recv(1)
    checked = run_command("config", "check", "--listen", f"127.0.0.1:{address[1]}", cwd=tmp_path)
    assert checked.returncode == 0, checked


def test_settings_are_shown_with_their_sources(tmp_path: Path) -> None:
    """Flag, variable, file, default; secrets are stars."""
    (tmp_path / "dmq.toml").write_text("queues_per_topic = 3\nbroker_name = 'file'\n", encoding="utf-8")
    env = {"DMQ_BROKER_NAME": "variable", "DMQ_TRAIL_KEEP": "2d"}
    told = run_command("config", "show", "--trail-every", "5s", "-o", "json", cwd=tmp_path, env=env)
    found = json.loads(told.stdout)
    assert found["trail_every"] == {"value": "5s", "source": "--trail-every"}
    assert found["broker_name"] == {"value": "variable", "source": "DMQ_BROKER_NAME"}
    assert found["queues_per_topic"] == {"value": 3, "source": "dmq.toml"}
    assert found["log_level"] == {"value": "info", "source": "default"}
    table = run_command("config", "show", "--source", cwd=tmp_path, env=env).stdout.splitlines()
    assert table[0].split() == ["SETTING", "VALUE", "SOURCE"]
    assert ["trail_keep", "2d", "DMQ_TRAIL_KEEP"] in [line.split() for line in table]
    wrong = run_command("config", "show", "--trail-every", "never", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_files_that_become_invalid_are_reported_at_once(tmp_path: Path, keys: Path) -> None:
    """Nobody calls: the log says it, the status as well; what was right before counts."""
    with Daemon(tmp_path / "data", "--acl", str(keys)) as daemon:
        certificate = tmp_path / "data" / "tls" / "certificate.pem"
        keys.write_text("no key", encoding="utf-8")
        assert str(keys) in daemon.wait_for("access_keys_load_failed", timeout_s=START_S_MAX)["error"]
        certificate.write_text("no certificate", encoding="utf-8")
        assert str(certificate) in daemon.wait_for("certificate_load_failed", timeout_s=START_S_MAX)["error"]
        options = ("--access-key", "shop", "status", "-a", daemon.address, "-o", "json")
        status = run_command(*options, env={"DMQ_SECRET_KEY": "s"})
        assert status.returncode == 0, status
        reason = json.loads(status.stdout)["state_reason"]
        assert "the access keys before it count" in reason
        assert "the one before it is used" in reason
        daemon.stop()


def test_a_new_store_is_announced_and_can_be_refused(tmp_path: Path) -> None:
    """Danger: a daemon whose volume is not mounted opened an empty store and said nothing."""
    data = tmp_path / "data"
    refused = run_command("serve", "--data", str(data), "--must-exist", cwd=tmp_path)
    assert (refused.returncode, "contains no store, and must_exist is set" in refused.stderr) == (1, True), refused
    assert not data.exists()
    with Daemon(data) as daemon:
        assert daemon.event("store_created")["path"] == str(data)
        assert f"NEW: an empty store was created at {data}" in shown(daemon)
        daemon.stop()
    with Daemon(data, "--must-exist") as daemon:
        assert not daemon.events("store_created")
        assert "NEW" not in shown(daemon)


def shown(daemon: Daemon) -> str:
    """What ``dmq status`` shows, on one line."""
    status = run_command("--address", daemon.address, "status", env={"COLUMNS": "1000"})
    return " ".join(status.stdout.split())
