"""Our own producers behind one line: what is kept of a send, what their errors mean, where repetitions run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from broker_adapter.contracts.errors import BrokerAway, BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import BodyEncoding, Message
from broker_adapter.contracts.own_keys import OWN_KEY
from broker_adapter.runtime.clock import ManualClock
from retry import Death, Permanent, Retry, SendRejected, Spooled, Throttled, Unreadable, durable
from retry.hook.producers.broker_producers import BrokerCodec, classify
from retry.hook.producers.codecs import join
from retry.hook.producers.rocketmq import UID_PROPERTY
from retry.testing import FakeProducer, MemorySink, advance, run_due

UID = bytes(range(16))


class Producer(FakeProducer):
    """What is known by its class and its home; fails as told."""

    __module__ = "broker_adapter.queue_client.producer.producer"
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, *script: Any) -> None:  # noqa: ANN401
        super().__init__(script)
        self.how: list[dict[str, Any]] = []
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def send(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self.how.append(kwargs)
        self.loops.append(asyncio.get_running_loop())
        return super().send(*args, **kwargs)


class BlockingProducer(FakeProducer):
    """The same without an event loop."""

    __module__ = "broker_adapter.queue_client.blocking"


def test_every_field_of_a_message_comes_back() -> None:
    """Beside it, the uid as a property; what the sender gave is never replaced."""
    message = Message(
        "orders",
        b"\x00body",
        message_id="its-own",
        tag="t",
        keys=("a", "b"),
        properties={"name": "välue"},
        message_group="g",
        deliver_at_ms=9,
        body_encoding=BodyEncoding.GZIP,
        born_at_ms=7,
        born_host="h",
    )
    codec = BrokerCodec(ManualClock())
    encoded = codec.encode(UID, (message,), {"timeout_ms": 5})
    again = codec.decode(UID, encoded.payload)
    assert encoded.first is not None
    assert (again.args, again.kwargs) == (encoded.first.args, {"timeout_ms": 5})
    (back,) = again.args
    assert back.properties == {"name": "välue", UID_PROPERTY: UID.hex()}
    assert {
        name: getattr(back, name) for name in ("message_id", "keys", "deliver_at_ms", "born_at_ms", "born_host")
    } == {
        "message_id": "its-own",
        "keys": ("a", "b"),
        "deliver_at_ms": 9,
        "born_at_ms": 7,
        "born_host": "h",
    }
    assert back.body_encoding is BodyEncoding.GZIP
    assert encoded.key == "g"


def test_messages_of_one_own_key_keep_their_order() -> None:
    """Danger: what was kept in an outage is sent behind a later one, and cancels that: the last word does not count."""
    message = Message("carts", b"x", properties={OWN_KEY: "cart-17"})
    codec = BrokerCodec(ManualClock())
    assert codec.encode(UID, (message,), {}).key == "cart-17"
    assert codec.encode(UID, (replace(message, message_group="g"),), {}).key == "g"


def test_a_message_that_cannot_be_kept_is_reported_at_once() -> None:
    """A function, a transaction's second argument, no message; and bytes of a later version stay for one that can."""
    codec, message = BrokerCodec(ManualClock()), Message("orders", b"x")
    with pytest.raises(TypeError, match="chooses the queue cannot be kept"):
        codec.encode(UID, (message,), {"choose": min})
    for args, kwargs in (((), {}), ((b"x",), {}), ((message, 1), {}), ((message,), {"since_ms": 1})):
        with pytest.raises(TypeError, match="supports send"):
            codec.encode(UID, args, kwargs)
    with pytest.raises(ValueError, match="no body"):
        codec.encode(UID, (Message("orders", b""),), {})
    for payload in (b"", join({"v": 2}, b"x"), join({"v": 1}, b"x"), join({"v": 1, "keys": [], "properties": 3}, b"x")):
        with pytest.raises(Unreadable):
            codec.decode(UID, payload)


