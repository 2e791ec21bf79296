"""Reading by offset over real gRPC: the calls of a client that pulls, on both transports and through a kill.

No official client of the current protocol pulls, so the requests are written out.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon
from support.wire_client import WireClient, a_message

from broker_adapter.wire import rocketmq_v2 as wire

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
    found: list[str] = []
    while offset < offset_of(client, "QueryOffset", queue_id, query_offset_policy=wire.END):
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
            ids = [f"m-{run}-{number}" for number in range(40)]
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


def pull_all(client: WireClient, queue_id: int) -> list[str]:
    """Read a queue from its beginning, without saying how far that was."""
    found: list[str] = []
    offset = 0
    while offset < offset_of(client, "QueryOffset", queue_id, query_offset_policy=wire.END):
        some, offset = pull(client, queue_id, offset)
        found += some
    return found
