"""What a process told the kernel, in order: proof of durability where SIGKILL cannot give it.

A killed process loses nothing that it has written, synced or not: the page cache survives. Only the order of system
calls shows whether an answer waited for the disk.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

_WRITES = ("write", "pwrite64", "writev")
_SENDS = ("sendmsg", "sendto", "write", "writev")
_SYNCS = ("fdatasync", "fsync")
_TRACED = sorted({*_WRITES, *_SENDS, *_SYNCS})
_LINE = re.compile(r"(?P<pid>\d+) +(?:<\.\.\. (?P<resumed>\w+) resumed>|(?P<name>\w+)\()(?P<rest>.*)", re.DOTALL)
_FD = re.compile(r"\d+<(?P<path>[^>]*)>")


class SystemCall(NamedTuple):
    """One call; ``began`` and ``ended`` are places in the order of all calls of all threads."""

    name: str
    path: str  # behind its first argument: a file, or socket:[...]
    arguments: str
    began: int
    ended: int


def require_strace() -> None:
    """Skip the test, by name, where strace cannot run; in CI that is a failure."""
    if shutil.which("strace") is None:
        assert not os.environ.get("CI"), "required in CI: strace is not installed"
        pytest.skip("strace is not installed")


def traced(output: Path) -> Sequence[str]:
    """Return the prefix of a command that writes its calls to ``output``.

    The command itself stays our child and gets our signals (``-D``: strace is the grandchild), and strace ends with it.
    """
    return (
        "strace", "-D", "-f", "-y", "-qq", "-s", "1000000", "-e", "signal=none",
        "-e", f"trace={','.join(_TRACED)}", "-o", str(output),
    )  # fmt: skip


def read_calls(output: Path) -> list[SystemCall]:
    """Read a whole trace, in the order in which the calls ended."""
    calls: list[SystemCall] = []
    open_calls: dict[str, tuple[str, str, int]] = {}
    for number, line in enumerate(output.read_text(encoding="utf-8", errors="replace").splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue
        pid, rest = match["pid"], match["rest"]
        if match["resumed"]:
            name, begun, began = open_calls.pop(pid)
            rest = begun + rest
        else:
            name, began = match["name"], number
        if rest.endswith("<unfinished ...>"):
            open_calls[pid] = (name, rest.removesuffix("<unfinished ...>"), began)
            continue
        fd = _FD.match(rest)
        calls.append(SystemCall(name, fd["path"] if fd else "", rest, began, number))
    return calls


def broken_answers(calls: Sequence[SystemCall], tokens: Iterable[str], *, writes: int = 1, turn: int = -1) -> list[str]:
    """Return what is wrong with an answer that holds a token: it must follow a sync of the WAL write it speaks of.

    ``writes``: how many writes to the WAL hold the token. ``turn``: which of them, and which of the answers with the
    token, are compared (the last). A sync covers what was written, completely, before it began.
    """
    wal_writes = [call for call in calls if call.name in _WRITES and call.path.endswith(".log")]
    syncs = [call for call in calls if call.name in _SYNCS and call.path.endswith(".log")]
    answers = [call for call in calls if call.name in _SENDS and call.path.startswith("socket:")]
    broken: list[str] = []
    for token in tokens:
        written = [call for call in wal_writes if token in call.arguments]
        sent = [call for call in answers if token in call.arguments]
        if len(written) != writes or not sent:
            broken.append(f"{token}: {len(written)} writes to the WAL where {writes} are due, {len(sent)} answers")
            continue
        write, answer = written[turn], sent[turn]
        if answer.began < write.ended:
            broken.append(f"{token}: answered before it was written")
        elif not any(
            sync.path == write.path and write.ended < sync.began and sync.ended < answer.began for sync in syncs
        ):
            broken.append(f"{token}: answered before it was synced")
    return broken
