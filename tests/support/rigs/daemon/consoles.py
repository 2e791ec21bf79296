"""A console of a real daemon in a process of its own, and messages in all states for its pages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from playwright.sync_api import Page
from support.clients.wire.client import Received, WireClient, a_message, a_receive, received_of
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.wire import consumer_v1
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.signature import Signer
from dmq.admin import admin_v1 as admin_wire
from dmq.admin.client import AdminClient

MINUTE_MS: Final = 60_000
TOPIC: Final = "orders"
GROUP: Final = "billing"
FAILED_TOPIC: Final = "parcels"
FAILED_GROUP: Final = "shipping"  # its failed messages wait for an hour
HOSTILE: Final = '<script>alert("1")</script><img src=x onerror=alert(2)>"\'&\u202e'

Open = Callable[..., Page]  # opens an address in a window of its own


class Site(NamedTuple):
    """A console, its daemon, and the ids of the dead letters."""

    url: str
    daemon: Daemon
    dead: list[str]


@contextmanager
def console(address: str, *options: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run ``dmq console`` for the daemon, and yield the URL of its overview."""
    command = [sys.executable, "-m", "dmq", "console", "--address", address, "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("console ").strip()
        finally:
            process.terminate()


def message_id(number: int) -> str:
    """Return an id that is the same in each run."""
    return new_message_id(1_795_219_200_000, 4711, number.to_bytes(10, "big"))


def fill(address: str, signer: Signer | None = None, *, dead: int = 3, delayed: int = 60) -> list[str]:
    """Send messages, delay some, and give some up; return the ids of the dead letters."""
    now_ms = int(time.time() * 1000)
    with WireClient(address, "console-1", signer) as client:
        for number in range(dead):
            body = json.dumps({"order": 4700 + number, "note": HOSTILE, "lines": [{"sku": "A-1", "count": 2}]}).encode()
            sent = a_message(
                TOPIC, message_id(number), body, tag="created", properties={"order-id": str(4700 + number)}
            )
            sent.system_properties.keys.append(f"order-{4700 + number}")
            _accepted(client, sent)
        held: list[Received] = []
        while len(held) < dead:
            held += client.receive(TOPIC, GROUP, wait_s=2)
        for each in held:
            request = wire.ForwardMessageToDeadLetterQueueRequest(
                topic=wire.Resource(name=TOPIC),
                group=wire.Resource(name=GROUP),
                message_id=each.message_id,
                receipt_handle=each.receipt_handle,
                delivery_attempt=1,
                max_delivery_attempts=1,
            )
            assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == wire.OK
        for number in range(delayed):
            after_ms = (number * 7 % 49 + 10) * MINUTE_MS if number % 5 else number * 22 * MINUTE_MS + 90 * MINUTE_MS
            _accepted(
                client,
                a_message(
                    TOPIC, message_id(1000 + number), b"\x00\xffbinary", deliver_at_ms=now_ms + after_ms, tag="later"
                ),
            )
    return [each.message_id for each in held]


def fail(address: str, number: int = 3) -> list[str]:
    """Send messages that their group fails with a reported reason; return their ids, which wait for a retry."""
    with AdminClient(address) as admin, WireClient(address, "packer-1") as client:
        policy = admin_wire.Policy(fixed=admin_wire.FixedBackoff(delay_ms=60 * MINUTE_MS), max_attempts=4)
        admin.set_group(FAILED_GROUP, policy=policy)
        admin.create_topic(FAILED_TOPIC, queues=1)
        for place in range(number):
            _accepted(client, a_message(FAILED_TOPIC, message_id(2000 + place), b'{"parcel": 7}'))
        failed: list[Received] = []
        while len(failed) < number:
            request = a_receive(FAILED_TOPIC, FAILED_GROUP, batch=32, wait_s=2)
            request.auto_renew = True  # as a push consumer, whose failures follow the policy of the group
            received = received_of(client.frames("ReceiveMessage", request))
            for each in received:
                report_failure(client, FAILED_GROUP, each, "CourierError", f"no courier {HOSTILE}", "packer-host")
                client.change_invisible(FAILED_TOPIC, FAILED_GROUP, each, 1_000)
            failed += received
        while admin.group(FAILED_GROUP).waiting < number:
            time.sleep(0.05)
    return [each.message_id for each in failed]


def report_failure(client: WireClient, group: str, delivery: Received, error: str, text: str, host: str) -> None:
    """Report the reason of a failure, which the next failure of this delivery has."""
    method = consumer_v1.METHODS["ReportFailure"]
    request = consumer_v1.ReportFailureRequest(
        group=group, receipt_handle=delivery.receipt_handle, error_type=error, error_text=text, host=host
    )
    call = client.channel.unary_unary(
        method.path, consumer_v1.ReportFailureRequest.SerializeToString, consumer_v1.ReportFailureResponse.FromString
    )
    assert call(request, timeout=30, metadata=client._metadata).status.code == wire.OK


def _accepted(client: WireClient, message: wire.Message) -> None:
    answer = client.send(message)
    assert answer.status.code == wire.OK, answer
