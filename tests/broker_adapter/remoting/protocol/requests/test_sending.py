"""Sends as fields and bodies of the protocol."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.classic import Outgoing, SendStatus
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.contracts.message import BodyEncoding, Message
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.remoting.protocol.codes import Operation
from broker_adapter.remoting.protocol.frames import FrameBroken, RemotingFrame
from broker_adapter.remoting.protocol.packing import Compression, unpack
from broker_adapter.remoting.protocol.properties import decode_properties
from broker_adapter.remoting.protocol.requests.sending import (
    Send,
    decode_batch,
    encode_item,
    receipt_of,
    send_batch,
    send_one,
)

QUEUE = MessageQueue("t", "broker-a", 3)
LARGE = b"x" * 4096


def one(message: Message, *, compression: Compression | None = Compression.ZLIB, **more: object) -> Send:
    outgoing = Outgoing(message=message, **more)  # type: ignore[arg-type]
    return send_one("g", QUEUE, outgoing, message_id="M", now_ms=5, compression=compression)


def properties_of(send: Send) -> dict[str, str]:
    return decode_properties(send.fields["i"].encode())


def test_a_send_names_its_queue_and_its_message() -> None:
    """With as many attempts as a consumer says that failed."""
    send = one(
        Message("t", b"x", tag="a", born_at_ms=4), attempts_failed=2, attempts_max=16, system={"RETRY_TOPIC": "o"}
    )
    named = {"a": "g", "b": "t", "e": "3", "f": "0", "g": "4", "j": "2", "l": "16", "m": "false", "n": "broker-a"}
    assert {name: send.fields[name] for name in named} == named
    assert properties_of(send) == {"TAGS": "a", "WAIT": "true", "UNIQ_KEY": "M", "RETRY_TOPIC": "o"}
    assert (send.operation, send.body, send.has_delivery_time) == (Operation.SEND, b"x", False)
    assert "l" not in one(Message("t", b"x")).fields


def test_a_delay_level_wins_over_a_delivery_time() -> None:
    """Only the latter needs a broker that knows times."""
    timed = one(Message("t", b"x", deliver_at_ms=9))
    assert properties_of(timed)["TIMER_DELIVER_MS"] == "9"
    assert timed.has_delivery_time
    level = one(Message("t", b"x", deliver_at_ms=9), delay_level=3)
    assert properties_of(level)["DELAY"] == "3"
    assert "TIMER_DELIVER_MS" not in properties_of(level)
    assert not level.has_delivery_time


def test_a_half_message_names_its_producer() -> None:
    """The broker asks that group."""
    half = one(Message("t", b"x"), is_half=True)
    assert half.fields["f"] == "4"
    assert properties_of(half).items() >= {"TRAN_MSG": "true", "PGROUP": "g"}.items()


@pytest.mark.parametrize(
    ("message", "compression", "bits"),
    [
        (Message("t", LARGE[1:]), Compression.ZLIB, 0),
        (Message("t", LARGE), None, 0),
        (Message("t", LARGE), Compression.ZLIB, 1 | 3 << 8),
        (Message("t", LARGE), Compression.LZ4, 1 | 1 << 8),
        (Message("t", LARGE), Compression.ZSTD, 1 | 2 << 8),
        (Message("t", bytes(range(256)) * 16, body_encoding=BodyEncoding.GZIP), Compression.ZLIB, 1),
    ],
)
def test_a_large_body_is_compressed(message: Message, compression: Compression | None, bits: int) -> None:
    """From 4 KiB on, unless its sender did it or wants none."""
    send = one(message, compression=compression)
    assert send.fields["f"] == str(bits)
    assert (unpack(send.body, bits) if bits > 1 else send.body) == message.body


def test_incompressible_bytes_stay_as_they_are() -> None:
    """Compressed already, for one."""
    send = one(Message("t", Random(1).randbytes(5000)))
    assert (send.fields["f"], len(send.body)) == ("0", 5000)


@pytest.mark.parametrize(("body", "rule"), [(b"", Rule.BODY_EMPTY), (bytes(BODY_BYTES_MAX + 1), Rule.BODY_SIZE)])
def test_a_body_that_no_broker_takes_is_refused(body: bytes, rule: Rule) -> None:
    """Before it travels."""
    with pytest.raises(Refused) as refused:
        one(Message("t", body))
    assert refused.value.rule is rule


def batch(*messages: Outgoing) -> Send:
    return send_batch("g", QUEUE, messages, message_ids=[f"M{number}" for number in range(len(messages))], now_ms=5)


def test_a_batch_holds_its_messages_with_their_ids() -> None:
    """In their order."""
    send = batch(*(Outgoing(message=Message("t", body, tag="a")) for body in (b"1", b"22")))
    found = [(body, decode_properties(text)["UNIQ_KEY"]) for body, text in decode_batch(send.body)]
    assert found == [(b"1", "M0"), (b"22", "M1")]
    assert (send.operation, send.fields["m"]) == (Operation.SEND_BATCH, "true")


@pytest.mark.parametrize(
    "other",
    [
        Outgoing(message=Message("t", b"x", deliver_at_ms=9)),
        Outgoing(message=Message("t", b"x"), delay_level=1),
        Outgoing(message=Message("t", b"x"), is_half=True),
        Outgoing(message=Message("u", b"x")),
        Outgoing(message=Message("t", b"x", body_encoding=BodyEncoding.GZIP)),
    ],
)
def test_an_impossible_batch_is_refused(other: Outgoing) -> None:
    """A broker would ignore it, or store it where it does not belong."""
    with pytest.raises(Refused) as refused:
        batch(Outgoing(message=Message("t", b"x")), other)
    assert refused.value.rule is Rule.REQUEST


@given(st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=30)), max_size=4), st.data())
def test_a_damaged_batch_is_a_batch_or_broken(items: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    """Whole it comes back as it was; with one byte changed nothing but ``FrameBroken`` comes of it."""
    content = bytearray(b"".join(encode_item(*item) for item in items))
    assert list(decode_batch(bytes(content))) == items
    if content:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        with suppress(FrameBroken):
            list(decode_batch(bytes(content)))


def test_a_receipt_states_its_durability() -> None:
    """Codes 10 to 12 are no failures."""
    fields = {"msgId": "O", "queueId": "3", "queueOffset": "7", "recallHandle": "R"}
    for code, status in ((0, SendStatus.STORED), (10, SendStatus.FLUSH_TIMEOUT), (11, SendStatus.NO_REPLICA)):
        receipt = receipt_of(RemotingFrame(code=code, fields=fields), QUEUE, "M", "a:1")
        assert receipt == (status, "M", QUEUE, 7, "O", "M", "R")
    with pytest.raises(FrameBroken, match="queueOffset"):
        receipt_of(RemotingFrame(code=0, fields={"queueId": "3"}), QUEUE, "M", "a:1")
