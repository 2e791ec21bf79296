"""HPACK: whatever a legal encoder says is understood, and whatever else comes is a fault of the connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.http2.codec import huffman
from dmq.http2.codec.hpack import NAME_BYTES_MAX, TABLE_BYTES, Decoder, value_of
from dmq.http2.errors import Code, ConnectionFault, HpackFault
from dmq.http2.testing.peer import Encoder

pytestmark = pytest.mark.property
NAMES = st.sampled_from([":path", ":method", "te", "x-mq-client-id", "x-mq-request-id", "authorization", "n" * 60])
VALUES = st.one_of(
    st.sampled_from(["", "POST", "trailers", "/a/b", "v" * 500, "w" * 2000, "x" * 5000]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=40),
)
BLOCKS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 33, 100, 1000, TABLE_BYTES]), max_size=2),  # changes of the table's size
        st.lists(st.tuples(NAMES, VALUES, st.booleans(), st.booleans(), st.booleans()), max_size=12),
    ),
    max_size=15,
)
_FAULTS = {Code.COMPRESSION_ERROR, Code.ENHANCE_YOUR_CALM}  # it is none, or it costs more than its bound


@given(BLOCKS)
def test_legal_encoders_are_understood(blocks: list[tuple[list[int], list[tuple[str, str, bool, bool, bool]]]]) -> None:
    """The decoder keeps a superset of the true table, and no encoder that keeps to the rules sees a difference."""
    encoder, decoder = Encoder(), Decoder(10**9)
    for sizes, fields in blocks:
        block = b"".join(map(encoder.resize, sizes))
        for name, value, is_huffman, is_kept, is_never in fields:
            block += encoder.field((name, value), is_huffman=is_huffman, is_kept=is_kept, is_never=is_never)
        names, values, is_whole = decoder.decode(block)
        assert is_whole
        assert [(name, value_of(wire)) for name, wire in zip(names, values, strict=True)] == [
            (name, value) for name, value, *_ in fields
        ]
        assert decoder.table_bytes <= TABLE_BYTES


@given(st.lists(st.binary(max_size=300), max_size=10), st.integers(0, 2000))
def test_noise_raises_nothing_else(blocks: list[bytes], list_bytes_max: int) -> None:
    """Any bytes are a block or a fault; the list keeps its bound, and values are text or a fault."""
    decoder = Decoder(list_bytes_max)
    try:
        for block in blocks:
            names, values, _ = decoder.decode(block)
            assert sum(map(len, names)) + sum(map(len, values)) <= list_bytes_max
            assert decoder.table_bytes <= TABLE_BYTES
            for wire in values:
                value_of(wire)
    except ConnectionFault as fault:
        if fault.code not in _FAULTS:
            raise


@given(BLOCKS, st.data())
def test_damaged_blocks_raise_nothing_else(
    blocks: list[tuple[list[int], list[tuple[str, str, bool, bool, bool]]]], data: st.DataObject
) -> None:
    """Legal blocks with a few bytes changed reach further into the decoder than noise does."""
    encoder, decoder = Encoder(), Decoder(4000)
    try:
        for _, fields in blocks:
            block = bytearray(encoder.encode([field[:2] for field in fields]))
            for _ in range(data.draw(st.integers(0, 3)) if block else 0):
                block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
            for wire in decoder.decode(bytes(block))[1]:
                value_of(wire)
    except ConnectionFault as fault:
        if fault.code not in _FAULTS:
            raise


def test_a_name_beyond_all_measure_is_such_a_fault() -> None:
    """A few changed bytes make one of a long value, which the two tests above meet once in some thousand runs."""
    decoder = Decoder(4000)
    with pytest.raises(ConnectionFault) as raised:
        decoder.decode(Encoder().field(("n" * (NAME_BYTES_MAX + 1), ""), is_huffman=False, is_kept=False))
    assert raised.value.code in _FAULTS


@given(st.binary(max_size=200))
def test_huffman_code_both_ways(raw: bytes) -> None:
    """Every text survives, and what is accepted is the code of what it is decoded to: nothing has two spellings."""
    assert huffman.decode(huffman.encode(raw)) == raw
    try:
        text = huffman.decode(raw)
    except HpackFault:
        return
    assert huffman.encode(text) == raw
