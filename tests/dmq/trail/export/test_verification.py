"""Reading a cluster back for the audit: which part of each queue was read, and what is said of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.forges.messages.stored import a_stored
from support.forges.trail.files import CellWriter, Event
from support.rigs.rocketmq.remoting_peer import BROKER, HeldQueue, Peer, remoting_peer

from broker_adapter.contracts.message import pack_id
from broker_adapter.remoting import RemotingOptions
from broker_adapter.remoting import client as remoting
from broker_adapter.remoting.protocol.codes import Operation
from broker_adapter.remoting.protocol.frames import RemotingFrame
from dmq.trail.export.verification import CLOCKS_MS, ClusterReadBack, read_back

START = 1_700_000_000_000
PATIENCE_S = 61.0  # no other time


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """A cluster; nobody waits long before asking again."""
    monkeypatch.setattr(remoting, "_PAUSES_S", (0.0, 0.0))
    with remoting_peer() as found:
        yield found


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    """Two messages of ``orders`` were forwarded, one of ``refunds`` is in doubt, none of ``quiet`` is either."""
    writer = CellWriter(tmp_path / "trail", "one")
    events = [
        ("QUEUED", "orders", "A"),
        ("DELIVERED", "orders", "B"),
        ("FORWARDED", "orders", "A"),
        ("FORWARDED", "orders", "B"),
        ("FORWARD_IN_DOUBT", "refunds", "C"),
        ("QUEUED", "quiet", "D"),
    ]
    for sequence, (kind, topic, message_id) in enumerate(events, 1):
        made: dict[str, Any] = dict.fromkeys(Event._fields)
        made |= {"sequence": sequence, "boot": 1, "kind": kind, "at_ms": START + sequence, "attempt": 1}
        writer.add(Event(**(made | {"topic": topic, "message_id": pack_id(message_id)})))
    writer.close()
    return tmp_path / "trail"


def stored(topic: str, offset: int, message_id: str, after_ms: int = 0) -> bytes:
    """A message that is stored so long after ``START``."""
    return a_stored(topic=topic, offset=offset, message_id=message_id, stored_at_ms=START + after_ms)


def read(peer: Peer, trail: Path, timeout_s: float = PATIENCE_S) -> ClusterReadBack:
    """Read the cluster back, beside the trail."""
    options = RemotingOptions(names=(peer.address,), request_timeout_ms=60_000)
    return read_back(trail, options, trail.parent / "cluster", timeout_s=timeout_s)


def rows(trail: Path, name: str) -> list[dict[str, Any]]:
    """One of the tables that were written."""
    return pq.read_table(trail.parent / "cluster" / f"{name}.parquet").to_pylist()


def test_topics_of_the_trail_are_read(peer: Peer, trail: Path) -> None:
    """Those that it says messages went to, all that lies in them; and how far the trail went."""
    peer.topics["orders"] = [HeldQueue([stored("orders", 0, "A"), a_stored(crc=1, offset=1)]), HeldQueue()]
    peer.topics["refunds"] = [HeldQueue([stored("refunds", 0, "X")])]
    peer.topics["quiet"] = [HeldQueue([stored("quiet", 0, "D")])]
    found = read(peer, trail)
    assert (found.messages, found.unread) == (3, [])
    place = {"broker": BROKER, "queue_id": 0}
    assert sorted(rows(trail, "messages"), key=lambda row: (row["topic"], row["queue_offset"])) == [
        {"topic": "orders", **place, "queue_offset": 0, "message_id": pack_id("A")},
        {"topic": "orders", **place, "queue_offset": 1, "message_id": None},
        {"topic": "refunds", **place, "queue_offset": 0, "message_id": pack_id("X")},
    ]
    whole = {"from_offset": 0, "since_ms": 0, "why": None}
    assert rows(trail, "queues") == [
        {"topic": "orders", "broker": BROKER, "queue_id": 0, "to_offset": 2, "end_offset": 2, **whole},
        {"topic": "orders", "broker": BROKER, "queue_id": 1, "to_offset": 0, "end_offset": 0, **whole},
        {"topic": "refunds", "broker": BROKER, "queue_id": 0, "to_offset": 1, "end_offset": 1, **whole},
    ]
    assert rows(trail, "cells") == [{"cell": "one", "sequence": 6}]


def test_a_topic_is_read_from_when_messages_could_go_there(peer: Peer, trail: Path) -> None:
    """With the time by which clocks may differ; what lies before is ruled out by that time."""
    old = [stored("orders", number, f"O{number}", -CLOCKS_MS * 2) for number in range(5)]
    peer.topics["orders"] = [HeldQueue([*old, stored("orders", 5, "A", 10)])]
    peer.topics["refunds"] = [HeldQueue()]
    assert read(peer, trail).messages == 1
    (queue, _) = rows(trail, "queues")
    assert (queue["from_offset"], queue["to_offset"], queue["since_ms"]) == (5, 6, START + 1 - CLOCKS_MS)


def test_a_range_removed_by_retention_is_not_confirmed(peer: Peer, trail: Path) -> None:
    """Before the reading, during it, and where nothing is left."""
    peer.topics["orders"] = [HeldQueue([stored("orders", 7 + n, f"A{n}", 10 + n) for n in range(4)], begin=7)]
    peer.topics["refunds"] = [HeldQueue([], begin=3)]
    peer.pull_max = 1
    gone = iter([9])

    def remove(request: RemotingFrame) -> None:
        queue = peer.topics["orders"][0]
        if request.code == Operation.PULL and request.fields["queueOffset"] == "8" and (begin := next(gone, 0)):
            del queue.messages[: begin - queue.begin]
            queue.begin = begin

    peer.before = remove
    assert read(peer, trail).unread == []
    orders, refunds = rows(trail, "queues")
    # it jumps from 8 to 9, and from there on knows what was stored after that message
    assert (orders["from_offset"], orders["to_offset"], orders["since_ms"]) == (9, 11, START + 13)
    assert (refunds["from_offset"], refunds["end_offset"], refunds["since_ms"]) == (3, 3, None)


def test_unreadable_input_gives_the_reason(peer: Peer, trail: Path) -> None:
    """A topic that is not there, and a queue whose broker fails: the others are read."""
    peer.topics["orders"] = [HeldQueue([stored("orders", 0, "A")]), HeldQueue([stored("orders", 0, "B")])]
    peer.before = lambda request: (
        RemotingFrame(code=1, remark="disk")
        if request.code == Operation.PULL and request.fields["queueId"] == "1"
        else None
    )
    found = read(peer, trail)
    assert found.messages == 1
    well, failed, missing = rows(trail, "queues")
    assert (well["why"], well["to_offset"]) == (None, 1)
    assert (failed["to_offset"], "disk" in failed["why"]) == (0, True)
    assert (missing["topic"], missing["broker"], "topic not found" in missing["why"]) == ("refunds", None, True)


def test_time_that_runs_out_leaves_the_rest_unread(peer: Peer, trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before is good. Here the time is over at the second pull, however long it took until then."""
    bounds: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []
    bound_of = asyncio.timeout

    def bound(delay_s: float) -> asyncio.Timeout:
        made = bound_of(None if delay_s == PATIENCE_S else delay_s)
        if delay_s == PATIENCE_S:
            bounds.append((asyncio.get_running_loop(), made))
        return made

    def stop(request: RemotingFrame) -> bool:
        if request.code != Operation.PULL or request.fields["queueOffset"] != "1":
            return False
        loop, time = bounds[0]
        loop.call_soon_threadsafe(time.reschedule, 0)
        return True

    monkeypatch.setattr("dmq.trail.export.verification.asyncio.timeout", bound)
    peer.topics["orders"] = [HeldQueue([stored("orders", 0, "A"), stored("orders", 1, "B")])]
    peer.topics["refunds"] = [HeldQueue()]
    peer.pull_max = 1
    peer.stops_at = stop
    found = read(peer, trail)
    assert {each.topic: each.why for each in found.unread}["orders"] == "no time was left"
    orders = rows(trail, "queues")[0]
    assert (orders["to_offset"], orders["end_offset"]) == (1, 2)
    peer.stops_at = lambda request: request.code == Operation.ROUTE
    found = read(peer, trail, timeout_s=0.05)
    assert [(each.topic, each.why) for each in found.queues] == [
        ("orders", "no time was left"),
        ("refunds", "no time was left"),
    ]


def test_an_unreadable_trail_is_reported(peer: Peer, trail: Path) -> None:
    """With the file."""
    (path,) = (trail / "events").rglob("*.parquet")
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=path.name):
        read(peer, trail)
