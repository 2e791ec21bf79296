"""Receipt handles: they say everything, and nothing is believed that this store has not written."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.handles.receipt_handle import ReceiptHandle, ReceiptHandles, name_of, read_receipt
from dmq.store.files.identity import draw
from dmq.store.schema.cell.identity import Identity, StorePlace

IDENTITY = Identity(7, bytes(range(32)))
HANDLES = ReceiptHandles(IDENTITY, 1)
receipts = st.builds(
    ReceiptHandle,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.booleans(),
    st.binary(max_size=300).map(name_of),
)
ALPHABET = string.ascii_letters + string.digits + "-_"


def refused(handle: str, handles: ReceiptHandles = HANDLES) -> bool:
    """Say whether a handle is refused, as the one rule it may break."""
    try:
        handles.decode(handle)
    except Refused as error:
        return error.rule is Rule.RECEIPT_HANDLE
    return False


@given(receipt=receipts)
def test_a_handle_returns_its_contents(receipt: ReceiptHandle) -> None:
    """All fields, over their whole range, in text that any client passes on unharmed."""
    handle = HANDLES.encode(receipt)
    assert HANDLES.decode(handle) == read_receipt(handle) == receipt
    assert set(handle) <= set(ALPHABET)


@given(receipt=receipts, at=st.integers(0, 10_000), letter=st.sampled_from(ALPHABET))
def test_a_changed_letter_is_noticed(receipt: ReceiptHandle, at: int, letter: str) -> None:
    """Any letter at any place; one that is a digit in capitals means the same."""
    handle = HANDLES.encode(receipt)
    at %= len(handle)
    changed = handle[:at] + letter + handle[at + 1 :]
    assert refused(changed) or HANDLES.decode(changed) == receipt


@given(receipt=receipts, cut=st.integers(1, 60))
def test_a_shorter_or_longer_handle_is_noticed(receipt: ReceiptHandle, cut: int) -> None:
    """Cut at either end, or doubled."""
    handle = HANDLES.encode(receipt)
    assert refused(handle[:-cut])
    assert refused(handle[cut:])
    assert refused(handle + handle)


@given(handle=st.text(max_size=80))
def test_no_text_crashes(handle: str) -> None:
    """Whatever a client sends is refused, not an error of ours."""
    assert refused(handle)


@given(raw=st.binary(max_size=100))
def test_no_digits_are_believed(raw: bytes) -> None:
    """Well-formed text with other bytes in it."""
    assert refused(raw.hex())


@pytest.mark.parametrize(
    "other",
    [
        Identity(8, IDENTITY.secret),
        Identity(7, bytes(32)),
        draw(StorePlace()),
    ],
    ids=["another number", "another secret", "both"],
)
@given(receipt=receipts)
def test_handles_of_another_store_are_refused(other: Identity, receipt: ReceiptHandle) -> None:
    """Of a copy, and of one whose number somebody knows."""
    assert refused(ReceiptHandles(other, 1).encode(receipt))
    assert refused(HANDLES.encode(receipt), ReceiptHandles(other, 1))


@given(two=st.lists(st.binary(max_size=300), min_size=2, max_size=2, unique=True))
def test_no_two_messages_have_one_name(two: list[bytes]) -> None:
    """However long their ids are."""
    assert name_of(two[0]) != name_of(two[1])


def test_a_handle_of_an_earlier_version_is_refused() -> None:
    """Version 3 had a checksum, which anybody can make."""
    assert refused("03000000010000000200030000000000000004000000000000000500060040c355bb")


def test_an_identity_does_not_reveal_its_secret() -> None:
    """Wherever it is logged."""
    assert repr(IDENTITY) == "Identity(0000000000000007)"
    assert draw(StorePlace()).number != draw(StorePlace()).number
