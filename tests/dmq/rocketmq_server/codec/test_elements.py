"""Elements of a request, counted before it is parsed."""

from __future__ import annotations

import tracemalloc

import pytest
from support.clients.wire.protocol import a_message, a_send

from broker_adapter.contracts.errors import Refused
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.rocketmq_server.codec.elements import ELEMENTS_MAX, SEND_ELEMENTS_MAX, check_elements, count_elements, shape_of

SEND = shape_of(wire.SendMessageRequest)


def count(body: bytes, stop_at: int = 10**9) -> int:
    return count_elements(body, SEND, stop_at)


def test_every_field_counts_wherever_it_stands() -> None:
    """Messages, fields in them, entries of maps and what is in those."""
    one = wire.SendMessageRequest(messages=[wire.Message()]).SerializeToString()
    assert count(one) == 1
    assert count(one * 500) == 500
    message = a_message("01A", b"body", "orders", {"a": "1", "b": "2"})
    # message, topic, its name, two entries of two, system properties, the id, the body
    assert count(a_send(message).SerializeToString()) == 1 + 2 + 6 + 2 + 1


def test_a_large_body_is_one_element() -> None:
    """Its bytes are not looked at."""
    assert count(a_send(a_message(body=b"\x0a\x00" * 2_000_000)).SerializeToString()) < 10


def test_numbers_in_a_list_count_each() -> None:
    """Packed, they take a byte each."""
    body = wire.ReceiveMessageRequest(
        message_queue=wire.MessageQueue(accept_message_types=[wire.NORMAL] * 1000)
    ).SerializeToString()
    assert count_elements(body, shape_of(wire.ReceiveMessageRequest), 10**9) == 1002


def test_counting_stops_and_takes_no_memory() -> None:
    """Danger: 64 MiB of empty messages; no more of them are looked at than are allowed."""
    body = b"\x0a\x00" * (32 * 2**20)
    tracemalloc.start()
    try:
        assert count(body, SEND_ELEMENTS_MAX) == SEND_ELEMENTS_MAX + 1
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_no_more_messages_are_looked_at_than_a_send_may_have() -> None:
    """Danger: 4 MiB of empty messages, each of them looked at, to be refused for their number."""
    body = b"\x0a\x00" * 1024
    assert count_elements(body, SEND, SEND_ELEMENTS_MAX, 1024) == 1024
    assert count_elements(body + b"\x0a\x00", SEND, SEND_ELEMENTS_MAX, 1024) > SEND_ELEMENTS_MAX


@pytest.mark.parametrize(
    "body", [b"\x0a", b"\x0a\xff", b"\x80" * 100, b"\xff" * 100, b"\x0a\x05\x0a\x09abc", b"\x0b" * 50, b"\x07"]
)
def test_bytes_that_are_no_message_are_left_to_the_parser(body: bytes) -> None:
    """Cut short, lengths beyond the end, numbers without end, groups, unknown kinds."""
    assert count(body) <= len(body)


def test_compressed_requests_may_have_as_many_as_their_bytes_allow() -> None:
    """Danger: a few bytes of gzip that are thousands of messages."""
    body = b"\x0a\x00" * 6000
    check_elements(body, SEND, 0, SEND_ELEMENTS_MAX)
    check_elements(body, SEND, 1000, SEND_ELEMENTS_MAX)
    with pytest.raises(Refused, match="limit 4496"):
        check_elements(body, SEND, 50, SEND_ELEMENTS_MAX)


def test_the_largest_honest_requests_are_admitted() -> None:
    """1,024 messages with 30 properties each; 1,024 acknowledgements."""
    messages = [a_message(f"{n}", b"x", "orders", {f"p{m}": "v" for m in range(30)}) for n in range(1024)]
    check_elements(a_send(*messages).SerializeToString(), SEND, 0, SEND_ELEMENTS_MAX)
    entries = [wire.AckMessageEntry(message_id=f"{n}", receipt_handle="h" * 100) for n in range(1024)]
    acks = wire.AckMessageRequest(entries=entries).SerializeToString()
    check_elements(acks, shape_of(wire.AckMessageRequest), 0, ELEMENTS_MAX)
