"""SVG charts, drawn by Vega-Lite: rows of data become marks, in the colours of the style sheet of the page.

A chart has channels ``x`` and ``y`` and layers of marks that share them. Rows of a layer have the columns ``x``, ``y``,
``x2``, ``y2`` if their marks need them; ``words`` is the tooltip of a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from spark_audit.report import text
from spark_audit.report.look import MarkStyle
from spark_audit.report.windows import Axis

WIDTH = 1100
Marks = list[dict[str, Any]]
_WEEK_MS = 7 * 86_400_000
_ROUND_MS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 4 * 86_400_000, 40 * 86_400_000)
# Vega describes every shape to screen readers; here a picture has a title, and a mark with a meaning has a tooltip.
_TOLD = re.compile(r' role="graphics-[a-z]+" aria-roledescription="[^"]*"| aria-hidden="true"')
_SPEAKING = re.compile(r'<path aria-label="([^"]*)"([^>]*)/>')
_SHAPE = re.compile(r' (?:d|transform)="[^"]*"')
_SOFT = "var(--soft)"
_THEME = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "mark": {"aria": False},
    "text": {"fontSize": 12, "fill": _SOFT},
    "axis": {
        "aria": False, "labelColor": _SOFT, "labelFontSize": 12, "labelOverlap": False, "domainColor": _SOFT,
        "tickColor": _SOFT, "gridColor": "var(--grid)", "titleColor": _SOFT, "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    # the unit is above its axis
    "axisY": {
        "domain": False, "ticks": False, "labelPadding": 6, "titleAngle": 0, "titleAlign": "left", "titleAnchor": "end",
        "titleX": -60, "titleY": -12,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """Drawing with its name and a one-sentence description."""

    name: str
    title: str
    description: str
    width: int
    height: int
    drawing: Markup


def drawn(
    name: str,
    title: str,
    description: str,
    *,
    x: dict[str, Any],
    y: dict[str, Any],
    layers: Iterable[dict[str, Any]],
    height: int,
    padding: tuple[int, int, int, int] = (26, 16, 38, 64),
    width: int = WIDTH,
) -> Chart:
    """Draw a chart. ``padding`` is the space above, right of, below and left of its marks.

    No size depends on the fonts of the machine, so the drawing is the same everywhere.
    """
    import vl_convert  # it contains its own JavaScript engine, which only a report needs

    top, right, bottom, left = padding
    specification = {
        "autosize": "none",
        "width": width - left - right,
        "height": height,
        "padding": {"top": top, "right": right, "bottom": bottom, "left": left},
        "background": None,
        "config": _THEME,
        "encoding": {"x": x, "y": y},
        "layer": list(layers),
    }
    svg = vl_convert.vegalite_to_svg(specification)
    inside = _TOLD.sub("", svg.partition(">")[2].removesuffix("</svg>"))
    inside = _SHAPE.sub(lambda shape: re.sub(r"(\.\d)\d+", r"\1", shape[0]), inside)  # a tenth of a pixel is enough
    drawing = Markup(_SPEAKING.sub(r"<path\2><title>\1</title></path>", inside))  # noqa: S704 - Vega has escaped it
    return Chart(name, title, description, width, top + height + bottom, drawing)


def over_time(axis: Axis, *, has_grid: bool = False) -> dict[str, Any]:
    """Return a time channel ``x``, labelled with hours, and the date at the start of a day; long ranges with days and
    years.
    """
    if axis.to_ms - axis.from_ms > _WEEK_MS:
        label, below, begins = "%m-%d", "%Y", "utcdayofyear(datum.value) == 1"
    else:
        label, below, begins = "%H:%M", "%Y-%m-%d", "utchours(datum.value) == 0 && utcminutes(datum.value) == 0"
    date = f"datum.index == 0 || {begins} ? utcFormat(datum.value, '{below}') : ''"
    scale = {"type": "utc", "domain": [axis.from_ms, axis.to_ms], "nice": False}
    labels = {"grid": has_grid, "tickCount": 10, "labelExpr": f"[utcFormat(datum.value, '{label}'), {date}]"}
    return {"field": "x", "type": "temporal", "title": None, "scale": scale, "axis": labels}


def amount(top: float, unit: str, *, steps: int = 4) -> dict[str, Any]:
    """Return a channel ``y`` of counts, from 0."""
    labels = {"tickCount": steps, "labelExpr": "datum.value % 1 ? '' : format(datum.value, '~s')"}
    scale = {"domain": [0, max(1, top)], "nice": steps}
    return {"field": "y", "type": "quantitative", "title": unit, "scale": scale, "axis": labels}


def decades(channel: str, top: float, unit: str | None = None, **look: bool | str) -> dict[str, Any]:
    """Return a logarithmic channel of counts, on which 1 is distinguishable from 0."""
    values = [10**power for power in range(17) if 10 ** (power - 1) < max(top, 10)]
    return _logarithmic(channel, unit, [0.5, values[-1]], {"values": values, "format": "~s"} | look)


def durations(top_ms: float, unit: str) -> dict[str, Any]:
    """Return a logarithmic channel ``y`` of durations with round labels; 1 ms is at the bottom."""
    words = {each: text.duration(each) for each in _ROUND_MS if each <= max(10, top_ms)}
    labels = {"values": list(words), "labelExpr": f"{json.dumps(words)}[datum.value]"}
    return _logarithmic("y", unit, [1, max(10, top_ms)], labels)


def _logarithmic(channel: str, unit: str | None, domain: list[float], labels: dict[str, Any]) -> dict[str, Any]:
    scale = {"type": "log", "domain": domain, "nice": False, "clamp": True}
    return {"field": channel, "type": "quantitative", "title": unit, "scale": scale, "axis": labels}


def places(count: int, gap: float = 0.1) -> dict[str, Any]:
    """Return a channel ``y`` of rows, numbered from 0 at the top."""
    scale = {"domain": list(range(count)), "paddingInner": gap, "paddingOuter": 0}
    return {"field": "y", "type": "ordinal", "axis": None, "scale": scale}


def boxes(rows: Marks, **channels: Any) -> dict[str, Any]:  # noqa: ANN401 - of Vega-Lite
    """Return rectangles with a ``fill`` each. Without an end, a rectangle fills its band."""
    first = rows[0] if rows else {}
    encoding = {"fill": {"field": "fill", "scale": None}, "description": {"field": "words"}}
    ends = {end: {"field": end} for end in ("x2", "y2") if end in first}
    mark = {"type": "rect", "aria": "words" in first}
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding | ends | channels}


def fields(rows: Marks) -> dict[str, Any]:
    """Return invisible full-height rectangles that carry the tooltips (``words``) of columns."""
    hits = [{"x": row["x"], "x2": row["x2"], "fill": "var(--clear)", "words": row["words"]} for row in rows]
    return boxes(hits, y={"value": 0}, y2={"value": "height"})


def texts(rows: Marks, channels: dict[str, Any] | None = None, **look: Any) -> dict[str, Any]:  # noqa: ANN401 - too
    """Return text marks with the ``label`` of each row."""
    encoding = {"text": {"field": "label"}} | (channels or {})
    return {"data": {"values": rows}, "mark": {"type": "text"} | look, "encoding": encoding}


def letters(rows: Marks) -> dict[str, Any]:
    """Return the letters on marks, so that colour is never the only distinction; each row has the ``look`` of
    its mark.
    """
    dressed = []
    for row in rows:
        look: MarkStyle = row["look"]
        dressed.append({"x": row["x"], "y": row["y"], "label": look.letter, "ink": look.ink, "halo": look.halo})
    colours = {"fill": {"field": "ink", "scale": None}, "stroke": {"field": "halo", "scale": None}}
    return {"name": "letters"} | texts(dressed, colours, fontSize=10.5, fontWeight=700, strokeWidth=3)


def line(rows: Marks, colour: str, **look: Any) -> dict[str, Any]:  # noqa: ANN401 - of Vega-Lite
    """Return a line through its points, interrupted where ``y`` is missing."""
    mark = {"type": "line", "stroke": f"var(--{colour})", "strokeWidth": 2} | look
    return {"data": {"values": rows}, "mark": mark}


def rule(rows: Marks, channels: dict[str, Any], **look: Any) -> dict[str, Any]:  # noqa: ANN401 - of Vega-Lite
    """Return straight lines across the whole chart."""
    return {"data": {"values": rows}, "mark": {"type": "rule"} | look, "encoding": channels}


def watermark(axis: Axis, at_ms: int) -> list[dict[str, Any]]:
    """Return a line at the watermark, the end of judged time, if it is within the axis."""
    if not axis.from_ms < at_ms < axis.to_ms:
        return []
    is_right = at_ms - axis.from_ms > 0.9 * (axis.to_ms - axis.from_ms)
    rows: Marks = [{"x": at_ms, "label": "watermark"}]
    aside = {"align": "right", "dx": -4} if is_right else {"align": "left", "dx": 4}
    return [
        rule(rows, {"y": {"value": 0}, "y2": {"value": "height"}}, stroke="var(--ink)", strokeDash=[2, 3]),
        texts(rows, {"y": {"value": 7}}, stroke="var(--card)", strokeWidth=4, **aside),
    ]
