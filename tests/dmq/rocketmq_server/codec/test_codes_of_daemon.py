"""Every code of the protocol is either provoked here, over the wire from a real daemon, or has a reason why not."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.clients.wire.client import WireClient, a_message, a_receive
from support.clients.wire.protocol import consumer_settings
from support.rigs.daemon.acl import SHOP, write_acl
from support.rigs.daemon.process import STOP_S_MAX, Daemon
from support.rigs.faults.disk_shim import Shim

from broker_adapter.contracts.limits import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX
from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = pytest.mark.integration

_TOPIC, _GROUP = wire.Resource(name="orders"), wire.Resource(name="billing")
_QUEUE = wire.MessageQueue(topic=_TOPIC, id=0)
_BAD = wire.Resource(name="not a name")

_NEVER = {
    wire.CODE_UNSPECIFIED: "every answer has a code",
    wire.ILLEGAL_LITE_TOPIC: "lite topics are not served: 50100",
    wire.INVALID_CLIENT_PROPERTIES: "nothing a client says about itself is needed to serve it",
    wire.PAYMENT_REQUIRED: "nobody pays",
    wire.REQUEST_TIMEOUT: "a call that takes too long ends with the caller's own deadline",
    wire.PAYLOAD_TOO_LARGE: "a request above the limit ends with gRPC's RESOURCE_EXHAUSTED, before it is read",
    wire.PRECONDITION_FAILED: "no call has a precondition that has no code of its own",
    wire.LITE_TOPIC_QUOTA_EXCEEDED: "lite topics are not served: 50100",
    wire.LITE_SUBSCRIPTION_QUOTA_EXCEEDED: "lite topics are not served: 50100",
    wire.REQUEST_HEADER_FIELDS_TOO_LARGE: "headers above the limit end with gRPC's RESOURCE_EXHAUSTED",
    wire.INTERNAL_ERROR: "what is our fault is 50001, as Apache's proxy has it",
    wire.HA_NOT_AVAILABLE: "there is one copy",
    wire.PROXY_TIMEOUT: "there is no proxy between this server and its broker",
    wire.MASTER_PERSISTENCE_TIMEOUT: "an answer waits for the disk, or says 50001",
    wire.SLAVE_PERSISTENCE_TIMEOUT: "there is one copy",
    wire.UNSUPPORTED: "what is not served is 50100",
    wire.VERSION_UNSUPPORTED: "every version of a client is served",
    wire.VERIFY_FIFO_MESSAGE_UNSUPPORTED: "said by clients, to the server",
    wire.FAILED_TO_CONSUME_MESSAGE: "said by clients, to the server",
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all codes but the one that ends it; a client may have one telemetry stream."""
    env = {**os.environ, "DMQ_STREAMS_PER_CLIENT_MAX": "1"}
    with Daemon(tmp_path_factory.mktemp("codes") / "data", env=env) as running:
        yield running
        running.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[WireClient]:
    with WireClient(daemon.address) as connected:
        yield connected


_Provocation = Callable[[WireClient], wire.Status]
_given: dict[int, _Provocation] = {}


def _gives(code: int) -> Callable[[_Provocation], _Provocation]:
    """Mark what provokes ``code``."""

    def register(provoke: _Provocation) -> _Provocation:
        assert code not in _given
        _given[code] = provoke
        return provoke

    return register


def _sent(client: WireClient, *messages: wire.Message) -> wire.Status:
    return client.send(*messages).status


def _answered(client: WireClient, rpc: str, request: object) -> wire.Status:
    status: wire.Status = client.ask(rpc, request).status
    return status


def _received(client: WireClient, request: object) -> wire.Status:
    status: wire.Status = client.frames("ReceiveMessage", request)[0].status
    return status


# What a send is refused for.
_SENDS = {
    wire.OK: a_message("orders", "good"),
    wire.ILLEGAL_TOPIC: a_message("not a name", "m"),
    wire.ILLEGAL_MESSAGE_TAG: a_message("orders", "m", tag="a|b"),
    wire.ILLEGAL_MESSAGE_GROUP: a_message("orders", "m", message_group="g" * 64),
    wire.ILLEGAL_MESSAGE_PROPERTY_KEY: a_message("orders", "m", properties={"UNIQ_KEY": "x"}),
    wire.ILLEGAL_MESSAGE_ID: a_message("orders", " "),
    wire.ILLEGAL_DELIVERY_TIME: a_message("orders", "m", properties={"DELAY": "soon"}),
    wire.MESSAGE_BODY_TOO_LARGE: a_message("orders", "m", bytes(BODY_BYTES_MAX + 1)),
    wire.MESSAGE_BODY_EMPTY: a_message("orders", "m", b""),
    wire.MESSAGE_PROPERTIES_TOO_LARGE: a_message("orders", "m", properties={"k": "v" * PROPERTIES_BYTES_MAX}),
}
for _code, _message in _SENDS.items():
    _gives(_code)(lambda client, message=_message: _sent(client, message))  # type: ignore[misc]


