"""Reading by offset over real gRPC: the calls of a client that pulls, on both transports and through a kill.

No official client of the current protocol pulls, so the requests are written out.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.process import Daemon

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient, CallRefused, NotFound

pytestmark = pytest.mark.integration

TOPIC, GROUP = wire.Resource(name="orders"), wire.Resource(name="readers")


def queue(queue_id: int) -> wire.MessageQueue:
    return wire.MessageQueue(topic=TOPIC, id=queue_id)


def pull(client: WireClient, queue_id: int, offset: int, *, wait_s: int = 0, batch: int = 32) -> tuple[list[str], int]:
    """Return the message ids and the next offset of one pull that is not refused."""
    request = wire.PullMessageRequest(group=GROUP, message_queue=queue(queue_id), offset=offset, batch_size=batch)
    request.long_polling_timeout.seconds = wait_s
    frames = client.frames("PullMessage", request, deadline_s=wait_s + 10)
    assert frames[0].status.code in {wire.OK, wire.MESSAGE_NOT_FOUND}, frames[0]
    return [each.message.system_properties.message_id for each in frames[1:-1]], frames[-1].next_offset


def offset_of(client: WireClient, rpc: str, queue_id: int, **fields: Any) -> int:  # noqa: ANN401
    """Return the offset that an RPC answers."""
    request = wire.METHODS[rpc].request_class(message_queue=queue(queue_id), **fields)
    answer = client.ask(rpc, request)
    assert answer.status.code == wire.OK, answer
    return int(answer.offset)


def read_on(client: WireClient, queue_id: int) -> list[str]:
    """Continue where the group is on a queue, to its end, in small steps, and say how far that was."""
    asked = client.ask("GetOffset", wire.GetOffsetRequest(group=GROUP, message_queue=queue(queue_id)))
    assert asked.status.code in {wire.OK, wire.OFFSET_NOT_FOUND}
    offset = asked.offset if asked.status.code == wire.OK else offset_of(client, "QueryOffset", queue_id)
    end = offset_of(client, "QueryOffset", queue_id, query_offset_policy=wire.END)
    found: list[str] = []
    while offset < end:
        some, offset = pull(client, queue_id, offset, batch=2)
        found += some
        told = wire.UpdateOffsetRequest(group=GROUP, message_queue=queue(queue_id), offset=offset)
        assert client.ask("UpdateOffset", told).status.code == wire.OK
    return found


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_a_group_reads_each_message_once_through_kills(tmp_path: Path, transport: str) -> None:
    """It goes on where it said after each kill; what it never read is there, and other readers see all of it again."""
    env = {**os.environ, "DMQ_TRANSPORT": transport}
    with Daemon(tmp_path / "data", env=env) as daemon, WireClient(daemon.address) as client:
        route = client.ask("QueryRoute", wire.QueryRouteRequest(topic=TOPIC))
        queues = [each.id for each in route.message_queues]
        sent: list[str] = []
        read: list[str] = []
        for run in range(2):
            ids = [f"m-{run}-{number}" for number in range(24)]
            assert client.send(*(a_message(TOPIC.name, each) for each in ids)).status.code == wire.OK
            sent += ids
            for queue_id in queues[run:]:  # the first time all of them, then all but one
                read += read_on(client, queue_id)
            daemon.kill()
            daemon.restart()
        for queue_id in queues:
            read += read_on(client, queue_id)
        assert sorted(read) == sorted(sent)
        broadcast = [each for queue_id in queues for each in pull_all(client, queue_id)]
        assert sorted(broadcast) == sorted(sent)
        woken = threading.Thread(target=lambda: read.extend(pull(client, 0, end, wait_s=10)[0]))
        end = offset_of(client, "QueryOffset", 0, query_offset_policy=wire.END)
        woken.start()
        late = [f"late-{number}" for number in range(len(queues))]
        assert client.send(*(a_message(TOPIC.name, each) for each in late)).status.code == wire.OK
        woken.join(15)
        assert read[len(sent) :]
        assert set(read[len(sent) :]) <= set(late)


def test_operators_look_without_being_noticed(daemon: Daemon) -> None:
    """Counting and peeking tell what lies where and what waits; a consumer gets all of it as if nobody had looked."""
    with WireClient(daemon.address) as client, AdminClient(daemon.address, timeout_s=10) as admin:
        with pytest.raises(NotFound):
            admin.count(TOPIC.name)
        later_ms = time.time_ns() // 1_000_000 + 3_600_000
        sent = [a_message(TOPIC.name, f"m-{number}", tag="t") for number in range(20)]
        client.send(*sent, a_message(TOPIC.name, "later", deliver_at_ms=later_ms))
        found = admin.count(TOPIC.name)
        assert (sum(each.end_offset for each in found.queues), found.pending) == (20, 1)
        pages = [admin.peek(TOPIC.name, each.queue_id, 0, limit=32, with_body=True) for each in found.queues]
        seen = [each for page in pages for each in page.messages]
        assert sorted(each.message_id for each in seen) == sorted(each.system_properties.message_id for each in sent)
        assert {(each.content.tag, each.content.body) for each in seen} == {("t", b"body")}
        with pytest.raises(CallRefused, match="illegal offset"):
            admin.peek(TOPIC.name, 0, 10_000, limit=1)
        assert len(client.drain(TOPIC.name, GROUP.name, 20)) == 20


def pull_all(client: WireClient, queue_id: int) -> list[str]:
    """Read a queue from its beginning, without saying how far that was."""
    found: list[str] = []
    offset = 0
    while offset < offset_of(client, "QueryOffset", queue_id, query_offset_policy=wire.END):
        some, offset = pull(client, queue_id, offset)
        found += some
    return found
