"""The alert rules and the Grafana board name metrics that exist, and each alert fires in the state it describes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmq.metrics.registry import Metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
BOARD = ROOT / "deploy" / "grafana" / "rock-dmq.json"


def rules() -> list[dict[str, Any]]:
    """Return the alert rules of the product."""
    groups = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """Return the expressions of all alerts and all panels."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [*(rule["expr"] for rule in rules()), *panels]


def metrics() -> set[str]:
    """Return the names of all metrics of a daemon; histograms without a suffix."""
    families = list(Metrics(process=False).registry.collect())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families} | {"dmq_info"}


def test_every_metric_of_a_rule_or_a_panel_exists() -> None:
    """A renamed metric is found here and not by an alert that never fires."""
    named = {name for each in expressions() for name in re.findall(r"\bdmq_\w+", each)}
    known = metrics()
    assert {name for name in named if name.removesuffix("_bucket") not in known} == set()
    assert len(named) > 30


def test_each_alert_names_a_section_of_a_runbook() -> None:
    """The file exists, and the anchor is that of one of its headings."""
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"(?m)^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"))
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, rule["alert"]


def test_each_alert_has_a_test() -> None:
    """And one test is a daemon without a fault."""
    tests = yaml.safe_load((PROMETHEUS / "tests.yaml").read_text(encoding="utf-8"))["tests"]
    assert [each["name"] for each in tests] == [*(rule["alert"] for rule in rules()), "healthy"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (package prometheus)")
def test_each_alert_fires_in_its_state_and_in_no_other() -> None:
    """Prometheus itself evaluates the rules over made-up series."""
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