@_gives(wire.ILLEGAL_MESSAGE_KEY)
def _a_blank_key(client: WireClient) -> wire.Status:
    message = a_message("orders", "m")
    message.system_properties.keys.append(" ")
    return _sent(client, message)


@_gives(wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE)
def _a_delay_without_a_time(client: WireClient) -> wire.Status:
    message = a_message("orders", "m")
    message.system_properties.message_type = wire.DELAY
    return _sent(client, message)


@_gives(wire.MESSAGE_CORRUPTED)
def _a_send_of_nothing(client: WireClient) -> wire.Status:
    return _sent(client)


@_gives(wire.MULTIPLE_RESULTS)
def _one_good_handle_and_one_bad(client: WireClient) -> wire.Status:
    client.send(a_message("mixed", "m"))
    (good,) = client.receive("mixed", "billing", wait_s=5)
    return client.ack("mixed", "billing", [good, good._replace(receipt_handle="nonsense")]).status


@_gives(wire.ILLEGAL_ACCESS_POINT)
def _a_host_that_is_none(client: WireClient) -> wire.Status:
    dialled = wire.Endpoints(scheme=wire.DOMAIN_NAME, addresses=[wire.Address(host="h" * 2000, port=1)])
    return _answered(client, "QueryRoute", wire.QueryRouteRequest(topic=_TOPIC, endpoints=dialled))


@_gives(wire.BAD_REQUEST)
def _bytes_that_are_no_message(client: WireClient) -> wire.Status:
    return _answered(client, "QueryRoute", b"\xff\xff\xff\xff")


@_gives(wire.ILLEGAL_CONSUMER_GROUP)
def _a_bad_group(client: WireClient) -> wire.Status:
    return _answered(client, "Heartbeat", wire.HeartbeatRequest(group=_BAD, client_type=wire.PUSH_CONSUMER))


@_gives(wire.INVALID_TRANSACTION_ID)
def _no_transaction_id(client: WireClient) -> wire.Status:
    request = wire.EndTransactionRequest(topic=_TOPIC, transaction_id="nonsense", resolution=wire.COMMIT)
    return _answered(client, "EndTransaction", request)


@_gives(wire.ILLEGAL_FILTER_EXPRESSION)
def _bad_sql(client: WireClient) -> wire.Status:
    request = a_receive("orders", "billing", tags="a >")
    request.filter_expression.type = wire.SQL
    return _received(client, request)


@_gives(wire.ILLEGAL_INVISIBLE_TIME)
def _invisible_for_a_moment(client: WireClient) -> wire.Status:
    return _received(client, a_receive("orders", "billing", invisible_s=1))


@_gives(wire.INVALID_RECEIPT_HANDLE)
def _no_handle(client: WireClient) -> wire.Status:
    request = wire.ChangeInvisibleDurationRequest(topic=_TOPIC, group=_GROUP, receipt_handle="nonsense")
    return _answered(client, "ChangeInvisibleDuration", request)


@_gives(wire.UNRECOGNIZED_CLIENT_TYPE)
def _a_lite_consumer(client: WireClient) -> wire.Status:
    return _answered(client, "Heartbeat", wire.HeartbeatRequest(group=_GROUP, client_type=wire.LITE_PUSH_CONSUMER))


@_gives(wire.CLIENT_ID_REQUIRED)
def _nobody(client: WireClient) -> wire.Status:
    with WireClient(client.address, client_id="") as nobody:
        return _sent(nobody, a_message("orders", "m"))


@_gives(wire.ILLEGAL_POLLING_TIME)
def _a_poll_into_the_past(client: WireClient) -> wire.Status:
    return _received(client, a_receive("orders", "billing", wait_s=-1))


@_gives(wire.TOPIC_NOT_FOUND)
def _a_recall_from_a_topic_nobody_knows(client: WireClient) -> wire.Status:
    sent = client.send(a_message("orders", "later", deliver_at_ms=4_000_000_000_000)).entries[0]
    request = wire.RecallMessageRequest(topic=wire.Resource(name="unheard-of"), recall_handle=sent.recall_handle)
    return _answered(client, "RecallMessage", request)


@_gives(wire.NOT_FOUND)
def _a_recall_of_a_delivered_message_by_python(client: WireClient) -> wire.Status:
    return _recall_too_late(client.address, "PYTHON")


