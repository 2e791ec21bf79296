"""Texts of values on the pages."""

from __future__ import annotations

import pytest

from dmq.console.shown import BODY_BYTES_MAX, body_of, count, distance, duration, size, visible


def test_values_are_short_texts() -> None:
    """One or two units, and characters that hide something as their codes."""
    assert [duration(each) for each in (0, 0.67, 999, 1_500, 60_000, 3_900_000, 90_000_000)] == [
        "0 ms", "0.7 ms", "999 ms", "1.5 s", "1m", "1h 5m", "1d 1h",
    ]  # fmt: skip
    assert (distance(61_000, 1_000), distance(1_000, 61_000), distance(500, 0)) == ("in 1m", "1m ago", "now")
    assert (count(1_234_567), count(0.25), count(9.0), count(12.6)) == ("1,234,567", "0.2", "9", "13")
    assert (size(0), size(8), size(2**20)) == ("0 B", "8 B", "1 MiB")
    assert visible("a\u202eb\x07\nc") == "a\\u202eb\\u0007\nc"


@pytest.mark.parametrize(
    ("body", "form", "shown"),
    [
        (b'{"a":1}', "", ("json", '{\n  "a": 1\n}')),
        (b'{"a":1}', "text", ("text", '{"a":1}')),
        (b"no json", "json", ("text", "no json")),
        (b"[" * 20_000, "json", ("text", "[" * 20_000)),
        (b"\xff\x00", "text", ("hex", f"00000000  {'ff 00':<48} ..")),
        (b"", "", ("text", "")),
    ],
)
def test_a_body_is_shown_in_a_possible_form(body: bytes, form: str, shown: tuple[str, str]) -> None:
    """Bodies that are not what was asked for have another form, and none fails."""
    assert body_of(body, form, is_plain=True)[:2] == shown


def test_a_long_body_is_cut() -> None:
    """Between two characters; a compressed one is shown as hex."""
    found = body_of(b"a" + "ü".encode() * BODY_BYTES_MAX, "json", is_plain=True)
    assert (found.form, found.is_cut, len(found.text)) == ("text", True, BODY_BYTES_MAX // 2)
    assert body_of(b"abc", "text", is_plain=False).form == "hex"
