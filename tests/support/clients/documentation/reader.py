"""A reader of the documentation: he has a folder of his own, and does in it what a page says, block after block.

What stands on a page is taken as it is, but for what would leave his folder: the address of the daemon is one that is
free, and absolute paths lie below the folder. ``dmq`` is the real command; it is a fork of a process that has imported
it where that makes no difference (``support.rigs.commands.forked``). ``pip install`` of this project installs nothing:
it looks whether there are such extras, and tests of the wheel install them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.clients.documentation.pages import ROOT, Block, commands
from support.rigs.commands import forked
from support.rigs.commands.forked import Forked
from support.rigs.daemon.process import START_S_MAX, STOP_S_MAX, free_port
from support.rigs.daemon.processes import NAME as PROCESSES
from support.rigs.daemon.processes import processes_of, said_for_all

DOCUMENTED = "127.0.0.1:8081"
_COMMAND_S_MAX = 100
_ID = re.compile(r"\b[0-9A-F]{34}\b")
_AWAY = r"\d+[dhms](?: \d+[hms])?"
_TIME = re.compile(rf"\b\d{{4}}-\d\d-\d\dT[\d:.]+Z|\bin {_AWAY}\b|\b{_AWAY} ago\b|\bnow\b")
# What ``dmq`` on the path is: it hands its words and its files to this process, which forks.
_DMQ = """\
#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as reader:
    reader.connect({address!r})
    asked = json.dumps({{"arguments": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}).encode()
    socket.send_fds(reader, [len(asked).to_bytes(4)], [0, 1, 2])
    reader.sendall(asked)
    sys.exit(int(reader.recv(16)))
"""
_PIP = """\
#!/bin/sh
for word in "$@"; do case $word in
    install|-*) ;;
    rock-dmq|rock-dmq\\[*\\]) for extra in $(echo "$word" | sed 's/rock-dmq//; s/[][,]/ /g'); do
        case " {extras} " in *" $extra "*) ;; *) echo "no extra $extra" >&2; exit 1;; esac; done ;;
    *) echo "not of this project: $word" >&2; exit 1;;
