"""``bench.inside`` seen from outside: run it, or keep it while its memory and its disk are looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Child:
    """A running ``bench.inside``."""

    def __init__(self, action: str, data: Path, count: int, **options: int | str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.inside", action, str(data), str(count), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> Iterator[dict[str, Any]]:
        """Yield what it says, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def end(self, *, is_killed: bool = False) -> None:
        """Let it end in order, or with SIGKILL."""
        if is_killed:
            self.process.kill()
        self.process.communicate()


def run(action: str, data: Path, count: int, **options: int | str) -> dict[str, Any]:
    """Run an action to its end and return the last thing it said."""
    child = Child(action, data, count, **options)
    found = list(child.said())
    child.end()
    if child.process.returncode or not found:
        raise RuntimeError(f"bench.inside {action} failed with {child.process.returncode}")
    return found[-1]
