"""Pictures as SVG, from values alone: lines, columns side by side, and rows with a value at the end.

A picture brings its own background and follows the reader's choice of light or dark. Colours differ in brightness too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 760, 400
_LEFT, _RIGHT, _BOTTOM = 78, 24, 56
_ROW, _LABEL_WIDTH = 30, 250
_LETTER = 6.6  # width of one at 12 px, on average
_STYLE = """
.page { fill: #ffffff; stroke: #d4d8de } text { font: 12px system-ui, sans-serif; fill: #414852 }
.title { font-size: 15px; font-weight: 600; fill: #15181d } .grid { stroke: #e6e9ed } .axis { stroke: #8a929d }
.goal { stroke: #c0392b; stroke-dasharray: 5 4 } .goal-text { fill: #c0392b } .line { fill: none; stroke-width: 2.2 }
.c0 { --c: #1f5fd0 } .c1 { --c: #12957d } .c2 { --c: #8a929d }
.c3 { --c: #b9bfc8 } .c4 { --c: #8b5fbf } .c5 { --c: #d9822b }
.line { stroke: var(--c) } .fill { fill: var(--c) }
@media (prefers-color-scheme: dark) {
.page { fill: #15181d; stroke: #383e47 } text { fill: #b9bfc8 } .title { fill: #f1f3f5 } .grid { stroke: #2a2f37 }
.axis { stroke: #6b7480 } .goal { stroke: #ff8577 } .goal-text { fill: #ff8577 }
.c0 { --c: #6ea5ff } .c1 { --c: #3fcfb3 } .c2 { --c: #8a929d }
.c3 { --c: #59616c } .c4 { --c: #bd97f0 } .c5 { --c: #f0a35a }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values under one name; ``colour`` is 0 to 5: 0 and 1 for ours, 2 to 4 for floors, 5 for the peer."""

    name: str
    values: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A value with its label; ``goal`` is marked if there is one."""

    label: str
    value: float
    colour: int = 0
    goal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """From a value to a place."""

    least: float
    most: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of ``value``."""
        if self.is_log:
            span = math.log10(self.most / self.least) or 1
            share = math.log10(max(value, self.least) / self.least) / span
        else:
            share = (value - self.least) / ((self.most - self.least) or 1)
        return self.start + share * (self.end - self.start)


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    is_y_log: bool = False,
    goals: Sequence[tuple[float, float]] = (),
) -> str:
    """Draw lines over a logarithmic axis, on which the values that occur are marked; ``goals`` are (x, y) to reach."""
    places = sorted({at for each in series for at, _ in each.values})
    heights = [value for each in series for _, value in each.values] + [value for _, value in goals]
    across = _Scale(least=places[0], most=places[-1], start=_LEFT + 14, end=WIDTH - _RIGHT - 14, is_log=True)
    top, legend = _legend(series)
    up = _upward(heights, top, is_log=is_y_log)
    parts = [*_frame(title, y, top), *legend, *_y_axis(up), _text(WIDTH / 2, HEIGHT - 12, x, "middle")]
    parts += [_text(across.at(each), HEIGHT - _BOTTOM + 18, amount(each), "middle") for each in _apart(places, across)]
    for each in series:
        points = [(across.at(at), up.at(value)) for at, value in sorted(each.values)]
        path = " ".join(f"{left:.1f},{high:.1f}" for left, high in points)
        parts.append(f'<g class="c{each.colour}"><polyline class="line" points="{path}"/>')
        parts += [f'<circle class="fill" cx="{left:.1f}" cy="{high:.1f}" r="3.5"/>' for left, high in points]
        parts.append("</g>")
    for at, value in goals:
        left, high = across.at(at), up.at(value)
        parts.append(f'<line class="goal" x1="{left - 26:.1f}" x2="{left + 26:.1f}" y1="{high:.1f}" y2="{high:.1f}"/>')
        parts.append(_text(left - 30, high + 4, f"goal {amount(value)}", "end", "goal-text"))
    return _picture(parts, HEIGHT)


def columns(title: str, labels: Sequence[str], series: Sequence[Series], *, x: str, y: str) -> str:
    """Draw columns side by side, a group for each label; a series has its values in the order of the labels."""
    top, legend = _legend(series)
    up = _upward([value for each in series for _, value in each.values], top)
    width = (WIDTH - _LEFT - _RIGHT) / len(labels)
    thick = min(26.0, width * 0.8 / len(series))
    parts = [*_frame(title, y, top), *legend, *_y_axis(up), _text(WIDTH / 2, HEIGHT - 12, x, "middle")]
    for number, label in enumerate(labels):
        middle = _LEFT + width * (number + 0.5)
        parts.append(_text(middle, HEIGHT - _BOTTOM + 18, label, "middle"))
        for at, each in enumerate(series):
            left, high = middle + (at - len(series) / 2) * thick, up.at(each.values[number][1])
            parts.append(
                f'<rect class="fill c{each.colour}" x="{left:.1f}" y="{high:.1f}" '
                f'width="{thick - 1:.1f}" height="{HEIGHT - _BOTTOM - high:.1f}"/>'
            )
    return _picture(parts, HEIGHT)


def rows(title: str, values: Sequence[Row], *, unit: str) -> str:
    """Draw one bar below the other, each with its value and, dashed, its goal."""
    height = 64 + _ROW * len(values) + 20
    most = max([row.value for row in values] + [row.goal or 0 for row in values])
    across = _Scale(least=0, most=most or 1, start=_LABEL_WIDTH, end=WIDTH - 130)
    parts = [_text(20, 30, title, "start", "title"), _text(20, 48, unit)]
    for number, row in enumerate(values):
        top, end = 62 + _ROW * number, across.at(row.value)
        parts.append(_text(_LABEL_WIDTH - 10, top + 15, row.label, "end"))
        parts.append(
            f'<rect class="fill c{row.colour}" x="{_LABEL_WIDTH}" y="{top}" rx="2" '
            f'width="{max(1.0, end - _LABEL_WIDTH):.1f}" height="{_ROW - 9}"/>'
        )
        text = amount(row.value)
        after = end
        if row.goal is not None:
            goal = across.at(row.goal)
            parts.append(f'<line class="goal" x1="{goal:.1f}" x2="{goal:.1f}" y1="{top - 4}" y2="{top + _ROW - 5}"/>')
            text, after = f"{text} (goal {amount(row.goal)})", max(end, goal)
        parts.append(_text(after + 8, top + 15, text))
    return _picture(parts, height)


def amount(value: float) -> str:
    """Return a number as it is read at an axis: 20 k, 1 M, 0.5."""
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _upward(values: Sequence[float], top: float, *, is_log: bool = False) -> _Scale:
    most = max(values) or 1.0
    if is_log:
        least = min(value for value in values if value > 0)
        low, high = 10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most))
        return _Scale(least=low, most=max(high, low * 10), start=HEIGHT - _BOTTOM, end=top, is_log=True)
    step = _step(most)
    return _Scale(least=0, most=math.ceil(most / step) * step, start=HEIGHT - _BOTTOM, end=top)


def _step(most: float) -> float:
    rough = most / 5
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)


def _y_axis(up: _Scale) -> Iterator[str]:
    for value in _marks(up):
        at = up.at(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 8, at + 4, amount(value), "end")
    bottom = HEIGHT - _BOTTOM
    yield f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'


def _marks(up: _Scale) -> list[float]:
    if up.is_log:
        return [up.least * 10**number for number in range(round(math.log10(up.most / up.least)) + 1)]
    step = _step(up.most)
    return [step * number for number in range(round(up.most / step) + 1)]


def _apart(places: Sequence[float], across: _Scale) -> list[float]:
    """Return the places whose labels do not touch."""
    kept = list(places[:1])
    for _, place in pairwise(places):
        if across.at(place) - across.at(kept[-1]) > 40:
            kept.append(place)
    return kept


def _frame(title: str, y: str, top: float) -> Iterator[str]:
    yield _text(20, 28, title, "start", "title")
    yield _text(20, top - 12, y)


def _legend(series: Sequence[Series]) -> tuple[float, list[str]]:
    """Return where the drawing may begin below the names of the series, and the names; a single one needs none."""
    parts: list[str] = []
    left, line = 20.0, 52
    for each in series if len(series) > 1 else ():
        width = 17 + len(each.name) * _LETTER + 16
        if left + width > WIDTH - _RIGHT:
            left, line = 20.0, line + 20
        parts.append(
            f'<rect class="fill c{each.colour}" x="{left:.1f}" y="{line - 10}" width="12" height="12" rx="2"/>'
        )
        parts.append(_text(left + 17, line, each.name))
        left += width
    return (line + 36 if parts else 64), parts


def _text(left: float, top: float, text: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _picture(parts: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        f'role="img"><style>{_STYLE}</style>'
    )
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
    return "\n".join([head, page, *parts, "</svg>", ""])
