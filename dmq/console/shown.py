"""Texts of values on the pages: counts, sizes, durations, times and message bodies."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from markupsafe import Markup

from dmq.config.units import format_size

BODY_BYTES_MAX: Final = 64 * 1024  # of one page; the command shows the rest
_HEX_BYTES_PER_LINE: Final = 16


class Body(NamedTuple):
    """Body of a message in one form, and whether it is cut."""

    form: str
    text: str
    is_cut: bool


def visible(value: object) -> object:
    """Return a text with each invisible or direction-changing character as its code; other values unchanged."""
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(each if each.isprintable() or each == "\n" else f"\\u{ord(each):04x}" for each in value)


def count(number: float) -> str:
    """Return a number with thousands separated; a fraction below 10 has one decimal."""
    if abs(number) < 10 and number != int(number):
        return f"{number:.1f}"
    return f"{number:,.0f}"


def duration(duration_ms: float) -> str:
    """Return a duration in its one or two largest units, such as ``2h 5m``."""
    if duration_ms < 1000:
        return f"{duration_ms:.{1 if duration_ms < 10 else 0}f} ms".replace(".0 ms", " ms")
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.1f} s".replace(".0 s", " s")
    parts, left_s = [], int(duration_ms // 1000)
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, left_s = divmod(left_s, unit_s)
        if number:
            parts.append(f"{number}{unit}")
    return " ".join(parts[:2])


def distance(epoch_ms: int, now_ms: int) -> str:
    """Return a time relative to now: ``in 5m`` or ``5m ago``."""
    if abs(epoch_ms - now_ms) < 1000:
        return "now"
    return f"in {duration(epoch_ms - now_ms)}" if epoch_ms > now_ms else f"{duration(now_ms - epoch_ms)} ago"


def size(size_bytes: int) -> str:
    """Return a size in bytes with its unit."""
    return re.sub(r"(\d)(?=[A-Z])", r"\1 ", format_size(size_bytes))


def body_of(body: bytes, form: str, *, is_plain: bool) -> Body:
    """Return a body as ``json``, ``text`` or ``hex``: as requested if possible, else the first form that is possible.

    Without ``is_plain`` it is compressed by its producer, and only ``hex`` is possible.
    """
    is_cut, head = len(body) > BODY_BYTES_MAX, body[:BODY_BYTES_MAX]
    text = _text(head, is_cut=is_cut) if is_plain else None
    if text is not None and form in {"", "json"} and not is_cut:
        try:
            return Body("json", json.dumps(json.loads(text), indent=2, ensure_ascii=False), is_cut)
        except (ValueError, RecursionError):
            pass
    if text is not None and form != "hex":
        return Body("text", text, is_cut)
    return Body("hex", _hex(head), is_cut)


def _text(body: bytes, *, is_cut: bool) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        # The cut may be inside of a character of up to four bytes.
        return body[: error.start].decode() if is_cut and error.start > len(body) - 4 else None


def _hex(body: bytes) -> str:
    lines = []
    for start in range(0, len(body), _HEX_BYTES_PER_LINE):
        part = body[start : start + _HEX_BYTES_PER_LINE]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{start:08x}  {part.hex(' '):<{_HEX_BYTES_PER_LINE * 3}} {letters}")
    return "\n".join(lines)
