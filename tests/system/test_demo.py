"""``dmq demo`` as a user runs it, only shorter: real daemon, real kill, the official client."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.official.builds import VERSITYGW, what_is_missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        importlib.util.find_spec("rocketmq") is None, reason="the official Python client is not installed (extra: demo)"
    ),
]

DEMO = [sys.executable, "-m", "dmq", "demo", "--messages", "36", "--seconds", "2"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The demo's folder is made in ``tmp_path``, so that what is left behind can be seen."""
    return os.environ | {"TMPDIR": str(tmp_path)}


def assert_nothing_lost(done: subprocess.CompletedProcess[str], kill: str) -> None:
    """Check the result of a demo whose line about the kill matches ``kill``."""
    assert done.returncode == 0, done.stdout + done.stderr
    figures = dict(re.findall(r"^(accepted|delivered|lost|duplicates|early) +([0-9,]+)", done.stdout, re.MULTILINE))
    assert figures.keys() == {"accepted", "delivered", "lost", "duplicates", "early"}
    assert (figures["accepted"], figures["delivered"]) == ("36", "36")
    assert (figures["lost"], figures["early"]) == ("0", "0")
    assert re.search(
        r"^lateness +p50 +p99 +max +at the consumer\n +[0-9,]+ ms +[0-9,]+ ms +[0-9,]+ ms", done.stdout, re.MULTILINE
    )
    assert re.search(rf"^kill +SIGKILL{kill}$", done.stdout, re.MULTILINE), done.stdout
    assert "level 18 is 1s800ms here" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.rstrip().endswith("OK: nothing lost, nothing early")
    assert len(done.stdout.splitlines()) < 40


def test_a_killed_daemon_loses_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert_nothing_lost(done, "; down for [0-9.]+ s, [0-9.]+ s of it the new start")
    assert list(tmp_path.iterdir()) == [], "data is left behind"


@pytest.mark.timeout(200)
def test_a_standby_replaces_a_lost_daemon(tmp_path: Path, environment: dict[str, str]) -> None:
    """The data of the killed daemon is deleted. The copy is on a real S3 server where one can be built."""
    is_server = not what_is_missing(VERSITYGW)
    if is_server:
        environment["PATH"] = f"{VERSITYGW.cache}:{environment['PATH']}"
    demo = [*DEMO, "--failover"]
    done = subprocess.run(demo, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert_nothing_lost(done, r", data deleted; standby served after [0-9.]+ s \(lease 5 s\)")
    assert ("second copy in the S3 server" in done.stdout) == is_server
    assert _processes_at_home_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def _processes_at_home_in(folder: Path) -> list[int]:
    """The processes whose HOME is below ``folder``: the demo's children, orphans too."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_child = f"HOME={folder}/".encode() in each.read_bytes()
        except OSError:  # it has just ended
            continue
        if is_child:
            found.append(int(each.parent.name))
    return found


def test_an_interrupt_ends_every_process(tmp_path: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        line = demo.stdout.readline()
        assert "daemon serving at" in line
        (folder,) = tmp_path.iterdir()
        daemon = int((folder / "data" / "LOCK").read_text())
        assert daemon in _processes_at_home_in(tmp_path)
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert rest.rstrip().endswith("interrupted; the processes are ended")
    assert _processes_at_home_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_demo_itself_never_imports_the_official_client() -> None:
    code = "import sys, dmq.demo.program; sys.exit('rocketmq' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
