"""One line around a producer: its send keeps what it cannot send, the rest stays as it was."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker_adapter.runtime.clock import ManualClock
from retry import (
    Arguments,
    Death,
    Delivered,
    Encoded,
    HandlerExists,
    Permanent,
    Redelivery,
    SendRejected,
    SinkFull,
    Spooled,
    durable,
)
from retry.testing import FakeProducer, MemorySink, advance, run_due

AWAY = ConnectionError("away")
ROOT = Path(__file__).resolve().parents[4]


class Producer(FakeProducer):
    """A producer with more than a send."""

    def __init__(self, script: list[Any] | None = None) -> None:
        super().__init__(script or [])
        self.retries = 3
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def send(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as a producer's
        """Send, and remember with what."""
        self.given.append((args, kwargs))
        return super().send(*args, **kwargs)

    def flush(self) -> str:
        """Something else a producer has."""
        return "flushed"


def make(producer: Any, **options: Any) -> tuple[Any, MemorySink, ManualClock]:  # noqa: ANN401 - any producer
    """Return the durable producer, its sink and its clock."""
    clock = ManualClock()
    sink = MemorySink(clock)
    return durable(producer, sink, autostart=False, **options), sink, clock


def test_a_send_that_succeeds_gives_the_producers_own_receipt() -> None:
    """With the very objects the caller gave."""
    producer = Producer(["receipt"])
    proxy, sink, _ = make(producer)
    value = {"a": [1]}
    assert proxy.send("topic", value=value) == "receipt"
    assert producer.given[0][1]["value"] is value
    assert sink.entries == []


def test_a_send_that_fails_is_repeated_with_the_same_arguments() -> None:
    """Spooled comes back, and later the call is made again."""
    producer = Producer([AWAY])
    proxy, _, clock = make(producer)
    assert isinstance(proxy.send("topic", b"body", headers={"n": 1, "$b": "x"}), Spooled)
    assert advance(proxy.redelivery, clock, 3_300) == 1
    assert producer.given == [(("topic", b"body"), {"headers": {"n": 1, "$b": "x"}})] * 2


def test_everything_else_is_the_producers_own() -> None:
    """Attributes are read and written through, methods are called, what is missing is missing."""
    producer = Producer()
    proxy, _, _ = make(producer)
    assert proxy.flush() == "flushed"
    proxy.retries = 5
    assert producer.retries == 5
    assert "flush" in dir(proxy)
    assert "redelivery" in dir(proxy)
    with pytest.raises(AttributeError, match="nothing"):
        _ = proxy.nothing


def test_a_function_can_be_wrapped_itself() -> None:
    """`send = durable(producer.send, sink)`."""
    producer = Producer([AWAY])
    send, _, clock = make(producer.send)
    assert isinstance(send(b"1"), Spooled)
    advance(send.redelivery, clock, 3_300)
    assert producer.sent == [b"1"]


def test_a_message_that_cannot_be_kept_fails_before_the_first_attempt() -> None:
    """On a developer's desk, with the place and the type, and not in an outage."""
    producer = Producer()
    proxy, _, _ = make(producer)
    for value in (object(), {1: 2}, {"deep": [object()]}):
        with pytest.raises(TypeError, match="argument 1 holds"):
            proxy.send(value)
    with pytest.raises(ValueError, match="'price' holds nan"):
        proxy.send(price=float("nan"))
    assert producer.calls == []


def test_a_refused_message_raises_the_producers_own_error() -> None:
    """The application's except clauses go on working."""
    error = Permanent("too large")
    proxy, sink, _ = make(Producer([error]))
    with pytest.raises(Permanent) as raised:
        proxy.send(b"1")
    assert raised.value is error
    assert sink.entries == []


def test_a_message_neither_sent_nor_kept_raises() -> None:
    """The producer's error if there was one, with the sink's in its notes; else SendRejected."""
    producer = Producer([AWAY] * 5)
    proxy, sink, _ = make(producer)
    sink.fail("put", SinkFull("1 GiB waits", limit="bytes_max"), times=9)
    for _ in range(5):
        with pytest.raises(ConnectionError):
            proxy.send(b"1")
    assert any("1 GiB waits" in note for note in AWAY.__notes__)
    with pytest.raises(SendRejected, match="1 GiB waits") as rejected:  # the breaker is open: not attempted
        proxy.send(b"1")
    assert isinstance(rejected.value.__cause__, SinkFull)


