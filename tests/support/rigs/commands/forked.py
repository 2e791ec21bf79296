"""Processes of ``dmq`` that begin with its modules imported: forks of one that has them, not new interpreters.

Importing costs more processor time than all else that a daemon does at its start, and tests start hundreds of them.
What runs is the same code in a process of its own, with its own files, environment and signals; what ``python -m dmq``
does before that is left to the tests that start it so. The process that is forked runs this module.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

_READ_AT_START = ("DMQ_COMPILED", "LD_", "PYTHON", "MALLOC_", "LANG", "LC_")
_MESSAGE_BYTES_MAX = 256 * 1024
# What a daemon loads in any case, at its start, at its first connection or when the trail is written at its end.
_IMPORTED = (
    "dmq.cli.app",
    "dmq.cli.service.serve",
    "dmq.daemon.process",
    "dmq.admin.client",
    "dmq.admin.api.http2",
    "dmq.rocketmq_server.transport.http2_server",
    "dmq.trail.files",
    "dmq.trail.snapshots.snapshot",
    "cryptography.hazmat.backends.openssl.backend",
    "cryptography.hazmat.primitives.serialization.ssh",
    "cryptography.x509",
    "grpc._channel",  # of commands: imported with the first channel
    "grpc.experimental",
    "numpy.ma",
)
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy has one for each processor, and a fork would be without them
_TESTS = Path(__file__).resolve().parents[3]
_ROOT = _TESTS.parent


class Forked:
    """A process that was forked, with the part of ``subprocess.Popen`` that a daemon's tests need."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: TextIO | None = None
        self._ended = ended  # says with what, once it has

    def poll(self) -> int | None:
        """Return the exit code, or ``None`` while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises as ``subprocess.Popen.wait``."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("dmq", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            said = os.read(self._ended, 16)
            os.close(self._ended)
            self.returncode = int(said or b"-9")  # it says nothing if it was killed itself
        return self.returncode


def may_fork(env: Mapping[str, str]) -> bool:
    """Whether a fork may take the place of a new interpreter with this environment.

    Not where coverage is measured, which would see nothing of it, nor where the environment is for the loader or the
    interpreter, which have read theirs.
    """
    if any(name.startswith("COVERAGE_PROCESS") for name in os.environ):
        return False
    return all(env.get(each) == os.environ.get(each) for each in {*env, *os.environ} if each.startswith(_READ_AT_START))


def start(arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> Forked:
    """Start ``dmq`` with these arguments; what it writes to stderr can be read, what it writes to stdout is lost."""
    read, write = os.pipe()
    with Path(os.devnull).open("wb") as nothing:
        process = _start(arguments, env, cwd, nothing.fileno(), write)
    os.close(write)
    process.stderr = os.fdopen(read, encoding="utf-8", errors="replace")
    return process


def start_with(arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, fds: Sequence[int]) -> Forked:
    """Start ``dmq`` with these arguments and these files for stdin, stdout and stderr, which stay the caller's."""
    stdin, out, err = fds
    return _start(arguments, env, cwd, out, err, stdin=stdin)


def run(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float, code: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``dmq`` with these arguments to its end; or, if there is any, ``code``, as ``python -c`` runs it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = _start(arguments, env, cwd, out.fileno(), err.fileno(), code)
        try:
            ended = process.wait(timeout_s)
        finally:
            process.kill()
        said = []
        for each in (out, err):
            each.seek(0)
            said.append(each.read().decode(errors="replace"))
    return subprocess.CompletedProcess(["dmq", *arguments], ended, *said)


_asking = threading.Lock()


def run_code(code: str, *arguments: str, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``python -c`` to its end, with what daemons load already loaded where that is the same."""
    if may_fork(os.environ):
        return run(arguments, env=os.environ, cwd=cwd, timeout_s=timeout_s, code=code)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=timeout_s)


def _start(
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    out: int,
    err: int,
    code: str = "",
    stdin: int | None = None,
) -> Forked:
    request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "code": code}).encode()
    assert len(request) < _MESSAGE_BYTES_MAX
    read, write = os.pipe()
    with _asking:
        server = _server()
        socket.send_fds(server, [request], [out, err, write, *([] if stdin is None else [stdin])])
        pid = int(server.recv(16))
    os.close(write)
    return Forked(pid, read)


@cache
def _server() -> socket.socket:
    """Start the process that is forked; it ends with this one."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.rigs.commands.forked", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join((str(_TESTS), str(_ROOT)))},
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def _serve(connection: socket.socket) -> None:
    """Fork for each request, until nobody can send one any more."""
    for name in _IMPORTED:
        importlib.import_module(name)
    importlib.import_module("support.rigs.commands.command_tree").warm()
    gc.freeze()  # what is there now stays shared with the forks
    while True:
        request, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, 4)
        if not request:
            return
        watcher = os.fork()
        if not watcher:
            _watch(connection, json.loads(request), *fds)
        for each in fds:
            os.close(each)
        while _reaped():
            pass


def _reaped() -> bool:
    """Forget one watcher that has ended; say whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _watch(
    connection: socket.socket, request: dict[str, Any], out: int, err: int, ended: int, stdin: int | None = None
) -> NoReturn:
    """Start the process, say who it is, wait for it, and say how it ended."""
    pid = os.fork()
    if not pid:
        connection.close()
        os.close(ended)
        _become(request, out, err, stdin)
    connection.send(b"%d" % pid)
    connection.close()
    for each in (out, err, *([] if stdin is None else [stdin])):
        os.close(each)
    _, status = os.waitpid(pid, 0)
    os.write(ended, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(request: dict[str, Any], out: int, err: int, stdin: int | None) -> NoReturn:
    for mine, theirs in ((out, 1), (err, 2), *([] if stdin is None else [(stdin, 0)])):
        os.dup2(mine, theirs)
        os.close(mine)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    from dmq.cli import main

    try:
        if request["code"]:
            sys.argv = ["-c", *request["arguments"]]
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
            _end(0)
        sys.argv = ["dmq", *request["arguments"]]
        _end(main())
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        _end(ended.code or 0)


def _end(code: int | None) -> NoReturn:
    """End as the interpreter does, except that it frees no objects: that copies each of their pages first.

    It takes four times as long as all else that a usual command does.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the client has gone
            each.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
