"""The benches work and keep what they promise to keep. What they measure is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.effort import at_length

from bench import costs, echo_http2
from bench.cell import quantiles
from bench.figures import Beside, Figure
from bench.load import check, generator

pytestmark = pytest.mark.bench
ROOT = Path(__file__).resolve().parents[2]


def run_bench(kept: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        # The Go generator would be built first, which takes a compiler's time and, on a new machine, the network.
        [sys.executable, "-m", "bench", "--quick", "--load", "python", "--json", str(kept), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def test_a_quick_run_keeps_its_figures(tmp_path: Path) -> None:
    kept = run_bench(tmp_path / "results.json", "--only", "enqueue")
    assert kept["schema"] == 2
    assert kept.keys() == {"schema", "machine", "at_ms", "commit", "options", "figures"}
    assert isinstance(kept["options"], dict)
    assert kept["options"]["rounds"] == 1
    assert kept["options"]["failed"] == {}
    assert isinstance(kept["figures"], list)
    figure, scattered = kept["figures"]
    assert figure["name"] == "enqueue_in_process"
    assert scattered["name"] == "enqueue_in_process.scattered"
    assert figure["unit"] == "messages/s"
    assert 0 < figure["min"] <= figure["value"] <= figure["max"]
    assert len(figure["rounds"]) == 1
    assert figure["ratio"] == pytest.approx(figure["value"] / figure["beside"]["value"])
    assert isinstance(figure["is_met"], bool)
    assert figure["is_steady"] is True  # one round cannot disagree with itself


def test_rounds_that_disagree_are_flagged() -> None:
    """A floor that swings tenfold gives a ratio that means nothing, and must not look like one that does."""
    swinging = Beside(what="floor", rounds=[20_000, 33_000, 213_000])
    steady = Beside(what="floor", rounds=[200_000, 205_000, 213_000])
    for beside, is_steady in ((swinging, False), (steady, True), (None, True)):
        figure = Figure(name="a", what="b", unit="c", rounds=[50_000, 55_000, 59_000], beside=beside)
        assert figure.is_steady is is_steady
        assert figure.plain()["is_steady"] is is_steady


def test_a_difference_is_as_steady_as_its_neighbours() -> None:
    for alone, is_steady in (([4.0, 5.0, 4.5], True), ([4.0, 40.0, 5.0], False)):
        added = Figure(
            name="a",
            what="b",
            unit="ms",
            rounds=[-0.2, 0.0, 1.5],
            beside=Beside(what="alone", rounds=alone),
            is_difference=True,
        )
        assert added.is_steady is is_steady


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "p999": 3.0, "max": 3.0}
    assert quantiles(range(1000)) == {"p50": 500, "p99": 990, "p999": 999, "max": 999}


@at_length
def test_nacks_are_shown_next_to_a_floor_and_acks(tmp_path: Path) -> None:
    kept = run_bench(tmp_path / "results.json", "nack")
    assert isinstance(kept["figures"], list)
    figures = {figure["name"]: figure for figure in kept["figures"]}
    for in_flight in (64, 256):
        floor, acks = figures[f"nack.{in_flight}"], figures[f"nack.{in_flight}.to_acks"]
        assert floor["rounds"] == acks["rounds"]
        assert floor["beside"]["value"] > 0 < acks["beside"]["value"]
    late = [f"nack.lateness.{place}.{name}" for place in ("queue", "consumer") for name in ("p50", "p99", "p999")]
    assert all(figures[name]["beside"]["what"] == "delayed messages" for name in late)


@at_length
@pytest.mark.timeout(200)
def test_a_disturbance_is_compared_with_an_idle_run(tmp_path: Path) -> None:
    kept = run_bench(tmp_path / "results.json", "fairness", "--retries", "500")
    assert isinstance(kept["options"], dict)
    assert kept["options"]["retries"] == 500
    assert isinstance(kept["figures"], list)
    figures = {figure["name"]: figure for figure in kept["figures"]}
    for name in ("retries_spread", "retries_burst", "refusing", "hoarding"):
        for place in ("queue", "consumer"):
            p99, added = figures[f"fairness.{name}.{place}.p99"], figures[f"fairness.{name}.{place}.p99_added"]
            assert added["value"] == pytest.approx(p99["value"] - p99["beside"]["value"])  # one round: one pair
            assert added["goal"].startswith("<= ")
            assert p99["details"]["handed_over_beside"] or p99["details"]["leases_beside"]


@at_length
@pytest.mark.timeout(200)
def test_topics_with_trouble_are_compared_with_topics_without(tmp_path: Path) -> None:
    kept = run_bench(tmp_path / "results.json", "neighbours", "--overdue", "500")
    assert isinstance(kept["figures"], list)
    figures = {figure["name"]: figure for figure in kept["figures"]}
    assert figures["neighbours.early"]["value"] == 0
    for place in ("queue", "consumer"):
        p99, added = figures[f"neighbours.{place}.p99"], figures[f"neighbours.{place}.p99_added"]
        assert added["value"] == pytest.approx(p99["value"] - p99["beside"]["value"])  # one round: one pair
        assert p99["details"]["handed_over_beside"] >= 500


def test_a_window_in_which_nothing_is_answered_lasts_until_something_is() -> None:
    """On a machine that stands still the generator in Python finds something all the same."""
    with echo_http2.running("parsed") as server:
        found = generator("python").run("send", address=server.address, echo=True, in_flight=4, seconds=0)
    check(found)
    assert found["calls"] >= 1


@at_length
def test_a_daemon_is_loaded_without_go(tmp_path: Path) -> None:
    """The generator in Python stands in where there is no Go."""
    kept = run_bench(tmp_path / "results.json", "--only", "burst")
    assert isinstance(kept["figures"], list)
    assert {figure["name"] for figure in kept["figures"]} == {"burst.in_process", "burst.daemon", "burst.client"}


def test_deliveries_and_costs_of_sends_are_measured_and_shown_on_a_page(tmp_path: Path) -> None:
    """Long polls, a backlog and the steps of a send are measured for real, and each figure is on the page."""
    kept = run_bench(tmp_path / "results.json", "wakeup", "receive", "costs")
    assert isinstance(kept["figures"], list)
    figures = {figure["name"]: figure for figure in kept["figures"]}
    assert figures["wakeup.p50"]["value"] <= figures["wakeup.p99"]["value"]
    assert sum(many for _, many in figures["wakeup.p50"]["details"]["histogram"]) > 0
    assert figures["receive"]["beside"]["what"] == "in process, no wire"
    assert figures["receive"]["details"]["cpu_us"] > 0
    steps = {f"costs.{in_flight}.{step}" for in_flight in (64, 256) for step in costs.WHAT}
    assert steps == {name for name in figures if name.startswith("costs.")}
    assert all(
        figures[name]["value"] > 0 for name in steps if not name.endswith(".rest")
    )  # what is left may be nothing
    page = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert "This was a quick run" in page
    assert "not asked for (--peer)" in page
    assert all(f"`{name}`" in page for name in figures if name not in steps)
    assert "| parse | decode the request (protobuf) |" in page
    for name in ("wakeup", "receive", "costs"):
        assert f"](pictures/{name}.svg)" in page
        assert (tmp_path / "pictures" / f"{name}.svg").exists()


@at_length
def test_the_hook_is_shown_next_to_the_bare_call_the_floor_and_persist_queue(tmp_path: Path) -> None:
    """Each figure of the hook has beside it what it is to be read against."""
    kept = run_bench(tmp_path / "results.json", "hook")
    assert isinstance(kept["figures"], list)
    figures = {figure["name"]: figure for figure in kept["figures"]}
    for threads in (1, 16):
        assert figures[f"hook.send.{threads}"]["beside"]["what"] == "the bare call"
        assert figures[f"hook.send.{threads}"]["goal"] == "<= 20"
    for threads in (1, 16, 64):
        floor, peer = figures[f"hook.spooling.{threads}"], figures[f"hook.spooling.{threads}.to_ack_queue"]
        assert floor["rounds"] == peer["rounds"]
        assert floor["beside"]["what"].endswith(f"{threads} to a sync")
        assert peer["beside"]["what"].startswith("persist-queue")
        assert (floor["goal"] is not None) == (threads == 16)
    assert "get + ack of 2000, 8 threads" in figures["hook.drain.8"]["beside"]["what"]
    assert figures["hook.drain.2.ramped"]["beside"]["value"] == figures["hook.drain.2"]["value"]


@at_length
def test_a_spool_is_opened_after_a_close_and_after_a_kill(tmp_path: Path) -> None:
    """Opening is measured for both ends of the run before, with as many entries as were asked for."""
    kept = run_bench(tmp_path / "results.json", "spool", "--spooled", "1000")
    assert isinstance(kept["options"], dict)
    assert kept["options"]["spooled"] == 1000
    assert isinstance(kept["figures"], list)
    figures = {figure["name"]: figure for figure in kept["figures"]}
    for end in ("closed", "killed"):
        for name, goal in (("ready", "<= 1"), ("first", "<= 1"), ("memory", "<= 150")):
            figure = figures[f"spool.open.{end}.{name}"]
            assert "1000 due entries" in figure["what"]
            assert figure["goal"] == goal
        assert figures[f"spool.open.{end}.first"]["value"] >= figures[f"spool.open.{end}.ready"]["value"]
    for threads in (1, 16, 64):
        for peer in ("ack_queue", "sqlite_queue", "file_queue", "file_queue_synced"):
            assert figures[f"spool.put.{threads}.to_{peer}"]["beside"]["value"] > 0
