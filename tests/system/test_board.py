"""The Grafana board follows the rules of its format, and each expression has a result for a daemon under load.

Grafana itself is not used: no package of it can be installed here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from support.clients.wire.client import WireClient, a_message
from support.effort import at_length
from support.rigs.daemon.process import Daemon, free_port, run_command
from support.rigs.faults.wall_shim import WallShim
from support.rigs.services.prometheus import RULES, Period, assert_results, program, rules, scrape, scrape_until

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.metrics.registry import Metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # the base of a copy needs processes of its own
BOARD = json.loads((RULES.parents[1] / "grafana" / "rock-dmq.json").read_text(encoding="utf-8"))
PANELS = [each for each in BOARD["panels"] if each["type"] != "row"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PATIENCE_S = 120.0
AHEAD_MS = 65_000  # of the daemon's clock


def expressions(rate_interval: str = "$__rate_interval", instance: str = "$instance") -> dict[str, list[str]]:
    """Return the expressions of each panel, with values for Grafana's variables."""
    return {
        panel["title"]: [
            target["expr"].replace("$__rate_interval", rate_interval).replace("$instance", instance)
            for target in panel["targets"]
        ]
        for panel in PANELS
    }


# -- the file ----------------------------------------------------------------------------------------------------------


def test_every_metric_of_a_rule_or_a_panel_exists() -> None:
    """A renamed metric is found here and not by an empty panel, or an alert that never fires."""
    families = list(Metrics(process=False).registry.collect())
    known = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    named = [rule["expr"] for rule in rules().values()]
    named += [each for found in expressions().values() for each in found]
    used = {name.removesuffix("_bucket") for each in named for name in re.findall(r"\bdmq_\w+", each)}
    assert used - known == set()
    assert len(used) > 30


def test_the_board_is_in_the_classic_format() -> None:
    """The fields of a dashboard that Grafana 10.4 and newer import, and a choice of the data source."""
    assert BOARD["schemaVersion"] == 39
    assert re.fullmatch(r"[\w-]{1,40}", BOARD["uid"])
    assert "id" not in BOARD  # a number of one installation
    assert re.fullmatch(r"\d+[smhd]", BOARD["refresh"])
    assert BOARD["time"].keys() == {"from", "to"}
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["instance"]["datasource"] == DATASOURCE
    assert list(variables) == ["datasource", "instance"]  # a variable may use earlier ones


def test_each_panel_and_query_is_complete() -> None:
    """Unique ids and titles, the chosen data source, one letter for each query, thresholds from the lowest."""
    assert max(Counter(each["id"] for each in BOARD["panels"]).values()) == 1
    assert max(Counter(each["title"] for each in BOARD["panels"]).values()) == 1
    for panel in PANELS:
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["datasource"] == DATASOURCE
        assert panel["description"].endswith(".")
        assert [each["refId"] for each in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            assert 'instance=~"$instance"' in target["expr"]
            assert target["legendFormat"]
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [{"value": None}])
        values = [each["value"] for each in steps]
        assert values[0] is None
        assert values[1:] == sorted(values[1:])


def test_panels_do_not_overlap() -> None:
    """Each is on the grid of 24 columns, below the row that it belongs to."""
    places = {each["title"]: each["gridPos"] for each in BOARD["panels"]}
    for place in places.values():
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        assert min(place["w"], place["h"]) > 0
    for (one, a), (other, b) in combinations(places.items(), 2):
        is_apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        is_apart |= a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert is_apart, (one, other)
    order = [(each["gridPos"]["y"], each["gridPos"]["x"]) for each in BOARD["panels"]]
    assert order == sorted(order)
    assert all(each["panels"] == [] and not each["collapsed"] for each in BOARD["panels"] if each["type"] == "row")