def caused(error: BrokerError, cause: BrokerError) -> BrokerError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "is_uncertain"),
    [
        (Refused(Rule.BODY_SIZE, "the body"), Permanent, False),
        (Refused(Rule.REQUEST, "said by a broker", code=25), Permanent, False),
        (Refused(Rule.TOPIC_UNKNOWN, "none"), Retry, False),
        (Refused(Rule.FORBIDDEN, "no"), Retry, False),
        (Overloaded("busy", limit=1), Throttled, False),
        (BrokerUnavailable("no answer"), Retry, True),
        (BrokerAway("no connection"), Retry, False),
        (caused(BrokerAway("no connection"), BrokerUnavailable("no answer")), Retry, True),
        (caused(Refused(Rule.TAG, "illegal"), BrokerUnavailable("no answer")), Permanent, True),
    ],
)
def test_meanings_of_errors(error: BrokerError, kind: type, is_uncertain: bool) -> None:
    """By the rule that was broken; an earlier attempt in doubt puts the whole send in doubt."""
    verdict = classify(error)
    assert type(verdict) is kind
    assert verdict is not None
    assert verdict.is_uncertain is is_uncertain


def test_errors_of_others_are_left_to_the_defaults() -> None:
    assert classify(ValueError("x")) is None


def test_a_blocking_producer_repeats_under_one_id() -> None:
    """Also that of the first attempt, which may have got through; a level counts from then."""
    clock, producer = ManualClock(), BlockingProducer([BrokerUnavailable("no answer")])
    proxy = durable(producer, MemorySink(clock), autostart=False)
    begun_ms = clock.now_ms()
    outcome = proxy.send(Message("orders", b"x"), delay_level=3)
    assert isinstance(outcome, Spooled)
    assert outcome.is_uncertain
    assert advance(proxy.redelivery, clock, 3_300) == 1
    first, again = producer.calls
    assert first == again
    assert len(first.message_id) == 34
    assert first.properties == {UID_PROPERTY: outcome.uid.hex()}
    assert BrokerCodec(clock).encode(UID, (first,), {}).first.args == (  # type: ignore[union-attr]
        Message("orders", b"x", message_id=first.message_id, born_at_ms=begun_ms, properties={UID_PROPERTY: UID.hex()}),
    )


def test_a_refused_message_raises_and_a_kept_one_is_buried() -> None:
    """Nothing about the message is tried again."""
    clock, illegal = ManualClock(), Refused(Rule.TAG, "illegal")
    producer = BlockingProducer([illegal, BrokerAway("away"), illegal])
    proxy = durable(producer, MemorySink(clock), autostart=False)
    with pytest.raises(Refused, match="illegal"):
        proxy.send(Message("orders", b"x"))
    assert isinstance(proxy.send(Message("orders", b"y")), Spooled)
    advance(proxy.redelivery, clock, 3_300)
    (name,) = proxy.redelivery._handlers
    assert [each.death for each in proxy.redelivery.dead(name)] == [Death.PERMANENT]


def test_repetitions_run_on_the_loop_of_the_producer() -> None:
    """Whichever thread makes them; before it is started and after its loop is closed they wait."""
    clock, producer = ManualClock(), Producer(BrokerAway("away"), BrokerAway("away"))
    proxy = durable(producer, MemorySink(clock), autostart=False)

    async def main() -> asyncio.AbstractEventLoop:
        assert isinstance(await proxy.send(Message("orders", b"1"), delay_level=2), Spooled)
        assert await asyncio.to_thread(advance, proxy.redelivery, clock, 3_300) == 1
        assert len(producer.how) == 1  # not started, so it was not called
        producer.loop = asyncio.get_running_loop()
        await asyncio.to_thread(advance, proxy.redelivery, clock, 10_000)
        return producer.loop

    begun_ms = clock.now_ms()
    loop = asyncio.run(main())
    assert producer.loops == [loop, loop]
    assert producer.how == [{"delay_level": 2}, {"delay_level": 2, "since_ms": begun_ms}]
    clock.advance(60_000)
    run_due(proxy.redelivery)
    assert len(producer.how) == 2  # its loop is closed
    (entry,) = proxy.redelivery._sink.entries
    assert "loop of the producer is closed" in entry.error
    proxy.redelivery.close()
    with pytest.raises(SendRejected, match="closed"):
        asyncio.run(proxy.send(Message("orders", b"2")))
