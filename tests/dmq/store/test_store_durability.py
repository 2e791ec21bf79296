"""No "stored" leaves before the disk has it: what a process does, in the order in which it asked the kernel.

The page cache survives SIGKILL, so no kill can show a missing sync. The trace of system calls does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rigs.faults.strace import Call, Trace, tracer
from support.rigs.store.driver import run_driver

pytestmark = pytest.mark.integration
MESSAGES = 40


def traced_commits(tmp_path: Path, durability: str) -> tuple[Trace, dict[bytes, bytes]]:
    """Commit messages one by one under strace; return the trace, and the token and answer of each."""
    ran = run_driver("commit", tmp_path / "cell", f"{durability},{MESSAGES}", before=tracer(tmp_path / "trace"))
    lines = ran.stdout.splitlines()
    assert lines[0] == "ready", ran.stderr
    answered = [line.removeprefix("OK ").encode() for line in lines if line.startswith("OK ")]
    assert len(answered) == MESSAGES
    return Trace.of(tmp_path / "trace"), {token: b"OK " + token for token in answered}


def test_no_answer_leaves_before_its_record_is_synced(tmp_path: Path) -> None:
    """With durability "disk": the log record is written, the log is synced, the answer leaves."""
    trace, tokens = traced_commits(tmp_path, "disk")
    assert trace.unsafe_answers(tokens) == []


def test_the_check_sees_a_missing_sync(tmp_path: Path) -> None:
    """With durability "process" no answer is covered: the check above would fail for every message."""
    trace, tokens = traced_commits(tmp_path, "process")
    unsafe = trace.unsafe_answers(tokens)
    assert len(unsafe) == MESSAGES
    assert all("not synced in between" in each for each in unsafe)


# -- the checker itself ------------------------------------------------------------------------------------------------


def line(name: str, path: str, data: bytes = b"", *, pid: int = 1, tail: str = " = 0") -> str:
    text = "".join(f"\\x{byte:02x}" for byte in data)
    quoted = f', "{text}", {len(data)})' if data else ")"
    if tail == " = 0" and data:
        tail = f" = {len(data)}"
    return (
        f"{pid} {name}(7<{path}>{quoted}{tail}"
        if tail != "..."
        else f"{pid} {name}(7<{path}>{quoted[:-1]} <unfinished ...>"
    )


def record(*tokens: bytes) -> bytes:
    data = b"".join(tokens)
    return b"crc." + len(data).to_bytes(2, "little") + b"\1" + data


LOG, OTHER, OUT = "/d/000004.log", "/d/000009.log", "pipe:[1]"
WRITE, SYNC, ANSWER = line("write", LOG, record(b"one")), line("fdatasync", LOG), line("write", OUT, b"OK one")


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([WRITE, SYNC, ANSWER], ""),
        ([WRITE, line("fsync", LOG), line("sendmsg", "TCP:[a->b]", b"OK one")], ""),
        ([WRITE, ANSWER, SYNC], "not synced"),
        ([SYNC, WRITE, ANSWER], "not synced"),
        ([WRITE, line("fdatasync", OTHER), ANSWER], "not synced"),
        ([WRITE, line("fdatasync", LOG, tail=" = -1 EIO (Input/output error)"), ANSWER], "not synced"),
        ([line("fdatasync", LOG, pid=2, tail="..."), WRITE, "2 <... fdatasync resumed>) = 0", ANSWER], "not synced"),
        ([WRITE, line("fdatasync", LOG, pid=2, tail="..."), ANSWER, "2 <... fdatasync resumed>) = 0"], "not synced"),
        ([WRITE, line("fdatasync", LOG, pid=2, tail="..."), "2 <... fdatasync resumed>) = 0", ANSWER], ""),
        ([line("write", LOG, record(b"two")), SYNC, ANSWER], "in no record"),
        ([line("write", "/d/000005.sst", record(b"one")), line("fdatasync", "/d/000005.sst"), ANSWER], "in no record"),
        ([WRITE, SYNC], "never answered"),
    ],
)
def test_the_checker(lines: list[str], verdict: str) -> None:
    """Every order that matters: the sync must begin after the write, be of that log, and end well before the answer."""
    found = Trace("\n".join(lines)).unsafe_answers({b"one": b"OK one"})
    assert (verdict in found[0]) if verdict else (found == [])


def test_a_record_over_several_writes_and_blocks_is_covered_at_its_end() -> None:
    """A sync between the two halves of a record does not count."""
    data = bytes(32_768 - 7 - 20) + b"one of many"
    first = b"crc." + (32_768 - 7).to_bytes(2, "little") + b"\2" + (data + bytes(100))[: 32_768 - 7]
    rest = b"crc." + (500).to_bytes(2, "little") + b"\4" + bytes(500)
    lines = [line("write", LOG, first), SYNC, line("write", LOG, rest), line("write", OUT, b"OK one")]
    assert "not synced" in Trace("\n".join(lines)).unsafe_answers({b"one of many": b"OK one"})[0]
    lines.insert(3, SYNC)
    assert Trace("\n".join(lines)).unsafe_answers({b"one of many": b"OK one"}) == []


def test_calls_are_read_as_they_were_made() -> None:
    """Threads interleave: a call that was interrupted by another thread's line has its end where it ended."""
    text = "\n".join([line("write", LOG, record(b"one"), pid=3, tail="..."), ANSWER, "3 <... write resumed>) = 10"])
    assert [(call.name, call.began, call.ended, call.result) for call in Trace(text).calls] == [
        ("write", 0, 2, 10),
        ("write", 1, 1, 6),
    ]
    assert isinstance(Trace(text).written(b"one"), Call)
