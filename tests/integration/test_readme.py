"""The Python example of the README does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.daemon import Daemon

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_python_example_works(daemon: Daemon, tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert example.count("127.0.0.1:8081") == 1
    done = subprocess.run(
        [sys.executable, "-c", example.replace("127.0.0.1:8081", daemon.address)],
        env=os.environ | {"HOME": str(tmp_path)},  # the client keeps a log file there
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[0-9A-F]{34} hello, later\n", done.stdout)
