"""What every picture needs: a named SVG, a plot area, axes of time, of counts and of logarithms, legends, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_audit.report import text
from spark_audit.report.markup import Child, Markup, el, joined, number
from spark_audit.report.windows import Axis

WIDTH = 1100.0
_STEPS_MS = [
    *(minutes * 60_000 for minutes in (1, 2, 5, 10, 20, 30, 60, 120, 180, 360, 720)),
    *(days * 86_400_000 for days in (1, 2, 7, 14, 28, 91, 182, 364)),
]
_TICKS_MAX = 11
_ROUND_MS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 4 * 86_400_000, 40 * 86_400_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The area inside the axes, in units of the drawing."""

    left: float = 64.0
    top: float = 26.0
    width: float = 1020.0
    height: float = 240.0

    @property
    def bottom(self) -> float:
        """Where the axis of time lies."""
        return self.top + self.height

    @property
    def right(self) -> float:
        """Where the last column ends."""
        return self.left + self.width

    def x_of(self, column: float, axis: Axis) -> float:
        """Return where a column begins."""
        return self.left + self.width * column / axis.columns

    def y_of(self, part: float) -> float:
        """Return the height of ``part``, 0 at the bottom and 1 at the top."""
        return self.bottom - self.height * part


@dataclass(frozen=True, slots=True)
class Linear:
    """From 0 to a round number."""

    top: float
    step: float

    @classmethod
    def to(cls, value_max: float) -> Linear:
        """Choose three to five steps that reach ``value_max``."""
        if value_max <= 1:
            return cls(1.0, 1.0)
        power = 10.0 ** math.floor(math.log10(value_max / 4))
        step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice * 5 >= value_max)
        step = max(1.0, step)
        return cls(step * math.ceil(value_max / step), step)

    def part(self, value: float) -> float:
        """Return where ``value`` lies between 0 and 1."""
        return min(1.0, max(0.0, value / self.top))

    def ticks(self) -> list[float]:
        """Return the values to label."""
        return [self.step * each for each in range(round(self.top / self.step) + 1)]


