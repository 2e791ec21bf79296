"""Receipt handles: they say everything, and nothing that was changed on the way is believed."""

from __future__ import annotations

import string
from binascii import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.errors import Refused, Rule
from dmq.embedded.receipt import Receipt, decode_handle, encode_handle

receipts = st.builds(
    Receipt,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.booleans(),
)
ALPHABET = string.ascii_letters + string.digits + "-_"


def refused(handle: str) -> bool:
    """Say whether a handle is refused, as the one rule it may break."""
    try:
        decode_handle(handle)
    except Refused as error:
        return error.rule is Rule.RECEIPT_HANDLE
    return False


@given(receipt=receipts)
def test_a_handle_says_what_was_put_in(receipt: Receipt) -> None:
    """All fields, over their whole range, in text that any client passes on unharmed."""
    handle = encode_handle(receipt)
    assert decode_handle(handle) == receipt
    assert set(handle) <= set(ALPHABET)


@given(receipt=receipts, at=st.integers(0, 10_000), letter=st.sampled_from(ALPHABET))
def test_a_changed_letter_is_noticed(receipt: Receipt, at: int, letter: str) -> None:
    """Any letter at any place; one that is a digit in capitals means the same."""
    handle = encode_handle(receipt)
    at %= len(handle)
    changed = handle[:at] + letter + handle[at + 1 :]
    assert refused(changed) or decode_handle(changed) == receipt


@given(receipt=receipts, cut=st.integers(1, 60))
def test_a_shorter_or_longer_handle_is_noticed(receipt: Receipt, cut: int) -> None:
    """Cut at either end, or doubled."""
    handle = encode_handle(receipt)
    assert refused(handle[:-cut])
    assert refused(handle[cut:])
    assert refused(handle + handle)


@given(handle=st.text(max_size=80))
def test_no_text_crashes(handle: str) -> None:
    """Whatever a client sends is refused, not an error of ours."""
    assert refused(handle)


@given(raw=st.binary(max_size=60))
def test_no_digits_are_believed(raw: bytes) -> None:
    """Well-formed text with other bytes in it."""
    assert refused(raw.hex())


@pytest.mark.parametrize("version", [0, 1, 2, 4, 255])
def test_another_version_is_refused(version: int) -> None:
    """With a correct checksum: an earlier or a later format is not read as this one."""
    raw = bytes.fromhex(encode_handle(Receipt(1, 2, 3, 4, 5, 6)))
    packed = bytes([version]) + raw[1:-4]
    assert refused((packed + crc32(packed).to_bytes(4, "big")).hex())