@_gives(wire.MESSAGE_NOT_FOUND)
def _a_recall_of_a_delivered_message(client: WireClient) -> wire.Status:
    return _recall_too_late(client.address, "JAVA")


def _recall_too_late(address: str, language: str) -> wire.Status:
    with WireClient(address, language=language) as client:
        topic = f"late-{language}"
        sent = client.send(a_message(topic, "m", properties={"TIMER_DELAY_MS": "500"})).entries[0]
        assert client.drain(topic, "billing", 1)
        request = wire.RecallMessageRequest(topic=wire.Resource(name=topic), recall_handle=sent.recall_handle)
        return _answered(client, "RecallMessage", request)


@_gives(wire.TOO_MANY_REQUESTS)
def _a_second_stream(client: WireClient) -> wire.Status:
    with _telemetry(client) as first:
        assert next(first).status.code == wire.OK  # it is there before the second is opened
        with _telemetry(client) as second:
            status: wire.Status = next(second).status
            return status


@contextmanager
def _telemetry(client: WireClient) -> Iterator[Iterator[Any]]:
    """An open stream that said its settings; the frames that come back."""
    frames: queue.SimpleQueue[wire.TelemetryCommand | None] = queue.SimpleQueue()
    frames.put(consumer_settings())
    call = client.open("Telemetry", iter(frames.get, None))
    try:
        yield call
    finally:
        call.cancel()
        frames.put(None)


@_gives(wire.ILLEGAL_OFFSET)
def _a_pull_from_beyond_the_end(client: WireClient) -> wire.Status:
    assert _sent(client, a_message("orders", "pulled")).code == wire.OK
    request = wire.PullMessageRequest(group=_GROUP, message_queue=_QUEUE, offset=1_000, batch_size=1)
    status: wire.Status = client.frames("PullMessage", request)[0].status
    return status


@_gives(wire.OFFSET_NOT_FOUND)
def _where_a_group_continues_that_never_said(client: WireClient) -> wire.Status:
    return _answered(client, "GetOffset", wire.GetOffsetRequest(group=_GROUP, message_queue=_QUEUE))


@_gives(wire.NOT_IMPLEMENTED)
def _lite_topics(client: WireClient) -> wire.Status:
    return _answered(client, "SyncLiteSubscription", wire.SyncLiteSubscriptionRequest())


@pytest.mark.parametrize("code", list(_given), ids=lambda code: f"{code}-{wire.Code.Name(code)}")
def test_a_code_is_given(client: WireClient, code: int) -> None:
    """The answer has this code, and a text that says why."""
    status = _given[code](client)
    assert (wire.Code.Name(status.code), status.message) == (wire.Code.Name(code), status.message)
    assert status.message


def test_a_disk_that_fails_is_50001(tmp_path: Path) -> None:
    """The send is in doubt, and its answer says so; the daemon ends, because nothing can be promised any more."""
    shim = Shim(tmp_path)
    env = {**os.environ, **shim.environment, "DMQ_TRAIL": "off"}  # no write of an export comes before the second send
    with Daemon(tmp_path / "data", env=env) as daemon, WireClient(daemon.address) as client:
        assert client.send(a_message("orders", "good")).status.code == wire.OK
        shim.fail()
        status = client.send(a_message("orders", "in-doubt")).status
        assert (status.code, "in doubt" in status.message) == (wire.INTERNAL_SERVER_ERROR, True)
        assert daemon.wait(STOP_S_MAX) == 1


def test_a_daemon_refuses_the_configured_requests(tmp_path: Path) -> None:
    """With access keys 40100 and 40300; where groups are not made on first use, 40403."""
    env = {**os.environ, "DMQ_GROUP_AUTO_CREATE": "false"}
    with Daemon(tmp_path / "data", "--acl", str(write_acl(tmp_path)), env=env) as daemon:
        with WireClient(daemon.address) as nobody:
            assert _sent(nobody, a_message("orders", "m")).code == wire.UNAUTHORIZED
        with WireClient(daemon.address, signer=SHOP.signer()) as shop:
            assert _sent(shop, a_message("not-mine", "m")).code == wire.FORBIDDEN
            assert _received(shop, a_receive("orders", "billing")).code == wire.CONSUMER_GROUP_NOT_FOUND


def test_every_code_is_accounted_for() -> None:
    """A new code of the protocol has to be given, or to have a reason; and none has both."""
    of_others = {wire.INTERNAL_SERVER_ERROR, wire.UNAUTHORIZED, wire.FORBIDDEN, wire.CONSUMER_GROUP_NOT_FOUND}
    given = {*_given, *of_others}
    assert not given & set(_NEVER)
    assert given | set(_NEVER) == set(wire.Code.values())