# -- a daemon under load -----------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """A daemon with a second copy and backups, and its client."""

    daemon: Daemon
    client: WireClient

    def make(self, name: str) -> None:
        """Cause each kind of figure: deliveries, retries, dead letters, refusals, late and pending messages."""
        client, hour_ms = self.client, now_ms() + 3_600_000
        send = (a_message("orders", f"{name}{number}") for number in range(4))
        assert client.send(*send).status.code == wire.OK
        assert client.send(a_message("orders", f"{name}5", deliver_at_ms=hour_ms)).status.code == wire.OK
        found = client.receive("orders", "billing", batch=1, wait_s=10)
        request = wire.ForwardMessageToDeadLetterQueueRequest(
            group=wire.Resource(name="billing"),
            topic=wire.Resource(name="orders"),
            receipt_handle=found[0].receipt_handle,
            message_id=found[0].message_id,
            delivery_attempt=1,
            max_delivery_attempts=1,
        )
        assert client.ask("ForwardMessageToDeadLetterQueue", request).status.code == wire.OK
        assert len(client.drain("orders", "billing", 3)) == 3
        self.delay(name)
        sent = [client.send(a_message("bills", f"{name}{number}", deliver_at_ms=hour_ms)) for number in (6, 7)]
        assert sent[-1].status.code == wire.TOO_MANY_REQUESTS

    def delay(self, name: str) -> None:
        """Send a delayed message and receive it; again if it was due before it was accepted."""
        late = 'dmq_topic_lateness_seconds_count{messaging_destination_name="orders"}'
        before = scrape(self.daemon.metrics_address).value(late)
        for delay_ms in (500, 4_000, 16_000, 64_000):
            message = a_message("orders", f"{name}{delay_ms}", deliver_at_ms=now_ms() + delay_ms)
            assert self.client.send(message).status.code == wire.OK
            assert len(self.client.drain("orders", "billing", 1, within_s=PATIENCE_S)) == 1
            if scrape(self.daemon.metrics_address).value(late) > before:
                return
        raise AssertionError("no message was delayed")


def now_ms() -> int:
    """Return the time of the daemon's clock."""
    return SystemClock().now_ms() + AHEAD_MS


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """The daemon; its topic bills accepts one pending message."""
    folder = tmp_path_factory.mktemp("board")
    for name in ("copy", "backups"):
        (folder / name).mkdir()
    settings = {
        "DMQ_REPLICA": "sync",
        "DMQ_REPLICA_URL": (folder / "copy").as_uri(),
        "DMQ_REPLICA_BASE_EVERY": "1m",
        "DMQ_BACKUP_EVERY": "1m",
        "DMQ_BACKUP_DIR": str(folder / "backups"),
    }
    shim = WallShim(folder)
    env = {**os.environ, **settings, **shim.environment}
    with (
        Daemon(folder / "data", env=env, metrics="127.0.0.1:0") as daemon,
        WireClient(daemon.address) as client,
    ):
        client.receive("orders", "billing")
        client.receive("bills", "billing")
        limited = run_command("topic", "set", "bills", "--max-pending", "1", "--address", daemon.address)
        assert limited.returncode == 0, limited
        shim.step(AHEAD_MS)  # to the time of the first base
        daemon.wait_for("replica_base_verified", timeout_s=PATIENCE_S)
        scrape_until(daemon.metrics_address, "dmq_last_backup_timestamp_seconds", 1)
        yield Load(daemon, client)


def test_each_expression_has_a_result(load: Load) -> None:
    """The real Prometheus evaluates all of them over the figures before and after a load."""
    load.make("A")
    before = scrape(load.daemon.metrics_address)
    load.make("B")
    after = scrape(load.daemon.metrics_address)
    found = [each for one in expressions("1m", ".*").values() for each in one]
    assert_results([Period({"orders": before}, 300), Period({"orders": after}, 30)], found)


@at_length
def test_a_running_prometheus_shows_each_panel(load: Load, tmp_path: Path) -> None:
    """It scrapes the daemon each second and loads the rules; the query of the variable finds the daemon."""
    address = load.daemon.metrics_address
    with running_prometheus(tmp_path, address) as ask:
        wanted = expressions("10s", address)
        until_s, number = time.monotonic() + PATIENCE_S, 0
        while wanted:
            load.make(f"C{number}-")
            number += 1
            wanted = {
                title: left
                for title, found in wanted.items()
                if (left := [each for each in found if not ask("query", query=each)["result"]])
            }
            assert time.monotonic() < until_s, wanted
        assert [each["instance"] for each in ask("series", **{"match[]": "dmq_info"})] == [address]
        (group,) = ask("rules")["groups"]
        assert {each["name"]: each["health"] for each in group["rules"]} == dict.fromkeys(rules(), "ok")
        firing = ask("query", query='ALERTS{alertstate="firing"}')["result"]
        assert {each["metric"]["alertname"] for each in firing} == {"DmqDeadLetters"}


@contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[Any]:
    """Run Prometheus; the value is a function that calls its API."""
    listen = f"127.0.0.1:{free_port()}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "dmq", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config), encoding="utf-8")
    options = ("--config.file=prometheus.yaml", "--storage.tsdb.path=series", f"--web.listen-address={listen}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *options], cwd=folder, stdout=log, stderr=log)

    def ask(path: str, **query: str) -> Any:  # noqa: ANN401 - JSON
        with urllib.request.urlopen(f"http://{listen}/api/v1/{path}?{urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    try:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://{listen}/-/ready", timeout=30).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
                assert time.monotonic() < until_s
                time.sleep(0.1)
        yield ask
    finally:
        process.kill()
        process.wait()
