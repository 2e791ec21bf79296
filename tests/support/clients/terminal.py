"""Commands at a terminal: a process of their own, whose output is a pseudo-terminal of a given width."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence

_MARK = "\x1e"  # between the outputs of two commands
_RUN = (
    "import json, sys; from dmq.cli import main\n"
    "for arguments in json.loads(sys.argv[1]):\n"
    f"    main(arguments); sys.stdout.write({_MARK!r}); sys.stdout.flush()\n"
)


def at_terminal(commands: Sequence[Sequence[str]], columns: int, *, env: Mapping[str, str]) -> list[str]:
    """Run ``dmq`` commands at a terminal of ``columns``, and return the output of each, without line ends of a tty."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm", **env},
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
