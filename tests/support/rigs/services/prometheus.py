"""The real Prometheus evaluates rules and expressions over figures scraped from real daemons.

``promtool test rules`` runs on virtual time: a scrape is repeated for as long as its state lasts, so ``for: 2d``
takes no time. Only that repetition is assumed; every value is a scraped one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.clients.official.builds import CLIENTS

RULES = Path(__file__).parents[4] / "deploy" / "prometheus" / "rules.yaml"
_LEAD_S = 3600  # of virtual time before the first scrape, so that times before it are positive
_SCRAPE_S_MAX = 30.0
_PATIENCE_S = 120.0  # figures of groups may be a minute old
_PROMTOOL_S_MAX = 120.0


def program(name: str) -> Path:
    """Return the path of ``promtool`` or ``prometheus``; skip the test without it."""
    found = shutil.which(name) or shutil.which(name, path=str(CLIENTS / "prometheus" / ".cache"))
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is required in CI: make prometheus")
        pytest.skip(f"no {name}: install the package prometheus, or run CI=1 make prometheus")
    return Path(found)


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool to its end."""
    return subprocess.run(
        [program("promtool"), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=_PROMTOOL_S_MAX,
        check=False,
    )


def rules() -> dict[str, dict[str, Any]]:
    """Return the alert rules of the product by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


class Scrape(NamedTuple):
    """Values by series at a time; none if nothing answered."""

    at_s: float
    values: Mapping[str, float]
    text: str = ""

    def value(self, series: str) -> float:
        """Return one value; 0 if it is absent."""
        return self.values.get(series, 0.0)


def scrape(address: str) -> Scrape:
    """Scrape the metrics at an address, as Prometheus does."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SCRAPE_S_MAX) as answer:
            text = answer.read().decode()
    except OSError:
        return Scrape(time.time(), {})
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return Scrape(time.time(), {_series(each.name, each.labels): each.value for each in samples}, text)


def scrape_until(address: str, series: str, least: float, most: float = math.inf) -> Scrape:
    """Scrape until a series has a value in this range."""
    until_s = time.monotonic() + _PATIENCE_S
    while not least <= (found := scrape(address)).value(series) <= most:
        assert time.monotonic() < until_s, f"{series} stays {found.value(series)}"
        time.sleep(0.05)
    return found


class Period(NamedTuple):
    """A stretch of virtual time in which every scrape of an instance has the same result."""

    scrapes: Mapping[str, Scrape]  # by instance
    lasts_s: int = 900
    firing: Sequence[str] | None = None  # alerts that fire at its end; None: any


def assert_alerts(
    *periods: Period, only: Sequence[str] = (), every_s: int = 15, adjusted: Mapping[str, str] | None = None
) -> None:
    """Assert which alerts fire at the end of each period; ``only`` limits the comparison to these alerts.

    ``adjusted`` has the threshold that replaces the one of a rule marked *adjust*.
    """
    ends_s, cases = _LEAD_S, []
    chosen = f',alertname=~"{"|".join(only)}"' if only else ""
    for period in periods:
        ends_s += period.lasts_s
        if period.firing is not None:
            expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(period.firing)]
            expression = f'group by (alertname) (ALERTS{{alertstate="firing"{chosen}}})'
            cases.append((ends_s - every_s, expression, expected))
    text = RULES.read_text(encoding="utf-8")
    for name, threshold in (adjusted or {}).items():
        text, count = re.subn(rf"(alert: {name}\n\s+expr: .*) [\d.]+  # adjust", rf"\1 {threshold}", text)
        assert count == 1, f"{name} has no threshold to adjust"
    names = {name for rule in rules().values() for name in re.findall(r"\bdmq_\w+", rule["expr"])}
    evaluate(periods, cases, names=names, rules_text=text, every_s=every_s)


def assert_results(periods: Sequence[Period], expressions: Sequence[str], *, every_s: int = 15) -> None:
    """Assert that each expression has a result at the end of the last period."""
    at_s = _LEAD_S + sum(each.lasts_s for each in periods) - every_s
    cases = [(at_s, f"group({each})", [{"labels": "{}", "value": 1}]) for each in expressions]
    names = {name for each in expressions for name in re.findall(r"\bdmq_\w+", each)}
    evaluate(periods, cases, names=names, every_s=every_s)


def evaluate(
    periods: Sequence[Period],
    cases: Sequence[tuple[int, str, list[dict[str, Any]]]],
    *,
    names: set[str],
    rules_text: str = "groups: []",
    every_s: int,
) -> None:
    """Run promtool over the series of these metrics, with cases of time, expression and expected samples."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "rules.yaml").write_text(rules_text, encoding="utf-8")
        test = {
            "interval": f"{every_s}s",
            "input_series": [
                {"series": series, "values": values} for series, values in _input_series(periods, names, every_s)
            ],
            "promql_expr_test": [
                {"eval_time": f"{at_s}s", "expr": expression, "exp_samples": expected}
                for at_s, expression, expected in cases
            ],
        }
        content = {"rule_files": ["rules.yaml"], "evaluation_interval": f"{every_s}s", "tests": [test]}
        (Path(folder) / "tests.yaml").write_text(json.dumps(content), encoding="utf-8")
        done = promtool("test", "rules", f"{folder}/tests.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def _input_series(periods: Sequence[Period], names: set[str], every_s: int) -> Iterator[tuple[str, str]]:
    """Yield each series with its values in the notation of promtool."""
    origin_s = min(each.at_s for each in periods[0].scrapes.values()) - _LEAD_S
    for instance in sorted({name for period in periods for name in period.scrapes}):
        found = [period.scrapes.get(instance) for period in periods]
        series = {name for each in found if each is not None for name in each.values if _metric(name) in names}
        labels = {"instance": instance, "job": "dmq"}
        up = [(None if each is None else float(bool(each.values))) for each in found]
        yield _series("up", labels), _values(periods, up, every_s)
        for name in sorted(series):
            shift_s = origin_s if _metric(name).endswith("_timestamp_seconds") else 0.0
            raw = [None if each is None else each.values.get(name) for each in found]
            values = [value - shift_s if value else value for value in raw]
            yield _labelled(name, labels), _values(periods, values, every_s)


def _values(periods: Sequence[Period], values: Sequence[float | None], every_s: int) -> str:
    words, before = [f"_x{_LEAD_S // every_s}"], None
    for period, value in zip(periods, values, strict=True):
        count = period.lasts_s // every_s
        if value is not None:
            words.append(f"{value!r}x{count - 1}")
        else:
            words += ["stale", f"_x{count - 1}"] if before is not None else [f"_x{count}"]
        before = value
    return " ".join(words)


def _series(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}" if pairs else name


def _labelled(series: str, labels: Mapping[str, str]) -> str:
    added = _series("", labels)
    return f"{series[:-1]},{added[1:]}" if series.endswith("}") else series + added


def _metric(series: str) -> str:
    return series.partition("{")[0]
