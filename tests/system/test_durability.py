"""No OK leaves the daemon before the disk has what it speaks of: seen in the order of its system calls."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from support.clients.wire.client import Received, WireClient, a_message
from support.rigs.daemon.process import Daemon
from support.rigs.faults.strace import Trace, tracer

from broker_adapter.contracts.message import pack_id
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.broker.handles.receipt_handle import read_receipt
from dmq.trail.events import EventKind, encode_event

pytestmark = pytest.mark.fault

_TOPIC, _GROUP = "durable", "durable-group"
_EACH = 8


class Traced(NamedTuple):
    """What a daemon did; of what it was asked, what stands in its log, and what in its answer."""

    trace: Trace
    sends: dict[bytes, bytes]
    acks: dict[bytes, bytes]


def _ids(kind: str, count: int) -> list[str]:
    return [f"proof-{kind}-{number:03}-{time.time_ns()}" for number in range(count)]


def _ack_token(delivery: Received) -> bytes:
    """The audit event of an acknowledgement: it is in the same batch as the acknowledgement itself."""
    receipt = read_receipt(delivery.receipt_handle)
    place = (receipt.topic_id, receipt.group_id, receipt.queue_id, receipt.attempt, receipt.queue_offset)
    return encode_event(EventKind.ACKED, *place, pack_id(delivery.message_id))


def _run(tmp_path: Path, *options: str, processes: int) -> Traced:
    """Send, receive and acknowledge in front of a traced daemon."""
    output = tmp_path / "trace.txt"
    strace, *arguments = tracer(output)
    later_ms = time.time_ns() // 1_000_000 + 3_600_000
    normal, delayed, batch = (_ids(kind, _EACH) for kind in ("now", "later", "batch"))
    acks: dict[bytes, bytes] = {}
    # -D: the daemon stays our child and gets our signals
    with (
        Daemon(tmp_path / "data", *options, prefix=(strace, "-D", *arguments), processes=processes) as daemon,
        WireClient(daemon.address) as client,
    ):
        messages = [a_message(_TOPIC, each) for each in normal]
        messages += [a_message(_TOPIC, each, deliver_at_ms=later_ms) for each in delayed]
        with ThreadPoolExecutor(max_workers=4) as pool:  # several at once, so that commits are shared
            answers = list(pool.map(client.send, messages))
        answers.append(client.send(*[a_message(_TOPIC, each) for each in batch]))
        assert {answer.status.code for answer in answers} == {wire.OK}
        found = client.receive(_TOPIC, _GROUP)
        assert len(found) == len(normal) + len(batch)
        for each in found:
            name = f"acked-{each.message_id}"  # what the answer repeats, and no other answer holds
            assert client.ack(_TOPIC, _GROUP, [each._replace(message_id=name)]).status.code == wire.OK
            acks[_ack_token(each)] = name.encode()
        daemon.stop()
    sends = {pack_id(each): each.encode() for each in [*normal, *delayed, *batch]}
    return Traced(Trace.of(output), sends, acks)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "fronts"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run with the default durability."""
    return _run(tmp_path_factory.mktemp("disk"), processes=request.param)


def test_no_send_is_answered_before_the_disk_has_it(disk: Traced) -> None:
    """The OK of every send leaves after an fdatasync that began after the message's WAL write had ended."""
    assert disk.trace.unsafe_answers(disk.sends) == []


def test_no_ack_is_answered_before_the_disk_has_it(disk: Traced) -> None:
    """The same for every acknowledgement."""
    assert disk.trace.unsafe_answers(disk.acks) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_the_checker_sees_a_missing_sync(tmp_path: Path, processes: int) -> None:
    """The test of the test: with durability "process" every answer is written, and none is synced before it leaves."""
    unsynced = _run(tmp_path, "--durability", "process", processes=processes)
    for tokens in (unsynced.sends, unsynced.acks):
        unsafe = unsynced.trace.unsafe_answers(tokens)
        assert len(unsafe) == len(tokens)
        assert all(each.endswith("not synced in between") for each in unsafe), unsafe
