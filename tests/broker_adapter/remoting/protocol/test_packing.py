"""Bodies that are compressed in each way, and what is none, or too much."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from lz4 import frame as lz4

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.remoting.protocol.packing import Compression, method_bits, pack, unpack

METHODS = tuple(Compression)
BOMBS: dict[Compression, Callable[[], bytes]] = {
    Compression.LZ4: lambda: lz4.compress(bytes(64 * 1024 * 1024)),
    Compression.ZSTD: lambda: zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024)),
    Compression.ZLIB: lambda: pack(bytes(64 * 1024 * 1024), Compression.ZLIB),
}


@given(st.binary(max_size=3000), st.sampled_from(METHODS))
def test_a_body_comes_back_as_it_was(body: bytes, method: Compression) -> None:
    """Packed in each way."""
    assert unpack(pack(body, method), method_bits(method)) == body


@pytest.mark.parametrize("method", METHODS)
def test_a_body_of_the_greatest_size_comes_back(method: Compression) -> None:
    """Exactly 4 MiB."""
    body = bytes(BODY_BYTES_MAX)
    assert unpack(pack(body, method), method_bits(method)) == body


@pytest.mark.parametrize("method", METHODS)
def test_a_body_of_one_byte_more_is_not_unpacked(method: Compression) -> None:
    """Nor is one of 64 MiB, whose few bytes must not cost that much memory."""
    for packed in (pack(bytes(BODY_BYTES_MAX + 1), method), BOMBS[method]()):
        with pytest.raises(ValueError, match=f"more than {BODY_BYTES_MAX} bytes"):
            unpack(packed, method_bits(method))


@pytest.mark.parametrize("method", METHODS)
def test_half_a_body_is_none(method: Compression) -> None:
    """It ends in the middle."""
    packed = pack(bytes(range(256)) * 20, method)
    with pytest.raises(ValueError, match="is truncated"):
        unpack(packed[:-5], method_bits(method))


@given(st.binary(max_size=200), st.integers(0, 7))
def test_any_bytes_are_a_body_or_none(content: bytes, number: int) -> None:
    """No other error comes of what a sender packed."""
    with suppress(ValueError):
        unpack(content, number << 8)


@given(st.sampled_from(METHODS), st.data())
def test_a_damaged_body_is_a_body_or_none(method: Compression, data: st.DataObject) -> None:
    """One byte that is another one."""
    content = bytearray(pack(b"hello" * 50, method))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        unpack(bytes(content), method_bits(method))


@pytest.mark.parametrize(("method", "module"), [(Compression.LZ4, "lz4"), (Compression.ZSTD, "zstandard")])
def test_without_the_library_the_installation_is_named(
    method: Compression, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base distribution does not bring it."""
    packed = pack(b"hello", method)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"pip install 'rock-dmq\[classic\]' to read it"):
        unpack(packed, method_bits(method))
