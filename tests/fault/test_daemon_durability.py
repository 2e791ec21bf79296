"""No OK leaves the daemon before the disk has what it speaks of: seen in the order of its system calls."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from support.daemon import Daemon
from support.strace import SystemCall, broken_answers, read_calls, require_strace, traced
from support.wire_client import WireClient, a_message

from broker_adapter.wire import rocketmq_v2 as wire

_TOPIC, _GROUP = "durable", "durable-group"
# Few and small, so that no record crosses a block of the WAL (32 KiB), where RocksDB splits it.
_NORMAL, _DELAYED, _BATCHED = 8, 8, 4


def _id(kind: str, number: int) -> str:
    """An id that stands in the WAL and on the wire as it is: not the packed form of the clients' own ids."""
    return f"proof-{kind}-{number:03}-{time.time_ns()}"


class Traced(NamedTuple):
    """What a daemon did, and the message ids to look for."""

    calls: list[SystemCall]
    waiting: list[str]  # delayed: written once
    acked: list[str]  # written when sent and when acknowledged


def _trace(tmp_path: Path, *options: str) -> Traced:
    """Send, receive and acknowledge in front of a traced daemon."""
    require_strace()
    output = tmp_path / "trace.txt"
    later_ms = time.time_ns() // 1_000_000 + 3_600_000
    normal = [_id("now", number) for number in range(_NORMAL)]
    delayed = [_id("later", number) for number in range(_DELAYED)]
    batch = [_id("batch", number) for number in range(_BATCHED)]
    with Daemon(tmp_path / "data", *options, prefix=traced(output)) as daemon, WireClient(daemon.address) as client:
        messages = [a_message(_TOPIC, each) for each in normal]
        messages += [a_message(_TOPIC, each, deliver_at_ms=later_ms) for each in delayed]
        with ThreadPoolExecutor(max_workers=4) as pool:  # several at once, so that commits are shared
            answers = list(pool.map(client.send, messages))
        answers.append(client.send(*[a_message(_TOPIC, each) for each in batch]))
        assert {answer.status.code for answer in answers} == {wire.OK}
        found = client.receive(_TOPIC, _GROUP)
        assert len(found) == _NORMAL + _BATCHED
        for each in found:
            assert client.ack(_TOPIC, _GROUP, [each]).status.code == wire.OK
        daemon.stop()
    return Traced(read_calls(output), delayed, [*normal, *batch])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A traced run with the default durability."""
    return _trace(tmp_path_factory.mktemp("disk"))


def test_no_send_is_answered_before_the_disk_has_it(disk: Traced) -> None:
    """The OK of every send leaves after an fdatasync that began after the message's WAL write had ended."""
    assert broken_answers(disk.calls, disk.waiting) == []
    assert broken_answers(disk.calls, disk.acked, writes=2, turn=0) == []


def test_no_ack_is_answered_before_the_disk_has_it(disk: Traced) -> None:
    """The same for the last answer and the last write of an acknowledged message: its ack."""
    assert broken_answers(disk.calls, disk.acked, writes=2) == []


def test_the_checker_sees_a_missing_sync(tmp_path: Path) -> None:
    """The test of the test: with durability "process" every answer is written, and none is synced before it leaves."""
    unsynced = _trace(tmp_path, "--durability", "process")
    for wrong, ids in (
        (broken_answers(unsynced.calls, unsynced.waiting), unsynced.waiting),
        (broken_answers(unsynced.calls, unsynced.acked, writes=2, turn=0), unsynced.acked),
        (broken_answers(unsynced.calls, unsynced.acked, writes=2), unsynced.acked),
    ):
        assert wrong == [f"{each}: answered before it was synced" for each in ids]
