"""Commands at a terminal: a process of their own, whose output is a pseudo-terminal of a given width."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

PATIENCE_S = 30.0
LINES = 50

_MARK = "\x1e"  # between the outputs of two commands
_RUN = (
    "import json, sys; from dmq.cli import main\n"
    "for arguments in json.loads(sys.argv[1]):\n"
    f"    main(arguments); sys.stdout.write({_MARK!r}); sys.stdout.flush()\n"
)
# With the terminal as its own, so that Ctrl-C and a resize become signals.
_RUN_ON_ITS_OWN = (
    "import fcntl, sys, termios; from dmq.cli import main; fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.exit(main())"
)


def piped(*arguments: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a ``dmq`` command with pipes for its output and its errors; ``env`` adds to the environment."""
    command = [sys.executable, "-m", "dmq", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})


def at_terminal(commands: Sequence[Sequence[str]], columns: int, *, env: Mapping[str, str]) -> list[str]:
    """Run ``dmq`` commands at a terminal of ``columns``, and return the output of each, without line ends of a tty."""
    ours, theirs = _opened(columns)
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=_environment(env),
    ):
        os.close(theirs)
        written = _all_of(ours)
    os.close(ours)
    return written.decode().replace("\r\n", "\n").split(_MARK)[:-1]


def _all_of(terminal: int) -> bytes:
    """Read until the last process at the terminal has ended; Linux reports that as an error."""
    written = b""
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:
            return written
        if not part:
            return written
        written += part


def _opened(columns: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    _resize(theirs, columns)
    return ours, theirs


def _resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    return {**environment, "TERM": "xterm", **env}


class AtTerminal:
    """A ``dmq`` command that runs at a terminal until it is ended. A context manager: leaving it kills the process."""

    def __init__(self, *arguments: str, columns: int, env: Mapping[str, str]) -> None:
        self._ours, self._theirs = _opened(columns)
        self.modes = termios.tcgetattr(self._theirs)
        self._written = b""
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN_ON_ITS_OWN, *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=_environment(env),
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._theirs)

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 65_536)
            except OSError:
                os.close(self._ours)
                return
            with self._news:
                self._written += part
                self._news.notify_all()

    @property
    def written(self) -> str:
        """All output, without line ends of a tty."""
        return self._written.decode(errors="replace").replace("\r\n", "\n")

    @property
    def screen(self) -> list[str]:
        """The lines of the newest whole screen, without colours."""
        *_, newest = self.written.split("\x1b[H")
        return [line.rstrip() for line in plain(newest).splitlines()]

    def until(self, is_there: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the screen is as wanted, and return it."""
        found: list[str] = []

        def is_wanted() -> bool:
            nonlocal found
            found = self.screen
            return len(found) >= LINES and is_there(found)

        with self._news:
            assert self._news.wait_for(is_wanted, PATIENCE_S), self.written
        return found

    def press(self, keys: str) -> None:
        """Type keys; ``\x03`` is Ctrl-C."""
        os.write(self._ours, keys.encode())

    def resize(self, columns: int) -> None:
        """Give the terminal another width."""
        _resize(self._theirs, columns)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait for the end, assert that the terminal is as it was, and return the exit code."""
        code = self._process.wait(PATIENCE_S)
        assert termios.tcgetattr(self._theirs) == self.modes
        assert self.written.count("\x1b[?1049h") == self.written.count("\x1b[?1049l")
        return code


def plain(text: str) -> str:
    """Output without colours and without controls of the screen."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
