"""Pictures as SVG, from values alone: lines, columns side by side, and rows with a value at the end.

A picture brings its own background and follows the reader's choice of light or dark. Colours differ in brightness too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vl_convert

_STYLE = """<style>
:root { --page: #ffffff; --text: #414852; --title: #15181d; --grid: #e6e9ed; --axis: #8a929d; --goal: #c0392b;
--c0: #1f5fd0; --c1: #12957d; --c2: #8a929d; --c3: #b9bfc8; --c4: #8b5fbf; --c5: #d9822b }
@media (prefers-color-scheme: dark) {
:root { --page: #15181d; --text: #b9bfc8; --title: #f1f3f5; --grid: #2a2f37; --axis: #6b7480; --goal: #ff8577;
--c0: #6ea5ff; --c1: #3fcfb3; --c2: #8a929d; --c3: #59616c; --c4: #bd97f0; --c5: #f0a35a } }
</style>"""
_AMOUNT = "replace(replace(format(datum.value, '.3~s'), 'k', ' k'), 'M', ' M')"
_GOAL = {"color": "var(--goal)", "fill": "var(--goal)"}
_THEME = {
    "background": "var(--page)",
    "font": "system-ui, sans-serif",
    "padding": 28,
    "view": {"stroke": None},
    "title": {"anchor": "start", "frame": "bounds", "fontSize": 15, "fontWeight": 600, "color": "var(--title)"},
    "text": {"fontSize": 12, "fill": "var(--text)"},
    "axis": {
        "labelColor": "var(--text)", "labelFontSize": 12, "labelExpr": _AMOUNT, "titleColor": "var(--text)",
        "titleFontSize": 12, "titleFontWeight": "normal", "gridColor": "var(--grid)", "domainColor": "var(--axis)",
        "ticks": False, "labelPadding": 6,
    },
    "axisX": {"grid": False},
    "axisY": {"tickCount": 6},
    "legend": {
        "orient": "top", "title": None, "labelColor": "var(--text)", "labelFontSize": 12, "labelLimit": 0, "columns": 3,
        "columnPadding": 40,
    },
}  # fmt: skip


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
    across = {"field": "x", "type": "quantitative", "title": x, "scale": {"type": "log", "nice": False, "padding": 14}}
    up = {"field": "y", "type": "quantitative", "title": y, "scale": {"type": "log" if is_y_log else "linear"}}
    wanted = [{"x": at, "y": value, "label": f"goal {amount(value)}"} for at, value in goals]
    layers = [
        {
            "data": {"values": _rows(series)},
            "mark": {"type": "line", "point": True},
            "encoding": {"color": _named(series)},
        },
        {"data": {"values": wanted}, "mark": {"type": "tick", "orient": "horizontal", "size": 52} | _GOAL},
        {
            "data": {"values": wanted},
            "mark": {"type": "text", "dy": -9} | _GOAL,
            "encoding": {"text": {"field": "label"}},
        },
    ]
    axis = {"axis": {"values": places, "labelOverlap": True}}
    return _picture(title, {"width": 660, "height": 300, "encoding": {"x": across | axis, "y": up}, "layer": layers})


def columns(title: str, labels: Sequence[str], series: Sequence[Series], *, x: str, y: str) -> str:
    """Draw columns side by side, a group for each label; a series has its values in the order of the labels."""
    named = [
        {"x": label, "y": value, "name": each.name}
        for each in series
        for label, (_, value) in zip(labels, each.values, strict=True)
    ]
    axis = {"labelAngle": 0, "labelExpr": "datum.label"}
    encoding = {
        "x": {"field": "x", "type": "ordinal", "title": x, "sort": None, "axis": axis},
        "xOffset": {"field": "name", "sort": None},
        "y": {"field": "y", "type": "quantitative", "title": y},
        "color": _named(series),
    }
    data = {"values": named}
    return _picture(title, {"width": 660, "height": 300, "data": data, "mark": "bar", "encoding": encoding})


def rows(title: str, values: Sequence[Row], *, unit: str) -> str:
    """Draw one bar below the other, each with its value and, marked, its goal."""
    data = [
        {
            "y": row.label,
            "x": row.value,
            "goal": row.goal,
            "end": max(row.value, row.goal or 0),
            "colour": f"var(--c{row.colour})",
            "said": amount(row.value) + ("" if row.goal is None else f" (goal {amount(row.goal)})"),
        }
        for row in values
    ]
    across = {"type": "quantitative", "axis": None, "scale": {"domainMin": 0}}
    labels = {"title": None, "domain": False, "labelExpr": "datum.label", "labelLimit": 0}
    layers = [
        {"mark": "bar", "encoding": {"x": {"field": "x"} | across, "color": {"field": "colour", "scale": None}}},
        {"mark": {"type": "tick", "thickness": 1.5} | _GOAL, "encoding": {"x": {"field": "goal"} | across}},
        {
            "mark": {"type": "text", "align": "left", "dx": 8},
            "encoding": {"x": {"field": "end"} | across, "text": {"field": "said"}},
        },
    ]
    down = {"y": {"field": "y", "type": "nominal", "sort": None, "axis": labels}}
    drawing = {"width": 420, "height": {"step": 30}, "data": {"values": data}, "encoding": down, "layer": layers}
    return _picture({"text": title, "subtitle": unit, "subtitleColor": "var(--text)"}, drawing)


def amount(value: float) -> str:
    """Return a number as it is read at an axis: 20 k, 1 M, 0.5."""
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _rows(series: Sequence[Series]) -> list[dict[str, Any]]:
    return [{"x": at, "y": value, "name": each.name} for each in series for at, value in sorted(each.values)]


def _named(series: Sequence[Series]) -> dict[str, Any]:
    """Return the colours by name; a single series needs no legend."""
    scale = {"domain": [each.name for each in series], "range": [f"var(--c{each.colour})" for each in series]}
    return {"field": "name", "type": "nominal", "scale": scale} | ({"legend": None} if len(series) < 2 else {})


def _picture(title: str | Mapping[str, str], drawing: Mapping[str, Any]) -> str:
    svg = vl_convert.vegalite_to_svg({"title": title, "config": _THEME, **drawing})
    head, end, rest = svg.partition(">")
    return f"{head}{end}{_STYLE}{rest}\n"