def test_a_coroutine_function_gives_one() -> None:
    """Awaited on the caller's loop at first, repeated on the hook's."""
    producer = Producer([AWAY, "receipt"])
    send, _, clock = make(producer.send_async)

    async def main() -> tuple[object, object]:
        return await send(b"1"), await send(b"2")

    first, second = asyncio.run(main())
    assert isinstance(first, Spooled)
    assert second == "receipt"
    advance(send.redelivery, clock, 3_300)
    assert producer.sent == [b"2", b"1"]
    send.redelivery.close()


def test_it_joins_a_hook_that_exists() -> None:
    """Two producers on one hook need two names; one name is a clear error."""
    hook = Redelivery(MemorySink(ManualClock()), autostart=False)
    durable(Producer(), hook, type_name="orders")
    durable(Producer(), hook)
    with pytest.raises(HandlerExists, match="Producer-send"):
        durable(Producer(), hook)
    with pytest.raises(TypeError, match="queue_max"):
        durable(Producer(), hook, type_name="x", queue_max=3)
    with pytest.raises(TypeError, match="has no send"):
        durable(object(), hook)


def test_as_a_context_manager_it_closes_the_hook_it_made() -> None:
    """And leaves alone one that was given."""
    with make(Producer())[0] as proxy:
        sink = proxy.redelivery._sink
    assert sink.is_closed
    hook = Redelivery(MemorySink(ManualClock()), autostart=False)
    with durable(Producer(), hook):
        pass
    assert isinstance(hook.send(next(iter(hook._handlers)), b'{"v":1,"a":[],"k":{}}'), Delivered)


