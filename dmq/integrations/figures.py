"""Metrics of all processes of an application, because a scrape reaches only one: each writes its own to a shared
folder.

<pid>-<random>.prom    metrics of the process, with ``pid`` as a label; a text file as node_exporter collects them
<pid>-<random>.lock    locked while the process lives
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker_adapter.runtime.log import LibraryLog

EVERY_S: Final = 5.0
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? ", re.MULTILINE)
_NAME: Final = re.compile(r"(?:# \w+ )?(\w+)")

_log = LibraryLog("dmq.integrations")


class SharedFigures:
    """Write the metrics of this process into ``folder`` every few seconds, and read those of all live processes."""

    def __init__(self, folder: Path, render: Callable[[], str]) -> None:
        """Create the folder, and start. ``render`` returns metrics in Prometheus's text format."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._render = folder, render
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = os.open(folder / f"{self._name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._is_closed = threading.Event()
        self._write(self._own())
        threading.Thread(target=self._run, name="dmq-hook-figures", daemon=True).start()

    def close(self) -> None:
        """Remove the metrics of this process from the folder."""
        self._is_closed.set()
        for kind in ("prom", "lock"):
            (self._folder / f"{self._name}.{kind}").unlink(missing_ok=True)
        os.close(self._lock)

    def render(self) -> str:
        """Return the metrics of all live processes; those of others are a few seconds old."""
        return merged([self._own(), *self._of_others()])

    def _own(self) -> str:
        return with_pid(self._render(), os.getpid())

    def _of_others(self) -> Iterable[str]:
        for path in sorted(self._folder.glob("*.prom")):
            if path.stem == self._name:
                continue
            with suppress(FileNotFoundError):  # it has just ended
                if _is_alive(path.with_suffix(".lock")):
                    yield path.read_text(encoding="utf-8")
                else:
                    path.unlink()
                    path.with_suffix(".part").unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._is_closed.wait(EVERY_S):
            try:
                self._write(self._own())
            except Exception as error:  # noqa: BLE001 - for example a full disk: only the figures are late
                _log.warning("metrics_write_failed", folder=str(self._folder), error=f"{type(error).__name__}: {error}")

    def _write(self, text: str) -> None:
        part = self._folder / f"{self._name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(self._folder / f"{self._name}.prom")
        if self._is_closed.is_set():
            (self._folder / f"{self._name}.prom").unlink(missing_ok=True)


def with_pid(text: str, pid: int) -> str:
    """Return metrics with the process id as an additional label."""

    def labelled(sample: re.Match[str]) -> str:
        labels = ",".join([f'pid="{pid}"', *([sample[2]] if sample[2] else [])])
        return f"{sample[1]}{{{labels}}} "

    return _SAMPLE.sub(labelled, text)


def merged(texts: Iterable[str]) -> str:
    """Merge the metrics of several processes into one text, grouped by name."""
    by_name: dict[str, dict[str, None]] = {}
    for text in texts:
        for line in text.splitlines():
            name = _NAME.match(line)
            if name is not None:
                by_name.setdefault(name[1], {})[line] = None  # description lines once
    return "".join(f"{line}\n" for lines in by_name.values() for line in lines)


def _is_alive(lock: Path) -> bool:
    """Return True if a process holds ``lock``. A lock without a holder is removed."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        lock.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)
