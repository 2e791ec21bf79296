"""Durability where SIGKILL cannot see it: in the order of system calls.

    trace = Trace.of(run)                      # run under `tracer(path)`
    assert trace.unsafe_answers({stored: answered, ...}) == []

A token is some bytes that stand in the write-ahead log (a message id as the store packs it) and, in the same or another
form, in the answer that says "stored" (the message id as text). For each of them: the log record with the token was
written, then a sync of that log began and ended well, and only then did the answer leave. Works for any process:
answers are what goes into pipes and sockets.
"""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from dmq.store.engines.wal import BLOCK_BYTES, HEADER_BYTES

_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")
_SENDS = ("sendto", "sendmsg", "sendmmsg")
_SYNCS = ("fsync", "fdatasync")
_LINE = re.compile(r"(?P<pid>\d+) +(?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<fd>\d+)<(?P<path>[^>]*)>")
_RESULT = re.compile(r"\) += (?P<result>-?\d+)[^=]*$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')


def tracer(path: Path) -> list[str]:
    """The command line to put before another one; the trace goes to ``path``. Skips the test without strace."""
    if shutil.which("strace") is None:
        if os.environ.get("CI"):
            pytest.fail("strace is required in CI, for tests of the order of syncs and answers")
        pytest.skip("no strace: the order of syncs and answers cannot be seen")
    calls = ",".join((*_WRITES, *_SENDS, *_SYNCS))
    options = ["-f", "-yy", "-xx", "-s", "4194304", "--seccomp-bpf", "-e", "signal=none", "-e", f"trace={calls}"]
    return ["strace", *options, "-o", str(path)]


@dataclass(slots=True)
class Call:
    """One system call; ``began`` and ``ended`` are places in the trace."""

    pid: int
    name: str
    path: str
    data: bytes
    began: int
    ended: int = -1
    result: int = -1


@dataclass(slots=True)
class _Log:
    """A write-ahead log as it was written."""

    data: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    writes: list[Call] = field(default_factory=list)

    def add(self, call: Call) -> None:
        self.data += call.data[: call.result]
        self.ends.append(len(self.data))
        self.writes.append(call)

    def records(self) -> Iterator[tuple[bytes, Call]]:
        """Yield each whole record with the call that wrote its end."""
        at = 0
        parts: list[bytes] = []
        while at + HEADER_BYTES <= len(self.data):
            if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:
                at += BLOCK_BYTES - at % BLOCK_BYTES
                continue
            length, kind = int.from_bytes(self.data[at + 4 : at + 6], "little"), self.data[at + 6]
            parts.append(bytes(self.data[at + HEADER_BYTES : at + HEADER_BYTES + length]))
            at += HEADER_BYTES + length
            if kind in {1, 4}:
                yield b"".join(parts), self.writes[bisect_left(self.ends, at)]
                parts.clear()


class Trace:
    """What a process wrote, synced and sent, in order."""

    def __init__(self, text: str) -> None:
        self.calls = list(_parse(text))
        self._logs: dict[str, _Log] = defaultdict(_Log)
        for call in sorted(self.calls, key=lambda call: call.ended):
            if call.name in _WRITES and is_log(call.path) and call.result > 0:
                self._logs[call.path].add(call)

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read what a tracer wrote."""
        return cls(path.read_text(encoding="ascii"))

    def answers(self) -> list[Call]:
        """What left the process, in order; what it and its fronts tell each other is for nobody else."""
        return [
            call
            for call in self.calls
            if not call.path.startswith("UNIX")
            and (call.name in _SENDS or (call.name in _WRITES and call.path.startswith(("pipe:", "socket:", "TCP"))))
        ]

    def unsafe_answers(self, tokens: Mapping[bytes, bytes]) -> list[str]:
        """Say what is wrong with each stored token, whose answer is its value; nothing if it was safe then."""
        found = [_judge(stored, answered, self) for stored, answered in tokens.items()]
        return [each for each in found if each]

    def written(self, token: bytes) -> Call | None:
        """The call that completed the first log record with ``token``."""
        for log in self._logs.values():
            if token in log.data or len(log.data) > BLOCK_BYTES:
                for record, call in log.records():
                    if token in record:
                        return call
        return None


def is_log(path: str) -> bool:
    """Say whether this is a write-ahead log."""
    return path.endswith(".log")


def _judge(stored: bytes, answered: bytes, trace: Trace) -> str:
    answer = next((call for call in trace.answers() if answered in call.data), None)
    if answer is None:
        return f"{answered!r} was never answered"
    write = trace.written(stored)
    if write is None:
        return f"{stored!r} was answered, and is in no record of the log"
    for call in trace.calls:
        is_sync = call.name in _SYNCS and call.path == write.path and call.result == 0
        if is_sync and write.ended < call.began and 0 <= call.ended < answer.began:
            return ""
    return f"{stored!r} was answered at {answer.began}, written at {write.ended}, and not synced in between"


def _parse(text: str) -> Iterator[Call]:
    unfinished: dict[int, Call] = {}
    for place, line in enumerate(text.splitlines()):
        split = _LINE.match(line)
        if split is None:
            continue
        pid, rest = int(split["pid"]), split["rest"]
        if rest.startswith("<... "):
            call = unfinished.pop(pid, None)
        else:
            head = _CALL.match(rest)
            if head is None:
                continue
            data = b"".join(bytes.fromhex(part.replace("\\x", "")) for part, _ in _STRING.findall(rest[head.end() :]))
            path = bytes.fromhex(head["path"].replace("\\x", "")).decode() if "\\x" in head["path"] else head["path"]
            call = Call(pid, head["name"], path, data, place)
            yield call
            if rest.endswith("<unfinished ...>"):
                unfinished[pid] = call
                continue
        result = _RESULT.search(rest)
        if call is not None and result is not None:
            call.ended, call.result = place, int(result["result"])