class Upper:
    """A codec that keeps text, has keys, and cannot read everything."""

    def encode(self, uid: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
        return Encoded(payload=args[0].encode(), key="k")

    def decode(self, uid: bytes, payload: bytes) -> Arguments:
        return Arguments(args=(payload.decode("ascii").upper(),))


def test_a_codec_of_the_application_with_a_key() -> None:
    """Messages of the key stay in order; bytes it raises on are an unknown error, an Unreadable one buries them."""
    producer = Producer([AWAY])
    proxy, _, clock = make(producer, codec=Upper())
    proxy.send("a")
    assert "earlier messages" in proxy.send("b").reason
    advance(proxy.redelivery, clock, 3_300)
    assert producer.sent == ["A", "B"]


def test_bytes_that_cannot_be_decoded_are_buried_and_kept() -> None:
    """A version that was rolled back meets what a later one wrote."""
    proxy, sink, clock = make(Producer([AWAY]))
    proxy.send(b"1")
    (entry,) = sink.entries
    clock.advance(3_300)
    (held,) = sink.take(entry.type_name, 1, 0.0)
    sink.finish(held)
    future = type(entry)(
        type_name=entry.type_name, uid=entry.uid, payload=b'{"v":2}', created_at_ms=0, due_at_ms=clock.now_ms()
    )
    sink.put(future).result()
    assert run_due(proxy.redelivery) == 1
    (dead,) = proxy.redelivery.dead(entry.type_name)
    assert (dead.death, dead.entry.payload) == (Death.UNREADABLE, b'{"v":2}')


OFFICIAL_MESSAGE = """
from rocketmq import Message, Producer
from rocketmq.v5.exception import (BadRequestException, IllegalArgumentException, IllegalStateException,
                                   ProxyTimeoutException, TooManyRequestsException, UnauthorizedException)
from rocketmq.v5.client.balancer import QueueSelector
from broker_adapter.runtime.clock import ManualClock
from retry import Spooled, durable
from retry.hook.producers.rocketmq import RocketMqCodec, UID_PROPERTY, classify
from retry.testing import MemorySink, advance

class Away(Producer):
    def __init__(self):
        self.calls = []
    def __del__(self):
        pass
    def send(self, message, transaction=None):
        self.calls.append(message)
        message.message_id = "made at each attempt"
        if len(self.calls) == 1:
            raise IllegalStateException("producer is not running now.")
        return "receipt"

clock = ManualClock()
producer = Away()
proxy = durable(producer, MemorySink(clock), autostart=False)
message = Message()
message.topic, message.body, message.tag, message.message_group = "orders", b"\\x00body", "t", "g"
message.keys = "k1"
message.keys = "k2"
message.add_property("name", "value")
outcome = proxy.send(message)
assert isinstance(outcome, Spooled), outcome
uid = outcome.uid.hex()
assert message.properties[UID_PROPERTY] == uid
(entry,) = proxy.redelivery._sink.entries
assert entry.key == "g"
assert advance(proxy.redelivery, clock, 3_300) == 1
again = producer.calls[1]
assert again is not message
assert (again.topic, again.body, again.tag, again.message_group) == ("orders", b"\\x00body", "t", "g")
assert again.keys == {"k1", "k2"}
assert again.properties == {"name": "value", UID_PROPERTY: uid}
assert proxy.send(again) == "receipt"

"""
OFFICIAL_NAMES = """
import tempfile
from dmq.producer_store.spool import Spool
from retry.sink import Entry

kept = Message()
kept.topic, kept.body = "orders", b"kept by an earlier build"
with tempfile.TemporaryDirectory() as root:
    with Spool(root) as spool:
        now_ms = spool.clock.now_ms()
        spool.put(Entry(type_name="rocketmq-v5-producer-producer-Producer-send", uid=bytes(16), created_at_ms=now_ms,
                        due_at_ms=now_ms, payload=RocketMqCodec().encode(bytes(16), (kept,), {}).payload)).result()
    producer = object.__new__(Producer)
    Producer.__del__ = lambda self: None
    sent = []
    producer.send = sent.append
    with Spool(root, is_driven=True) as spool:
        hook = durable(producer, spool, autostart=False).redelivery
        assert list(hook._handlers) == ["rocketmq-Producer-send"]
        hook.run_due()  # from here on somebody wants it
        spool.turn()
        assert hook.run_due() == 1
        assert sent[0].body == kept.body
        hook.close()

"""
OFFICIAL_ERRORS = """
later = Message()
later.topic, later.body, later.delivery_timestamp = "orders", b"1", 1_800_000_000
codec = RocketMqCodec()
(back,) = codec.decode(bytes(16), codec.encode(bytes(16), (later,), {}).payload).args
assert back.delivery_timestamp == 1_800_000_000
later.add_property("DMQ_KEY", "cart-17")
assert codec.encode(bytes(16), (later,), {}).key == "cart-17"
for call in [((), {}), ((later, object()), {}), ((later,), {"transaction": 1}), ((Message(),), {})]:
    try:
        codec.encode(bytes(16), *call)
    except (TypeError, ValueError):
        continue
    raise AssertionError(call)

def kind(error):
    verdict = classify(error)
    return type(verdict).__name__, getattr(verdict, "is_uncertain", None)
assert kind(BadRequestException("x", 1)) == ("Permanent", False)
assert kind(IllegalArgumentException("x")) == ("Permanent", False)
assert kind(TooManyRequestsException("x", 1)) == ("Throttled", False)
assert kind(UnauthorizedException("x", 1)) == ("Retry", False)
assert kind(ProxyTimeoutException("x", 1)) == ("Retry", True)
assert kind(ValueError("x")) == ("NoneType", None)
try:
    QueueSelector([], QueueSelector.PRODUCER_QUEUE_SELECTOR).select_next_queue()
except IllegalArgumentException as error:
    assert kind(error) == ("Retry", False)

"""
OFFICIAL_ATTEMPTS = """
import grpc
from concurrent.futures import Future
from rocketmq.v5.client.client_route_manager import ClientRouteManager

class Down(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE

def answer(error):
    future = Future()
    future.set_exception(error)
    return future

def attempt(*errors):  # as the client goes from one attempt to the next
    try:
        Producer._Producer__handle_send_result(producer, answer(errors[0]), None)
    except Exception as error:
        if len(errors) == 1:
            raise
        attempt(*errors[1:])

def kind_of(*errors, how=attempt):
    try:
        how(*errors)
    except Exception as error:
        return kind(error)

no_connection, broken = "failed to connect to all addresses", "Socket closed"
assert kind_of(Down(no_connection), Down(no_connection)) == ("Retry", False)
assert kind_of(Down(no_connection), Down(broken)) == ("Retry", True)
assert kind_of(Down(broken), Down(no_connection), Down(no_connection)) == ("Retry", True)
assert kind_of(ProxyTimeoutException("x", 1), UnauthorizedException("x", 1)) == ("Retry", True)
assert kind_of(Down(broken), TooManyRequestsException("x", 1)) == ("Throttled", True)
assert kind_of(ConnectionError("before the client")) == ("Retry", False)

def __handle_send_response_async(error):  # the name of the client's callback
    attempt(error)
assert kind_of(Down(no_connection), how=__handle_send_response_async) == ("Retry", True)

class Routes(ClientRouteManager):
    def __init__(self):
        self._ClientRouteManager__topic_route_cache = {}
    def update_topic_route(self, topic):
        return None
assert kind_of("orders", how=Routes().retrieve_topic_route_data) == ("Retry", False)
print("done")
"""


def test_messages_of_the_official_client(tmp_path: Path) -> None:
    """All fields come back, the uid is a property, the group is the key, and its errors mean what they should.

    In a process of its own: the client writes a log file when it is imported.
    """
    script = OFFICIAL_MESSAGE + OFFICIAL_NAMES + OFFICIAL_ERRORS + OFFICIAL_ATTEMPTS
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
