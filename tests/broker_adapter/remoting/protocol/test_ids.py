"""Ids of messages: made, and read."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.remoting.protocol.ids import UniqueKeys, broker_of_handle, decode_offset_id, encode_offset_id


def ms(*moment: int) -> int:
    return int(datetime(*moment, tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc,arg-type]


def test_a_unique_key_has_rocketmqs_layout() -> None:
    """Address, process, four bytes of our own, time since the month began, number."""
    keys = UniqueKeys(bytes((10, 1, 2, 3)), 0x12345, bytes.fromhex("A1B2C3D4"))
    assert keys.new(ms(2026, 11, 1) + 5) == "0A0102032345A1B2C3D4000000050001"
    assert keys.new(ms(2026, 11, 25, 1)) == f"0A0102032345A1B2C3D4{577 * 3_600_000:08X}0002"


def test_no_two_unique_keys_of_one_moment_agree() -> None:
    """As many as the number can tell apart."""
    keys = UniqueKeys(bytes(4), 1, bytes(4))
    assert len({keys.new(1_700_000_000_000) for _ in range(2**16)}) == 2**16


@pytest.mark.parametrize(
    ("host", "offset", "offset_id", "shown"),
    [
        (
            bytes((127, 0, 0, 1)) + bytes.fromhex("00002A9F"),
            9000,
            "7F00000100002A9F0000000000002328",
            "127.0.0.1:10911",
        ),
        (bytes(15) + b"\1" + bytes.fromhex("00002A9F"), 1, "0" * 31 + "100002A9F0000000000000001", "[::1]:10911"),
    ],
)
def test_an_offset_id_gives_the_place_of_a_message(host: bytes, offset: int, offset_id: str, shown: str) -> None:
    """At which address, IPv4 or IPv6, and at which place in its log."""
    assert encode_offset_id(host, offset) == offset_id
    assert decode_offset_id(offset_id) == (shown, offset)


@pytest.mark.parametrize("offset_id", ["", "nothing", "0" * 34, "G" * 32, "\u00fc" * 32])
def test_an_invalid_offset_id_is_refused(offset_id: str) -> None:
    """Ids of the gRPC protocol have two digits more."""
    with pytest.raises(Refused) as refused:
        decode_offset_id(offset_id)
    assert refused.value.rule is Rule.MESSAGE_ID


def test_a_recall_handle_names_its_broker() -> None:
    """And what is none is refused."""
    handle = base64.urlsafe_b64encode(b"v1 topic broker-a 1 M1").decode()
    assert broker_of_handle(handle) == "broker-a"
    for wrong in ("", "nonsense", "\u00fc", base64.urlsafe_b64encode(b"v2 a b c d").decode(), "AAAA"):
        with pytest.raises(Refused):
            broker_of_handle(wrong)
