"""The Python examples of the README do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.daemon import Daemon
from support.wire_client import WireClient, a_message

from dmq import AdminClient

README = Path(__file__).resolve().parents[2] / "README.md"


def run(number: int, daemon: Daemon, tmp_path: Path, before: str = "") -> str:
    """Run an example of the page and return what it prints."""
    found = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    example = found[number]
    assert (len(found), example.count("127.0.0.1:8081")) == (3, 1)
    done = subprocess.run(
        [sys.executable, "-c", before + example.replace("127.0.0.1:8081", daemon.address)],
        env=os.environ | {"HOME": str(tmp_path)},  # the client keeps a log file there
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_works(daemon: Daemon, tmp_path: Path) -> None:
    """A delayed message, sent and received."""
    assert re.fullmatch(r"[0-9A-F]{34} hello, later\n", run(0, daemon, tmp_path))


def test_the_example_of_a_schedule_works(daemon: Daemon, tmp_path: Path) -> None:
    """A message recurs; made again it is the same schedule."""
    assert "is_new: true" in run(1, daemon, tmp_path)
    assert "is_new" not in run(1, daemon, tmp_path)
    with AdminClient(daemon.address) as admin:
        assert (admin.schedule("tick").interval_ms, admin.schedule("tick").state) == (30_000, "waiting")


def test_the_example_of_a_change_works(daemon: Daemon, tmp_path: Path) -> None:
    """A message that waits is given another time."""
    with AdminClient(daemon.address) as admin:
        at_ms = admin.status().now_ms + 3_600_000
        with WireClient(daemon.address) as client:
            client.send(a_message("orders", "01" * 17, deliver_at_ms=at_ms))
        told = run(2, daemon, tmp_path, before=f"message_id = {'01' * 17!r}\n")
        assert "outcome: DONE" in told
        assert admin.message("orders", "01" * 17).deliver_at_ms == 1_798_761_600_000
