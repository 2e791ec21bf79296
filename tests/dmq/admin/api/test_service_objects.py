"""Topics and groups as objects, over the wire: what clients and operators of a real daemon are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.clients.wire.client import WireClient, a_message, a_receive
from support.rigs.daemon.process import Daemon

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient, CallRefused, NotFound

pytestmark = pytest.mark.integration
_STRICT = os.environ | {"DMQ_TOPIC_AUTO_CREATE": "false", "DMQ_GROUP_AUTO_CREATE": "false", "DMQ_TRAIL": "off"}
_LATER_MS = 4_000_000_000_000


def test_only_created_topics_are_served_with_their_types(tmp_path: Path) -> None:
    """40402 and 40403 for names that nobody made, 40014 for another type; also after a kill, until they are removed."""
    with (
        Daemon(tmp_path / "data", env=_STRICT) as daemon,
        WireClient(daemon.address) as client,
        AdminClient(daemon.address) as admin,
    ):

        def route(topic: str) -> wire.QueryRouteResponse:
            answer: wire.QueryRouteResponse = client.ask(
                "QueryRoute", wire.QueryRouteRequest(topic=wire.Resource(name=topic))
            )
            return answer

        assert route("orders").status.code == wire.TOPIC_NOT_FOUND
        assert client.send(a_message("orders", "m-1")).status.code == wire.TOPIC_NOT_FOUND
        refused = client.frames("ReceiveMessage", a_receive("orders", "workers"))
        assert refused[0].status.code == wire.CONSUMER_GROUP_NOT_FOUND
        admin.create_group("workers")
        for number, type_ in enumerate(("NORMAL", "FIFO", "DELAY", "MIXED"), 1):
            assert admin.create_topic(type_.lower(), queues=number, type=type_).type == type_
        daemon.kill()
        daemon.restart()
        sent = {
            "normal": a_message("", "normal"),
            "fifo": a_message("", "fifo", message_group="g"),
            "delay": a_message("", "delay", deliver_at_ms=_LATER_MS),
        }
        for topic in ("normal", "fifo", "delay", "mixed"):
            for type_, message in sent.items():
                message.topic.name = topic
                code = client.send(message).status.code
                fits = topic in {type_, "mixed"}
                assert code == (wire.OK if fits else wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE)
        assert [list(queue.accept_message_types) for queue in route("fifo").message_queues] == [[wire.FIFO]] * 2
        assert len(route("mixed").message_queues[0].accept_message_types) == 4
        assert len(client.drain("mixed", "workers", 2)) == 2
        shown = admin.topic("mixed")
        assert [(reader.group, reader.unread) for reader in shown.readers] == [("workers", 0)]
        with pytest.raises(CallRefused, match="1 wait for their time"):
            admin.remove_topic("mixed")
        admin.remove_topic("mixed", force=True)
        admin.remove_group("workers")
        assert route("mixed").status.code == wire.TOPIC_NOT_FOUND
        for call in (lambda: admin.topic("mixed"), lambda: admin.group("workers")):
            with pytest.raises(NotFound):
                call()
