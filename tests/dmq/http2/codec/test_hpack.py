"""HPACK: the examples of RFC 7541, what no encoder may send, and bounds on what a decoder keeps."""

from __future__ import annotations

import pytest

from dmq.http2.codec import huffman
from dmq.http2.codec.hpack import TABLE_BYTES, Decoder, literal, value_of
from dmq.http2.errors import Code, ConnectionFault, HpackFault
from dmq.http2.testing.peer import Encoder, integer, text

BIG = 64 * 1024


def decoded(decoder: Decoder, block: bytes) -> list[tuple[str, str]]:
    names, values, _ = decoder.decode(block)
    return [(name, value_of(wire)) for name, wire in zip(names, values, strict=True)]


PLAIN = ("828684410f7777772e6578616d706c652e636f6d", "828684be58086e6f2d6361636865")
HUFFMAN = ("828684418cf1e3c2e5f23a6ba0ab90f4ff", "828684be5886a8eb10649cbf")


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN])
def test_examples_of_the_rfc(blocks: tuple[str, str]) -> None:
    """Appendix C.3 and C.4: two requests on one connection, plain and in Huffman code."""
    decoder = Decoder(BIG)
    base = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
    assert decoded(decoder, bytes.fromhex(blocks[0])) == base
    assert decoded(decoder, bytes.fromhex(blocks[1])) == [*base, ("cache-control", "no-cache")]


def test_number_of_the_rfc() -> None:
    """Appendix C.1.2: 1337 behind a prefix of five bits, here as the size of a table that is too large."""
    assert integer(1337, 5, 0x20).hex() == "3f9a0a"
    decoder = Decoder(BIG)
    decoder.decode(bytes.fromhex("3f9a0a"))
    with pytest.raises(HpackFault, match="above the offered size"):
        decoder.decode(integer(TABLE_BYTES + 1, 5, 0x20))


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"\x80", "outside the header tables"),
        (integer(62, 7, 0x80), "outside the header tables"),
        (integer(70, 6, 0x40) + b"\x01a", "outside the header tables"),
        (b"\xff", "inside an integer"),
        (b"\xff\xff\xff\xff\xff\xff\x01", "too many bytes"),
        (b"\xff\xff\xff\xff\xff\x7f", "too large"),
        (b"\x40", "before a string"),
        (b"\x40\x05ab", "inside a string"),
        (b"\x40\x01a", "before a string"),
        (b"\x40\x01a\x05b", "inside a string"),
        (b"\x82\x20", "inside a header block"),
        (b"\x40\x81\x18\x01a", "padding"),
        (b"\x40\x85\x1c\x64\xff\xff\xff\x01a", "padding"),
    ],
)
def test_illegal_blocks_are_refused(block: bytes, why: str) -> None:
    """Each ends the connection with COMPRESSION_ERROR: the tables could not agree any more."""
    with pytest.raises(HpackFault, match=why) as caught:
        Decoder(BIG).decode(block)
    assert caught.value.code is Code.COMPRESSION_ERROR


def test_huffman_code_covers_every_byte() -> None:
    """Every byte value survives, and the end-of-string symbol is refused wherever it stands."""
    every = bytes(range(256))
    assert huffman.decode(huffman.encode(every)) == every
    for shift in range(8):
        bits = "00000" * shift + "1" * 30
        bits += "1" * (-len(bits) % 8)
        with pytest.raises(HpackFault):
            huffman.decode(int(bits, 2).to_bytes(len(bits) // 8))


def test_values_are_decoded_late() -> None:
    """A value that nobody asks for may be wrong; it is found out when it is asked for."""
    names, values, is_whole = Decoder(BIG).decode(b"\x40\x01a\x81\x18")
    assert (names, is_whole) == (("a",), True)
    with pytest.raises(HpackFault, match="padding"):
        value_of(values[0])


def test_forbidden_characters_come_out_replaced() -> None:
    """A value cannot carry a line break into a log, nor bytes that are no text."""
    assert value_of(text(b"a\r\nb\0c", is_huffman=True)) == "a\ufffd\ufffdb\ufffdc"
    assert value_of(text(b"\xff", is_huffman=False)) == "\ufffd"


def test_list_over_its_bound_is_left_out_and_the_table_stays_right() -> None:
    """The block that is refused still adds its entries, so the next one means what its sender meant."""
    decoder, encoder = Decoder(200), Encoder()
    large = [("a", "1" * 150), ("b", "2" * 150)]
    names, _, is_whole = decoder.decode(encoder.encode(large, is_huffman=False))
    assert (names, is_whole) == ((), False)
    names, values, is_whole = decoder.decode(encoder.encode([("b", "2" * 150)]))
    assert (names, value_of(values[0]), is_whole) == (("b",), "2" * 150, True)


def test_hpack_bomb_takes_no_memory() -> None:
    """One entry of 4 KiB, referred to 2 000 times: nothing is kept of the list; 60 000 times: nothing more is read."""
    decoder, encoder = Decoder(BIG), Encoder()
    decoder.decode(encoder.encode([("bomb", "x" * 4000)]))
    names, values, is_whole = decoder.decode(b"\xbe" * 2_000)
    assert (names, values, is_whole) == ((), (), False)
    with pytest.raises(ConnectionFault, match="too many header fields"):
        decoder.decode(b"\xbe" * 60_000)
    assert decoder.decode(b"\xbe" * 18)[2] is True
    assert decoder.decode(b"\xbe" * 19)[2] is False


def test_the_table_is_bounded_for_any_input() -> None:
    """Entries in Huffman code count less than their text, and are bounded all the same."""
    decoder = Decoder(10**9)
    for number in range(3000):
        raw = bytes((number & 0xFF, number >> 8)) * 700
        decoder.decode(b"\x40\x01k" + integer(len(raw), 7, 0x80 if number % 2 else 0) + raw)
        assert decoder.table_bytes <= TABLE_BYTES


def test_entry_larger_than_the_table_empties_it() -> None:
    """It is legal to add one, and it is not there afterwards."""
    decoder, encoder = Decoder(BIG), Encoder()
    block = encoder.encode([("a", "1"), ("b", "x" * 5000)], is_huffman=False)
    decoder.decode(block)
    assert encoder.table == []
    assert decoded(decoder, encoder.encode([("a", "1")])) == [("a", "1")]
    assert decoded(decoder, encoder.encode([("a", "1")])) == [("a", "1")]


def test_table_shrinks_and_grows_at_the_beginning_of_a_block() -> None:
    """Two changes in one block are legal: to nothing, and back."""
    decoder, encoder = Decoder(BIG), Encoder()
    decoder.decode(encoder.encode([("a", "1"), ("b", "2")]))
    block = encoder.resize(0) + encoder.resize(100) + encoder.encode([("c", "3")])
    assert decoded(decoder, block) == [("c", "3")]
    assert 33 <= decoder.table_bytes <= 34  # a lower bound of the true size
    assert decoded(decoder, encoder.encode([("c", "3"), ("a", "1")])) == [("c", "3"), ("a", "1")]


def test_literal_of_our_own_needs_no_table() -> None:
    """Constant blocks are decoded by anybody at any time, and leave no trace."""
    decoder = Decoder(BIG)
    long = literal("grpc-message", b"m" * 300)
    assert decoded(decoder, literal("grpc-status", b"0") + long) == [("grpc-status", "0"), ("grpc-message", "m" * 300)]
    assert decoder.table_bytes == 0