esac; done
"""


class Reader:
    """A context manager: leaving it ends the daemon that a page started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.daemon: Forked | subprocess.Popen[bytes] | None = None
        self.said: list[str] = []  # by each shell block so far
        self.names: dict[str, Any] = {}  # of the Python blocks that are pieces of one program
        self.typed = ""  # what the reader types when a command asks
        self.instead = {DOCUMENTED: self.address}  # of what stands on the page
        self.env = {
            **os.environ,
            "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "DMQ_ADDRESS": self.address,
            "DMQ_LISTEN": self.address,
            "DMQ_METRICS_LISTEN": "off",
            "DMQ_CONSOLE": "off",
            "DMQ_LOG_FORMAT": "json",
            PROCESSES: str(processes_of({}) if said_for_all() else 1),  # pages show what one process says
        }
        self._forks = self._equip()

    def _equip(self) -> _Forks | None:
        """Put what pages say that is installed where they say."""
        forks, bin_ = _Forks(), self.folder / ".venv" / "bin"
        bin_.mkdir(parents=True)
        for name, text in (
            ("dmq", _DMQ.format(python=sys.executable, address=forks.address)),
            ("pip", _PIP.format(extras=" ".join(_extras()))),
            ("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'),
        ):
            (bin_ / name).write_text(text, encoding="utf-8")
            (bin_ / name).chmod(0o755)
        self.env |= {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder / ".config")}
        return forks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.daemon is not None:
            self.stop(signal.SIGKILL)
        if self._forks is not None:
            self._forks.close()

    # -- what stands on a page ----------------------------------------------------------------------------------------

    def do(self, block: Block, *, is_piece: bool) -> None:
        """Do what a block says."""
        text = self.mine(block.text)
        match block.language:
            case "sh" if (options := _served(text)) is not None:
                self.serve(*options)
            case "sh" | "text" if block.has_output:
                for each in commands(block):
                    self._see(self.mine(each.text), each.prints)
            case "sh":
                self.shell(text)
            case "python" if is_piece:
                exec(compile(text, f"{block.page}, line {block.line}", "exec"), self.names)
            case "python" if named := re.match(r"# ([\w-]+\.py)\n", text):
                (self.folder / named[1]).write_text(text, encoding="utf-8")  # a command after it runs it
            case "python":
                self.said.append(self._ran([sys.executable, "-c", text]))
            case "toml" if named := re.match(r"# ([\w-]+\.toml)\n", text):
                path = self.folder / named[1]
                path.write_text(text, encoding="utf-8")
                path.chmod(0o600)
            case _:
                raise AssertionError(
                    f"{block.page}, line {block.line}: no reader knows what to do with {block.first!r}"
                )

    def shell(self, text: str) -> str:
        """Run shell commands to their end; each is to succeed. Returns what they print."""
        self.said.append(self._ran(["sh", "-e", "-c", text]))
        return self.said[-1]

    def serve(self, *options: str) -> None:
        """Start the daemon with these options, and return once it serves."""
        assert self.daemon is None, "it runs already"
        read, write = os.pipe()
        with Path(os.devnull).open("r+b") as nothing:
            fds = nothing.fileno(), nothing.fileno(), write
            self.daemon = self._start(("serve", *options), fds)
        os.close(write)
        told, log = threading.Event(), list[str]()

        def read_log() -> None:
            with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    log.append(line)
                    if '"event": "serving"' in line:
                        told.set()
            told.set()

        threading.Thread(target=read_log, daemon=True).start()
        told.wait(START_S_MAX)
        assert '"event": "serving"' in "".join(log), "".join(log)

    def _start(self, words: Sequence[str], fds: tuple[int, int, int]) -> Forked | subprocess.Popen[bytes]:
        return start(words, env=self.env, cwd=self.folder, fds=fds)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the daemon."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        self.daemon.wait(STOP_S_MAX)
        self.daemon = None

    def _see(self, command: str, prints: str) -> None:
        """Run a command and compare what it prints: the ids and times of the page are those of another day."""
        said = self.shell(command)
        for theirs, mine in zip(_ID.findall(prints), _ID.findall(said), strict=False):
            self.instead.setdefault(theirs, mine)
        assert _plain(said) == _plain(self.mine(prints)), f"{command}\n{said}"

    def mine(self, text: str) -> str:
        """Return a text of a page as it is for this reader."""
        for theirs, mine in self.instead.items():
            text = text.replace(theirs, mine)
        for root in ("/var/lib/", "/backup/"):
            text = text.replace(root, f"{self.folder}{root}")
        return text

    def _ran(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            env=self.env,
            cwd=self.folder,
            input=self.typed,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{command[-1]}\nended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


class Newcomer(Reader):
    """A reader who has nothing yet but a Python and a wheel: all that he does is done in earnest."""

    def __init__(self, folder: Path, python: Path, wheel: Path) -> None:
        self._python = python
        super().__init__(folder)
        self.instead[".["] = f"{wheel}["  # what a checkout would be built to

    def _equip(self) -> None:
        bin_ = self.folder / ".bin"
        bin_.mkdir()
        (bin_ / "python3").symlink_to(self._python)
        self.env.pop("PYTHONPATH", None)
        path = os.pathsep.join((str(bin_), self.env["PATH"]))
        self.env |= {"PATH": path, "PIP_CACHE_DIR": str(self.folder / ".cache")}

    def _start(self, words: Sequence[str], fds: tuple[int, int, int]) -> subprocess.Popen[bytes]:
        stdin, out, err = fds
        command = [str(self.folder / ".venv" / "bin" / "dmq"), *words]
        return subprocess.Popen(command, env=self.env, cwd=self.folder, stdin=stdin, stdout=out, stderr=err)


def start(
    words: Sequence[str], *, env: dict[str, str], cwd: Path, fds: tuple[int, int, int]
) -> Forked | subprocess.Popen[bytes]:
    """Start ``dmq`` with three files of its own: forked if that makes no difference."""
    if forked.may_fork(env):
        return forked.start_with(words, env=env, cwd=cwd, fds=fds)
    stdin, out, err = fds
    return subprocess.Popen(
        [sys.executable, "-m", "dmq", *words], env=env, cwd=cwd, stdin=stdin, stdout=out, stderr=err
    )


def _extras() -> list[str]:
    """Return the extras of this distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted(project["optional-dependencies"])


def _served(text: str) -> list[str] | None:
    """Return the options of a block that does nothing but run the daemon in the foreground."""
    words = shlex.split(text, comments=True)
    is_one = text.count("\n") == 1 and words[0] in {"dmq", ".venv/bin/dmq"} and words[1] == "serve"
    return words[2:] if is_one and "&" not in words else None


def _plain(text: str) -> str:
    """A text without what is another one each time: ids, times, widths that follow from them, the order of lines.

    Two messages that are due come in either order when the machine stalls.
    """
    text = _TIME.sub("TIME", _ID.sub("ID", text))
    return "\n".join(sorted(" ".join(line.split()) for line in text.splitlines()))


class _Forks:
    """Starts a ``dmq`` for each of the commands that say so at a socket."""

    def __init__(self) -> None:
        self._running: set[Forked | subprocess.Popen[bytes]] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("")  # the system names it, in no folder: a path may be longer than the name of a socket
        self.address: bytes = self._socket.getsockname()
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for each in list(self._running):
            each.kill()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            length, fds, _, _ = socket.recv_fds(connection, 4, 3)
            with connection.makefile("rb") as asking:
                asked = json.loads(asking.read(int.from_bytes(length)))
            process = start(asked["arguments"], env=asked["env"], cwd=Path(asked["cwd"]), fds=(fds[0], fds[1], fds[2]))
            self._running.add(process)
            for each in fds:
                os.close(each)
            with suppress(OSError):  # nobody waits for it any more
                connection.send(b"%d" % process.wait(_COMMAND_S_MAX))
            self._running.discard(process)
