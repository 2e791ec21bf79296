"""Markup that cannot be injected into: what is not ``Markup`` is text, and text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

# HTML's void elements, and what SVG draws without content.
_CHILDLESS = frozenset({"br", "circle", "col", "hr", "input", "line", "meta", "path", "polyline", "rect", "use"})
# Controls, lone surrogates, and what turns the direction of the text around it: shown by number, not obeyed.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


class Markup(str):
    """A string that is HTML already; only this module and templates of ours make one."""

    __slots__ = ()


Child = str | int | None


def visible(text: str) -> str:
    """Return ``text`` with every character that cannot be seen, or would change how others look, as ``\\u....``."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shortened(text: str, length_max: int) -> str:
    """Return ``text`` as it can be seen, cut in its middle to at most ``length_max`` characters."""
    text = visible(text)
    if len(text) <= length_max:
        return text
    head = (length_max - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (length_max - 1 - head) :]}"


def safe(child: Child) -> str:
    """Return ``child`` as HTML: markup as it is, everything else escaped."""
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    return escape(visible(str(child)), quote=True)


def el(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Return an element. ``class_`` is ``class``, ``a_b`` is ``a-b``; ``None`` and ``False`` leave an attribute out."""
    words = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        words.append(attribute if value is True else f'{attribute}="{_attribute(value)}"')
    start = " ".join(words)
    if tag in _CHILDLESS and not children:
        return Markup(f"<{start}/>")
    return Markup(f"<{start}>{''.join(map(safe, children))}</{tag}>")


def joined(parts: Iterable[Child], separator: str = "") -> Markup:
    """Return the parts one behind the other, each escaped unless it is markup."""
    return Markup(separator.join(map(safe, parts)))


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return safe(value)
    return number(value)


def number(value: float) -> str:
    """Return a coordinate with at most one digit behind the point, the shortest way."""
    return f"{value:.1f}".removesuffix(".0")
