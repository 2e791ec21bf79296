"""Text and numbers are each other's exact inverse, and what cannot be read says what is expected."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from dmq.config import units
from spark_audit.cli import duration_ms


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("0", 0),
        ("500ms", 500),
        (" 10s ", 10_000),
        ("15m", 900_000),
        ("1h30m", 5_400_000),
        ("2d", 172_800_000),
        ("1m1ms", 60_001),
        ("3650000d", units.DURATION_MS_MAX),
    ],
)
def test_durations_are_read(text: str, expected_ms: int) -> None:
    """Every unit, their sums, and 0."""
    assert units.parse_duration(text) == expected_ms


@pytest.mark.parametrize(
    "text", ["", "m", "-5s", "1.5s", "5 m", "5M", "5w", "1s,2s", "٣s", "3650001d", "9" * 5000, "9" * 40 + "d", "nan"]
)
def test_other_durations_are_refused(text: str) -> None:
    """Nothing is guessed, and no length of input gets through."""
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["5", " 5 ", "05", "00", "9" * 5000])
def test_a_duration_needs_a_unit(text: str) -> None:
    """A number alone means milliseconds to one and seconds to another; the refusal says what it may have meant."""
    number = text.strip() if len(text) < 99 else "9" * 18 + "..."
    with pytest.raises(ValueError, match=f"a duration needs a unit: {number}ms, {number}s or {number}m"):
        units.parse_duration(text)
    with pytest.raises(ValueError, match="a duration needs a unit"):
        units.parse_when(f"+{text.strip()}")


def test_times_of_programs_without_a_unit_are_milliseconds() -> None:
    """The same send must mean the same as before."""
    assert units.parse_sent_duration(" 250 ") == 250
    assert units.parse_sent_duration("15m") == 900_000
    assert units.parse_sent_around("-250") == units.After(-250)
    assert units.parse_sent_around("+250") == units.After(250)
    for text in ("", "5w", "9" * 5000):
        with pytest.raises(ValueError, match="duration"):
            units.parse_sent_duration(text)


def test_the_audit_by_itself_reads_durations_alike() -> None:
    """It imports nothing of the daemon's."""
    assert [duration_ms(text) for text in ("0", "250ms", "90s", "10m", "1d")] == [0, 250, 90_000, 600_000, 86_400_000]
    for text in ("60", "soon", "-1s", "٣s"):
        with pytest.raises(typer.BadParameter, match="a duration needs a unit: 60ms" if text == "60" else "duration"):
            duration_ms(text)


@given(st.integers(0, units.DURATION_MS_MAX))
def test_durations_survive_the_way_there_and_back(given_ms: int) -> None:
    """What is shown can be typed in again and means the same."""
    assert units.parse_duration(units.format_duration(given_ms)) == given_ms


def test_the_default_level_table_is_rocketmqs() -> None:
    """18 levels, the first one second, the last two hours."""
    levels_ms = units.parse_delay_levels(units.DELAY_LEVELS_DEFAULT)
    assert (len(levels_ms), levels_ms[0], levels_ms[2], levels_ms[17]) == (18, 1000, 10_000, 7_200_000)
    assert units.format_delay_levels(levels_ms) == units.DELAY_LEVELS_DEFAULT


def test_a_level_table_has_1_to_255_entries() -> None:
    """A level has one byte in the store."""
    assert len(units.parse_delay_levels("1s " * 255)) == 255
    for text in ("", "   ", "1s " * 256, "1s,5s"):
        with pytest.raises(ValueError, match="expected"):
            units.parse_delay_levels(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("17", 17), ("17B", 17), ("4KiB", 4096), ("64 MiB", 2**26), ("1GiB", 2**30), ("2TiB", 2**41)],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    """Binary units and plain bytes."""
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "1MB", "1.5GiB", "-1", "MiB", "1 Mi", "9" * 30])
def test_other_sizes_are_refused(text: str) -> None:
    """Decimal units are refused rather than taken for binary ones."""
    with pytest.raises(ValueError, match="size is expected"):
        units.parse_size(text)


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    """Whole where whole, one decimal elsewhere."""
    assert [units.format_size(size) for size in (0, 1, 1023, 1024, 1536, 2**26, 2**40)] == [
        *("0B", "1B", "1023B", "1KiB", "1.5KiB", "64MiB", "1TiB")
    ]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8081", "127.0.0.1", 8081),
        ("localhost:0", "localhost", 0),
        ("[::1]:8081", "::1", 8081),
        ("[::]:65535", "::", 65535),
    ],
)
def test_addresses_are_read_and_shown(text: str, host: str, port: int) -> None:
    """IPv6 hosts have brackets in text only."""
    address = units.parse_address(text)
    assert address == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "8081", ":8081", "host:", "host:65536", "host:-1", "::1:8081", "[::1]", "[]:1", "[h]:1", "a b:1", "h/x:1"],
)
def test_other_addresses_are_refused(text: str) -> None:
    """An IPv6 host without brackets is ambiguous, so it is refused."""
    with pytest.raises(ValueError, match="host:port is expected"):
        units.parse_address(text)


@pytest.mark.parametrize(
    ("epoch_ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000_007, "2023-11-14T22:13:20.007Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
    ],
)
def test_instants_are_shown_exactly(epoch_ms: int, text: str) -> None:
    """No float rounds the milliseconds of a late year."""
    assert units.format_time(epoch_ms) == text
