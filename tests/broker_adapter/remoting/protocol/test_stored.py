"""Messages as a classic broker stores them: those of a real one, damaged ones, and anything else."""

from __future__ import annotations

import gzip
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forges.messages.stored import COMPRESSED, INNER_BATCH, NOW, V6_HOSTS, a_stored

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.remoting.protocol.frames import FrameBroken, decode_frame
from broker_adapter.remoting.protocol.stored import StoredMessage, UnreadableMessage, decode_messages, to_message

CAPTURED = Path(__file__).parents[3] / "golden" / "remoting"
PULLED = decode_frame((CAPTURED / "answer-pull.bin").read_bytes()).body
BATCH = decode_frame((CAPTURED / "answer-pull-batch.bin").read_bytes()).body


def read(content: bytes) -> StoredMessage:
    """The one message of ``content``, which is well."""
    (found,) = decode_messages(content)
    assert isinstance(found, StoredMessage), found
    return found


def why_not(content: bytes) -> str:
    """Why the one message of ``content`` cannot be read; its place can."""
    (found,) = decode_messages(content)
    assert isinstance(found, UnreadableMessage), found
    assert (found.queue_offset, found.stored_at_ms) == (41, NOW)
    return found.why


def test_a_message_of_a_real_broker_is_read() -> None:
    """With its sender's own properties, and none of RocketMQ's."""
    found = read(PULLED)
    message = to_message(found)
    assert (found.queue_id, found.queue_offset, found.attempts_failed) == (3, 0, 0)
    assert (found.stored_at_ms, message.born_at_ms, message.born_host) == (1795557245669, 1700000000000, "here")
    assert (message.topic, message.message_id) == ("normal-0", "017736725568DB26150B17A17D23C42E7A")
    assert (message.body, message.tag, message.keys) == (b"props", "t", ("k1", "k2"))
    assert message.properties == {"a": "1", "b": "ü"}


def test_several_of_a_real_broker_follow_on_each_other() -> None:
    """As a pull returns them."""
    found = [each for each in decode_messages(BATCH) if isinstance(each, StoredMessage)]
    assert [(each.queue_offset, each.body) for each in found] == [(0, b"plain 0"), (1, b"plain 1"), (2, b"plain 2")]


def test_both_forms_and_both_kinds_of_hosts_are_read() -> None:
    """A message that no client gave an id has the broker's."""
    assert read(a_stored(form=2))._replace(size_bytes=0) == read(a_stored())._replace(size_bytes=0)
    assert read(a_stored(bits=V6_HOSTS)).born_host == "[::1]:5"
    assert read(a_stored(message_id="")).message_id == "7F00000100002A9F0000000000002328"


@pytest.mark.parametrize("packed", [zlib.compress(b"hello"), gzip.compress(b"hello", mtime=0)])
def test_a_compressed_body_is_unpacked(packed: bytes) -> None:
    """Clients of both protocols say the same of two methods."""
    assert read(a_stored(packed, bits=COMPRESSED)).body == b"hello"
    assert read(a_stored(packed, bits=COMPRESSED | 3 << 8)).body == b"hello"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (a_stored(crc=1), "its body is damaged"),
        (a_stored(bits=INNER_BATCH), "a batch in one message"),
        (a_stored(b"no lz4 at all", bits=COMPRESSED | 1 << 8), "not LZ4"),
        (a_stored(bits=COMPRESSED | 2 << 8), "not Zstandard"),
        (a_stored(bits=COMPRESSED | 7 << 8), "compressed with method 7"),
        (a_stored(b"no zlib", bits=COMPRESSED), "incorrect header"),
        (a_stored(zlib.compress(b"hello")[:-3], bits=COMPRESSED), "is truncated"),
        (a_stored(zlib.compress(bytes(BODY_BYTES_MAX + 1)), bits=COMPRESSED), "more than"),
    ],
)
def test_an_unreadable_one_gives_the_reason(content: bytes, why: str) -> None:
    """And stands in nobody's way: those around it are read."""
    assert why in why_not(content)
    before, _, behind = decode_messages(a_stored() + content + a_stored())
    assert isinstance(before, StoredMessage)
    assert isinstance(behind, StoredMessage)


@pytest.mark.parametrize("content", [PULLED[:-1], PULLED + b"\0", bytes(100), struct.pack(">i", -5) + bytes(200)])
def test_where_no_message_begins_all_is_refused(content: bytes) -> None:
    """Half a message, none at all."""
    with pytest.raises(FrameBroken):
        list(decode_messages(content))


@given(st.data())
def test_any_damage_is_reported(data: st.DataObject) -> None:
    """One byte of a real one that is another one: read, unreadable or broken, and no other error."""
    content = bytearray(PULLED)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        for each in decode_messages(bytes(content)):
            if isinstance(each, StoredMessage):
                to_message(each)
    except FrameBroken:
        pass


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_broken(content: bytes) -> None:
    """No other error comes of what a broker sends."""
    with suppress(FrameBroken):
        list(decode_messages(content))
