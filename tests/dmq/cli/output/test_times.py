"""Instants and message ids as operators and clients write them."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.message import pack_id, unpack_id
from broker_adapter.contracts.message_id import new_message_id
from dmq.config.units import After, At, parse_around, parse_when

NOW = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2023-11-14T22:13:20Z", At(NOW)),
        ("2023-11-14T22:13:20.007Z", At(NOW + 7)),
        ("2023-11-14T22:13:20.0070001+00:00", At(NOW + 7)),
        ("2023-11-14T22:13:20.007001Z", At(NOW + 8)),
        ("2023-11-15T00:13:20+02:00", At(NOW)),
        ("2023-11-14 22:13:20Z", At(NOW)),
        (f" {NOW} ", At(NOW)),
        ("253402300799999", At(253_402_300_799_999)),
        ("9999-12-31T23:59:59.999Z", At(253_402_300_799_999)),
        ("+5m", After(300_000)),
        ("+0", After(0)),
        ("+1h30m", After(5_400_000)),
    ],
)
def test_times_are_read(text: str, expected: At | After) -> None:
    """RFC 3339, epoch milliseconds, and distances; rounded up, so that nothing is early."""
    assert parse_when(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "RFC 3339"),
        ("tomorrow", "RFC 3339"),
        ("-5", "RFC 3339"),
        ("٣" * 13, "RFC 3339"),
        ("2023-13-01T00:00:00Z", "RFC 3339"),
        ("2023-11-14T22:13:20", "time zone is missing"),
        ("2023-11-14", "time zone is missing"),
        ("1700000000", "looks like seconds"),
        ("253402300800000", "after the year 9999"),
        ("9" * 5000, "after the year 9999"),
        ("+", "duration"),
        ("+5", "needs a unit"),
        ("+5w", "duration"),
        ("+-5m", "duration"),
    ],
)
def test_other_times_are_refused_with_a_reason(text: str, why: str) -> None:
    """Seconds instead of milliseconds, and local times, are the mistakes people make."""
    with pytest.raises(ValueError, match=why):
        parse_when(text)


def test_possibly_expired_rows_are_read_too() -> None:
    """A distance back from now; anything else as before."""
    assert parse_around(" -1h") == After(-3_600_000)
    assert parse_around("+1h") == After(3_600_000)
    assert parse_around(str(NOW)) == At(NOW)
    with pytest.raises(ValueError, match="duration"):
        parse_around("-")


def test_a_message_id_has_the_clients_format() -> None:
    """34 upper-case hex digits from version 01 on, with the second it was made in; the store packs it to 17 bytes."""
    made = new_message_id(NOW, 0x12345, bytes(range(10)))
    assert made == "01" + "010102030405" + "2345" + f"{1_700_000_000 - 1_609_459_200:08X}" + "06070809"
    assert len(pack_id(made)) == 17
    assert unpack_id(pack_id(made)) == made
