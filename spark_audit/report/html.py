"""The page: one file, nothing loaded from anywhere, the same bytes for the same input."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from spark_audit.report import text
from spark_audit.report.findings import listed
from spark_audit.report.health import health
from spark_audit.report.heatmap import heat_map
from spark_audit.report.lateness import lateness
from spark_audit.report.ledgers import ledgers
from spark_audit.report.markup import Markup, el
from spark_audit.report.retries import dead_letters, ladder
from spark_audit.report.throughput import throughput
from spark_audit.report.verdict import band
from spark_audit.report.windows import Axis, Grid, Row, whole

_SECTIONS = (
    ("verdict", "Verdict"),
    ("throughput", "Throughput"),
    ("heatmap", "Topics by windows"),
    ("lateness", "Lateness"),
    ("retries", "Retries"),
    ("dead", "Dead letters"),
    ("ledgers", "Ledgers"),
    ("health", "Trail health"),
    ("findings", "Findings"),
)
# Fills that do not need colour. Drawn once, used by every picture of the page.
_PATTERNS = Markup(
    '<svg class="patterns" aria-hidden="true" focusable="false" width="0" height="0"><defs>'
    '<pattern id="p-bad" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="p-bad-ground"/><rect width="2.4" height="6" class="p-bad-line"/></pattern>'
    '<pattern id="p-unsure" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="5" height="5" class="p-unsure-ground"/><rect width="1.4" height="5" class="p-unsure-line"/></pattern>'
    '<pattern id="p-wait" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<rect width="5" height="5" class="p-wait-ground"/><circle cx="2.5" cy="2.5" r="1" class="p-wait-dot"/></pattern>'
    '<pattern id="p-late" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="p-late-ground"/><rect width="1.6" height="6" class="p-late-line"/></pattern>'
    "</defs></svg>"
)


def write_html(report: dict[str, Any], findings: list[dict[str, Any]], path: Path) -> None:
    """Write the page. It depends on its input alone: no clock, no machine, no order of a hash."""
    path.write_bytes(page(report, findings).encode())


def page(report: Row, findings: Sequence[Row]) -> str:
    """Return the page as text. Every word that comes from the input is escaped."""
    axis = Axis.of(report)
    grid = Grid.of(axis, report.get("scheduled") or [])
    times = report.get("range") or {}
    covered = text.span(whole(times, "from_ms"), whole(times, "to_ms"))
    nav = el(
        "nav",
        el("ul", *(el("li", el("a", words, href=f"#{name}")) for name, words in _SECTIONS)),
        aria_label="Sections",
    )
    body = [
        el("a", "Skip to the pictures", href="#throughput", class_="skip"),
        _PATTERNS,
        band(report, grid),
        nav,
        el(
            "main",
            throughput(report, grid),
            heat_map(report, grid),
            lateness(report, grid),
            ladder(report),
            dead_letters(report),
            ledgers(report, grid),
            health(report),
            listed(report, findings),
        ),
        el("footer", el("p", "All times are UTC. Made by spark_audit from report.json and the findings beside it.")),
        el("div", id="tip", role="status", hidden=True),
    ]
    style, script = _asset("page.css"), _asset("page.js")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", f"Audit: {report.get('verdict')}, {covered}"),
        el("style", Markup(style)),
    )
    return f"<!doctype html>\n{el('html', head, el('body', *body, el('script', Markup(script))), lang='en')}\n"


def _policy(style: str, script: str) -> str:
    """Our own style and script alone, by their hashes: not even what data might smuggle in."""
    rules = [
        "default-src 'none'",
        f"style-src 'sha256-{_digest(style)}'",
        f"script-src 'sha256-{_digest(script)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return resources.files("spark_audit.report").joinpath(name).read_text(encoding="utf-8")