@dataclass(frozen=True, slots=True)
class Log:
    """Powers of ten from ``bottom``; what is smaller lies on the bottom line."""

    bottom: float
    decades: int

    @classmethod
    def to(cls, value_max: float, bottom: float = 1.0) -> Log:
        """Choose whole decades that reach ``value_max``."""
        if value_max <= bottom * 10:
            return cls(bottom, 1)
        return cls(bottom, math.ceil(math.log10(value_max / bottom) - 1e-9))

    def part(self, value: float) -> float:
        """Return where ``value`` lies between 0 and 1."""
        return min(1.0, max(0.0, math.log10(max(value, self.bottom) / self.bottom) / self.decades))

    def ticks(self) -> list[float]:
        """Return the values to label."""
        every = -(-self.decades // 7)
        return [self.bottom * 10.0**each for each in range(0, self.decades + 1, every)]


def svg(name: str, title: str, description: str, height: float, content: Markup, width: float = WIDTH) -> Markup:
    """Return a drawing that says what it is, in a frame that scrolls when the screen is too narrow for it."""
    drawing = el(
        "svg",
        el("title", title, id=f"{name}-title"),
        el("desc", description, id=f"{name}-desc"),
        content,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        id=f"{name}-svg",
        class_="wide" if width >= WIDTH else "small",
    )
    return el("div", drawing, class_="scroll", tabindex="0", role="region", aria_label=f"{title}; scrolls sideways")


def time_axis(plot: Plot, axis: Axis, *, has_grid: bool = True) -> Markup:
    """Return lines and labels for the time below a plot: hours, with the date where a day begins."""
    length_ms = axis.to_ms - axis.from_ms
    step_ms = next((step for step in _STEPS_MS if length_ms / step <= _TICKS_MAX), -(-length_ms // _TICKS_MAX))
    parts: list[Child] = [_line(plot.left, plot.bottom, plot.right, plot.bottom, "axis")]
    day = ""
    for at_ms in range(-(-axis.from_ms // step_ms) * step_ms, axis.to_ms + 1, step_ms):
        x = plot.left + plot.width * (at_ms - axis.from_ms) / length_ms
        if has_grid:
            parts.append(_line(x, plot.top, x, plot.bottom, "grid"))
        parts.append(_line(x, plot.bottom, x, plot.bottom + 4, "axis"))
        at = text.moment(at_ms)
        if step_ms >= 86_400_000:
            date, label = (f"{at:%Y}", f"{at:%m-%d}") if at else ("", str(at_ms))
        else:
            date, label = (f"{at:%Y-%m-%d}", f"{at:%H:%M}") if at else ("", str(at_ms))
        anchor = "start" if x < plot.left + 20 else "end" if x > plot.right - 20 else "middle"
        parts.append(el("text", label, x=x, y=plot.bottom + 17, class_="tick", text_anchor=anchor))
        if date != day:
            parts.append(el("text", date, x=x, y=plot.bottom + 31, class_="tick day", text_anchor=anchor))
            day = date
    return joined(parts)


def value_axis(plot: Plot, scale: Linear | Log, *, unit: str, is_duration: bool = False) -> Markup:
    """Return grid lines and labels for values; ``unit`` stands on top."""
    parts: list[Child] = [el("text", unit, x=2, y=plot.top - 11, class_="tick unit", text_anchor="start")]
    ticks = _durations(scale) if is_duration else [each for each in scale.ticks() if each == 0 or each >= 1]
    for value in ticks:
        y = plot.y_of(scale.part(value))
        parts.append(_line(plot.left, y, plot.right, y, "grid"))
        label = text.duration(value) if is_duration else text.brief(value)
        parts.append(el("text", label, x=plot.left - 6, y=y + 4, class_="tick", text_anchor="end"))
    return joined(parts)


def _durations(scale: Linear | Log) -> list[float]:
    """Round durations people think in, at about the powers of ten."""
    top = scale.bottom * 10.0**scale.decades if isinstance(scale, Log) else scale.top
    return [float(each) for each in _ROUND_MS if each <= top]


def watermark(plot: Plot, axis: Axis, at_ms: int) -> Markup:
    """Return a line where judgement ends, if that lies within the axis."""
    if not axis.from_ms < at_ms < axis.to_ms:
        return Markup("")
    x = plot.left + plot.width * (at_ms - axis.from_ms) / (axis.to_ms - axis.from_ms)
    is_right = x > plot.right - 90
    label = el(
        "text",
        "watermark",
        x=x - 4 if is_right else x + 4,
        y=plot.top + 9,
        class_="tick halo",
        text_anchor="end" if is_right else "start",
    )
    return joined([_line(x, plot.top, x, plot.bottom, "mark"), label])


def hover(x: float, y: float, width: float, height: float, words: str, css: str = "hit") -> Markup:
    """Return a field that says its words on hover, and on focus once the arrow keys reach it."""
    return el("rect", el("title", words), x=x, y=y, width=width, height=height, class_=css)


def legend(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """Return the meaning of colours: class, letter in the swatch, words."""
    items = [
        el(
            "li",
            el(
                "svg",
                el("path", d="M0 7H18", class_=css)
                if css.startswith("l-")
                else el("rect", x=0.5, y=0.5, width=17, height=13, class_=f"{css} edge"),
                el("text", letter, x=9, y=11, class_=f"in-{css}", text_anchor="middle") if letter else None,
                viewBox="0 0 18 14",
                class_="swatch",
                aria_hidden="true",
            ),
            el("span", words),
        )
        for css, letter, words in entries
    ]
    return el("ul", *items, class_="legend")


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Child]], *, caption: str, words: int = 1, css: str = ""
) -> Markup:
    """Return a table whose first ``words`` columns are words and whose others are numbers."""
    head = [el("th", each, scope="col", class_=None if place < words else "n") for place, each in enumerate(headings)]
    body = []
    for row in rows:
        cells = [
            el("th", each, scope="row") if place == 0 else el("td", each, class_=None if place < words else "n")
            for place, each in enumerate(row)
        ]
        body.append(el("tr", *cells))
    content = el("table", el("caption", caption), el("thead", el("tr", *head)), el("tbody", *body), class_=css or None)
    return el("div", content, class_="scroll", tabindex="0", role="region", aria_label=f"{caption}; scrolls sideways")


def folded(summary: str, content: Markup) -> Markup:
    """Return content behind a line that opens it."""
    return el("details", el("summary", summary), content, class_="figures")


def figure(name: str, heading: str, lead: Child, *content: Child) -> Markup:
    """Return one section of the page."""
    return el("section", el("h2", heading), el("p", lead, class_="lead"), *content, id=name, aria_label=heading)


def nothing(words: str) -> Markup:
    """Return what stands where a picture would be empty."""
    return el("p", words, class_="nothing")


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)
