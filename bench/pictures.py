"""Which pictures the page has: from figures as they are kept to SVG. A figure that was not measured has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.overload import GOODPUT_SHARE
from bench.send import ECHO, GRPCIO_ECHO, ON_GRPCIO, PER_S
from bench.svg import Row, Series, amount, columns, lines, rows

_COLOURS = {ECHO: 2, GRPCIO_ECHO: 3, ON_GRPCIO: 4}
_PEER_COLOUR = 5
_Figures = Sequence[Mapping[str, Any]]
_ByName = Mapping[str, Mapping[str, Any]]
_SHARE_MIN = 0.05  # percent of messages, below which an end of a histogram is not drawn


def pictures_of(figures: _Figures) -> dict[str, str]:
    """Return the pictures by name, in the order of the page."""
    by_name = {figure["name"]: figure for figure in figures}
    drawn = {name: draw(by_name) for name, draw in _PICTURES.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def _send(figures: _ByName) -> str:
    found = {
        name: figure for name, figure in figures.items() if re.fullmatch(r"grpc_send\.(normal|delayed)\.\d+", name)
    }
    values: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name, figure in found.items():
        _, kind, in_flight = name.split(".")
        at = float(in_flight)
        values.setdefault((f"{kind} sends", int(kind == "delayed")), []).append((at, figure["value"]))
        for each in [figure["beside"], *figure["also"]] if kind == "normal" else ():
            values.setdefault((each["what"], _COLOURS.get(each["what"], _PEER_COLOUR)), []).append((at, each["value"]))
    if not values:
        return ""
    return lines(
        "Durable sends, one message per call",
        [
            Series(name=name, values=points, colour=colour)
            for (name, colour), points in sorted(values.items(), key=_colour)
        ],
        x="calls in flight",
        y="messages per second",
        goals=[(float(at), float(goal)) for at, goal in PER_S.items() if f"grpc_send.normal.{at}" in found],
    )


def _receive(figures: _ByName) -> str:
    figure = figures.get("receive")
    return _bars("Receive and acknowledge a backlog, 32 at a time", [figure], "messages per second") if figure else ""


def _lateness(figures: _ByName) -> str:
    names = ("lateness.consumer.p99", "lateness.10000.consumer.p99")
    found = [figures[name]["details"] for name in names if _has(figures, name, "histogram")]
    waiting = amount(found[0]["waiting"]) if found else ""
    title = f"How late messages are at a consumer, while {waiting} others wait"
    return _histogram(title, [(f"{amount(each['per_s'])} messages/s", each["histogram"]) for each in found])


def _wakeup(figures: _ByName) -> str:
    found = [("", figures["wakeup.p50"]["details"]["histogram"])] if _has(figures, "wakeup.p50", "histogram") else []
    return _histogram("From the answer to a send until a waiting long poll has the message", found)


def _burst(figures: _ByName) -> str:
    labels = {
        "burst.in_process": "in its queue, in process",
        "burst.daemon": "in its queue, daemon",
        "burst.client": "acknowledged by a client",
    }
    found = [(label, figures[name]) for name, label in labels.items() if name in figures]
    values = [
        Row(label=label, value=figure["value"], colour=number % 2, goal=figure["bound"])
        for number, (label, figure) in enumerate(found)
    ]
    return rows("Many messages due at one instant: when the last is there", values, unit="ms") if values else ""


def _overload(figures: _ByName) -> str:
    if not _has(figures, "overload.goodput", "offered_per_s"):
        return ""
    figure = figures["overload.goodput"]
    peak, facts = figure["beside"]["value"], figure["details"]
    values = [
        Row(label="the peak", value=peak, colour=2),
        Row(label="offered", value=facts["offered_per_s"], colour=3),
        Row(label="accepted of it", value=figure["value"], goal=GOODPUT_SHARE * peak),
        Row(label="refused (42900)", value=facts["refused_per_s"], colour=5),
    ]
    return rows("Twice as much as the daemon can take", values, unit="messages per second")


def _pending(figures: _ByName) -> str:
    found: dict[str, list[tuple[float, float]]] = {"ram": [], "disk": []}
    goals: list[tuple[float, float]] = []
    for name, figure in figures.items():
        if match := re.fullmatch(r"(?:sizes\.(\d+)|pending\.in_process)\.(ram|disk)", name):
            count = float(match[1] or figure["details"]["count"])
            if figure["value"] > 0:
                found[match[2]].append((count, figure["value"]))
                goals += [(count, figure["bound"])] if figure["bound"] else []
    names = {"ram": "memory", "disk": "disk"}
    series = [
        Series(name=names[key], values=points, colour=number)
        for number, (key, points) in enumerate(found.items())
        if points
    ]
    if not series:
        return ""
    title = "What one waiting message costs"
    return lines(title, series, x="messages that wait", y="bytes per message", is_y_log=True, goals=goals)


def _costs(figures: _ByName) -> str:
    found = [figure for name, figure in figures.items() if name.startswith("costs.64.")]
    values = [
        Row(
            label=figure["details"]["step"],
            value=figure["value"],
            colour=2 if figure["details"]["step"] == "sync" else 0,
        )
        for figure in found
    ]
    return rows("One durable send, step by step, 64 in flight", values, unit="us per message") if values else ""


def _has(figures: _ByName, name: str, detail: str) -> bool:
    return name in figures and detail in figures[name]["details"]


def _colour(each: tuple[tuple[str, int], object]) -> int:
    return each[0][1]


_PICTURES: Mapping[str, Callable[[_ByName], str]] = {
    "send": _send,
    "receive": _receive,
    "lateness": _lateness,
    "wakeup": _wakeup,
    "burst": _burst,
    "overload": _overload,
    "pending": _pending,
    "costs": _costs,
}


def _bars(title: str, figures: _Figures, unit: str) -> str:
    values = []
    for figure in figures:
        values.append(Row(label="this daemon", value=figure["value"], goal=figure["bound"]))
        values += [
            Row(label=each["what"], value=each["value"], colour=2)
            for each in [figure["beside"], *figure["also"]]
            if each
        ]
    return rows(title, values, unit=unit)


def _histogram(title: str, found: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    if not found or not all(sum(many for _, many in histogram) for _, histogram in found):
        return ""
    bounds = [bound for bound, _ in found[0][1]]
    shares = [
        (name, [100 * many / sum(each for _, each in histogram) for _, many in histogram]) for name, histogram in found
    ]
    drawn = [at for at in range(len(bounds)) if any(values[at] >= _SHARE_MIN for _, values in shares)]
    kept = range(drawn[0], drawn[-1] + 1)
    return columns(
        title,
        [f"{bounds[at]:g}" for at in kept],
        [
            Series(name=name, values=[(bounds[at], values[at]) for at in kept], colour=number)
            for number, (name, values) in enumerate(shares)
        ],
        x="ms, up to",
        y="percent of messages",
    )
