"""Page assembly: one file without external resources, with the same bytes for the same input."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from spark_audit.report import text
from spark_audit.report.sections.findings import listed
from spark_audit.report.sections.health import health
from spark_audit.report.sections.heatmap import heat_map
from spark_audit.report.sections.lateness import lateness
from spark_audit.report.sections.ledgers import ledgers
from spark_audit.report.sections.retries import dead_letters, errors, ladder
from spark_audit.report.sections.throughput import throughput
from spark_audit.report.sections.verdict import band
from spark_audit.report.windows import Axis, Grid, Row, whole


def write_html(report: dict[str, Any], findings: list[dict[str, Any]], path: Path) -> None:
    """Write the page. It depends only on its input, and not on the clock, the machine or hash order."""
    path.write_bytes(page(report, findings).encode())


def page(report: Row, findings: Sequence[Row]) -> str:
    """Return the page as text. All text from the input is escaped."""
    grid = Grid.of(Axis.of(report), report.get("scheduled") or [])
    times = report.get("range") or {}
    style, script = _asset("page.css"), _asset("page.js")
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            grid=grid,
            covered=text.span(whole(times, "from_ms"), whole(times, "to_ms")),
            band=band(report, grid),
            throughput=throughput(report, grid),
            heatmap=heat_map(report, grid),
            lateness=lateness(report, grid),
            retries=ladder(report),
            dead=dead_letters(report),
            errors=errors(report),
            ledgers=ledgers(report, grid),
            health=health(report),
            findings=listed(report, findings),
            style=style,
            script=script,
            policy=_policy(style, script),
        )
    )


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("spark_audit.report"),
        autoescape=True,
        finalize=_seen,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = (text.count, text.plural, text.duration, text.shortened)
    templates.filters |= {function.__name__: function for function in named}
    return templates


def _seen(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, Markup):
        return text.visible(value)
    return "" if value is None else value


def _policy(style: str, script: str) -> str:
    """Return the content security policy: only the page's own style and script, by hash, so that injected data cannot
    run.
    """
    ours = f"style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(script)}'"
    return f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'"


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


@cache
def _asset(name: str) -> Markup:
    return Markup(resources.files("spark_audit.report").joinpath(name).read_text(encoding="utf-8"))  # noqa: S704 - ours
