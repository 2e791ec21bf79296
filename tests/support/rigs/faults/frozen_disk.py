"""A file system that can be frozen: ext4 in a file on a loop device. Needs root and loop devices, else a named skip.

A process of its own freezes and thaws it. It thaws at the latest after the time it was given, and as soon as the
process of the test ends, so that a test that fails, hangs or is killed leaves no frozen file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MIB = 1024 * 1024
_FREEZER = """
import select, signal, subprocess, sys
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)  # the end of its input comes as well, and nothing stays frozen
path, seconds = sys.argv[1], float(sys.argv[2])
subprocess.run(["fsfreeze", "--freeze", path], check=True)
try:
    print("frozen", flush=True)
    select.select([sys.stdin], [], [], seconds)
finally:
    subprocess.run(["fsfreeze", "--unfreeze", path], check=True)
"""
_BEATER = """
import sys, threading, time
longest, last = 0.0, time.monotonic()
threading.Thread(target=lambda: (sys.stdin.read(), stop.append(1)), daemon=True).start()
stop = []
while not stop:
    time.sleep(0.005)
    now = time.monotonic()
    longest, last = max(longest, now - last), now
print(longest, flush=True)
"""


class FrozenDisk:
    """The file system at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def frozen(self, seconds_max: float) -> Iterator[None]:
        """Freeze for the time of the context, at most ``seconds_max``."""
        command = [sys.executable, "-c", _FREEZER, str(self.path), str(seconds_max)]
        freezer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert freezer.stdout is not None
        try:
            assert freezer.stdout.readline() == "frozen\n"
            yield
        finally:
            freezer.communicate()
        assert freezer.returncode == 0


@contextmanager
def mounted(folder: Path, size_bytes: int = 192 * _MIB) -> Iterator[FrozenDisk]:
    """Make and mount a file system below ``folder``; skip where that is not possible."""
    missing = [each for each in ("mkfs.ext4", "mount", "umount", "fsfreeze") if shutil.which(each) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a file system can be frozen by root with {', '.join(missing) or 'loop devices'} only")
    image, path = folder / "disk.image", folder / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, timeout=60)
    tried = subprocess.run(
        ["mount", "-o", "loop", str(image), str(path)], check=False, capture_output=True, text=True, timeout=60
    )
    if tried.returncode != 0:
        pytest.skip(f"no loop device to mount a file system: {tried.stderr.strip()}")
    try:
        yield FrozenDisk(path)
    finally:
        unmounted = subprocess.run(["umount", str(path)], check=False, timeout=60)
        if unmounted.returncode != 0:  # a process of the test still uses it: it goes when that ends
            subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=60)


class Pauses:
    """The longest pause of a thread of this process, and of another process that does the same on the same machine."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.elsewhere_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure for the time of the context."""
        other = subprocess.Popen(
            [sys.executable, "-c", _BEATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        is_over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(is_over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.elsewhere_s = float(other.communicate()[0])

    def _beat(self, is_over: threading.Event) -> None:
        last_s = time.monotonic()
        while not is_over.is_set():
            time.sleep(0.005)
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s

    def check(self) -> None:
        """Assert that no thread paused longer than 250 ms, the pauses of the machine itself not counted."""
        assert self.longest_s <= 0.25 + 2 * self.elsewhere_s, (
            f"a thread paused for {self.longest_s:.3f} s, one of another process for {self.elsewhere_s:.3f} s"
        )
