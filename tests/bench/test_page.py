"""What is kept, and the page and pictures that are made of it, without measuring anything."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from bench import page, report, rocketmq
from bench.figures import Beside, Figure, Goal
from bench.kept import NothingKept, keep, read
from bench.load import Load
from bench.pictures import pictures_of
from bench.place import disk_bytes, syncs
from bench.plan import Plan
from bench.rocketmq import PeerMissing
from bench.svg import Row, Series, amount, columns, lines, rows
from broker_adapter.runtime.clock import SystemClock

pytestmark = pytest.mark.bench
HERE: Mapping[str, Any] = {
    "cpus": 2,
    "cpu": "one & only",
    "memory_gb": 4.0,
    "kernel": "6.1",
    "python": "3.11.9",
    "libraries": {"rocksdict": "0.3.29"},
    "disk_sync_ms": {"p50": 0.15, "p99": 0.9},
    "load_average": [0.1, 0.1, 0.1],
}
OPTIONS = {"is_quick": False, "native_load": True, "peer": "not asked for (--peer)", "failed": {}}


def sent(per_s: float, *, peer: float | None = None) -> Figure:
    """A figure of sends, beside what the real one stands beside."""
    also = [Beside(what="grpcio echo", rounds=[4000.0])]
    if peer is not None:
        also.append(Beside(what=rocketmq.NAME, rounds=[peer]))
    return Figure(
        name="grpc_send.normal.64",
        what="sends",
        unit="messages/s",
        rounds=[per_s],
        goal=Goal(sign=">=", bound=20_000),
        beside=Beside(what="echo on our transport", rounds=[40_000.0]),
        also=also,
    )


def waiting(count: int, ram: float) -> Figure:
    """A figure of what one waiting message takes."""
    return Figure(name=f"sizes.{count}.ram", what="w", unit="B/message", rounds=[ram], details={"count": count})


def kept_in(path: Path, groups: Mapping[str, Sequence[Figure]], here: Mapping[str, Any] = HERE) -> dict[str, Any]:
    keep(path, groups, OPTIONS, here=here, clock=SystemClock())
    return read(path)


def names(kept: Mapping[str, Any]) -> set[str]:
    return {figure["name"] for figure in kept["figures"]}


def test_a_repeated_measurement_replaces_only_its_part(tmp_path: Path) -> None:
    """One name measured again leaves the others on the page, each with its own commit and date."""
    path = tmp_path / "results.json"
    kept_in(path, {"grpc_send": [sent(10_000)], "sizes": [waiting(1000, 50)]})
    kept = kept_in(path, {"grpc_send": [sent(22_000)]})
    assert names(kept) == {"grpc_send.normal.64", "sizes.1000.ram"}
    assert [figure["value"] for figure in kept["figures"] if figure["group"] == "grpc_send"] == [22_000]


def test_a_failed_or_foreign_measurement_is_not_shown_as_measured(tmp_path: Path) -> None:
    """A name that failed has no figures left, and figures of another machine do not stand beside these."""
    path = tmp_path / "results.json"
    kept_in(path, {"grpc_send": [sent(10_000)], "sizes": [waiting(1000, 50)]})
    assert names(kept_in(path, {"grpc_send": []})) == {"sizes.1000.ram"}
    assert names(kept_in(path, {"grpc_send": [sent(1)]}, {**HERE, "kernel": "6.2"})) == {"grpc_send.normal.64"}


def test_handwritten_text_stays(tmp_path: Path) -> None:
    """The page is written anew around the part between its marks."""
    path = tmp_path / "results.json"
    kept_in(path, {"grpc_send": [sent(10_000)]})
    report.write(path, tmp_path)
    first = (tmp_path / report.PAGE).read_text(encoding="utf-8")
    assert page.NOTHING_BY_HAND in first
    by_hand = "The transport takes a third.\n\n| step | us |\n| --- | --- |\n| wire | 20 |"
    (tmp_path / report.PAGE).write_text(first.replace(page.NOTHING_BY_HAND, by_hand), encoding="utf-8")
    kept_in(path, {"grpc_send": [sent(30_000)]})
    report.write(path, tmp_path)
    second = (tmp_path / report.PAGE).read_text(encoding="utf-8")
    assert by_hand in second
    assert "30 000 messages/s" in second
    assert "10 000 messages/s" not in second
    report.write(path, tmp_path)
    assert (tmp_path / report.PAGE).read_text(encoding="utf-8") == second


def test_the_page_names_missed_goals_and_missing_measurements(tmp_path: Path) -> None:
    """A missed goal stands first, a peer that was not there has no figure, a part that failed is named."""
    path = tmp_path / "results.json"
    kept = kept_in(path, {"grpc_send": [sent(10_000)]})
    text = page.page_of({**kept, "options": {**OPTIONS, "failed": {"burst": "too | slow"}}}, {}, "")
    assert "0 of 1 goals are met" in text
    assert "| `grpc_send.normal.64` | 10 000 messages/s | >= 20 000 |" in text
    assert "- burst: too \\| slow" in text
    assert "RocketMQ not asked for" in text
    assert rocketmq.NAME not in text
    beside = page.page_of(kept_in(path, {"grpc_send": [sent(30_000, peer=7_000)]}), {}, "")
    assert f"{rocketmq.NAME}: 7 000" in beside
    assert "1 of 1 goals are met" in beside


def test_the_published_page_is_the_recorded_figures(tmp_path: Path) -> None:
    """``python -m bench report`` on the recorded figures changes nothing, so no figure of the page is typed by hand."""
    published = report.DOCS / report.PAGE
    shutil.copytree(report.DOCS / report.PICTURES, tmp_path / report.PICTURES)
    shutil.copy(published, tmp_path)
    report.write(report.RESULTS, tmp_path)
    assert (tmp_path / report.PAGE).read_text(encoding="utf-8") == published.read_text(encoding="utf-8")


def test_a_picture_without_its_histogram_is_kept(tmp_path: Path) -> None:
    """A figure that was recorded without details leaves the picture of the run before, and the page shows it."""
    path = tmp_path / "results.json"
    kept_in(path, {"wakeup": [Figure(name="wakeup.p50", what="w", unit="ms", rounds=[0.1])]})
    (tmp_path / report.PICTURES).mkdir()
    (tmp_path / report.PICTURES / "wakeup.svg").write_text("<svg/>", encoding="utf-8")
    report.write(path, tmp_path)
    assert "](pictures/wakeup.svg)" in (tmp_path / report.PAGE).read_text(encoding="utf-8")
    assert (tmp_path / report.PICTURES / "wakeup.svg").read_text(encoding="utf-8") == "<svg/>"


def test_nothing_kept_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    """No file, a broken one and one of another version each say so."""
    path = tmp_path / "results.json"
    for text, why in ((None, "not there"), ("{", "cannot be read"), ('{"schema": 1}', "another version")):
        if text is not None:
            path.write_text(text, encoding="utf-8")
        with pytest.raises(NothingKept, match=why):
            report.write(path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_a_page_of_other_figures_is_not_written_among_the_documents(tmp_path: Path) -> None:
    """Figures kept elsewhere, such as a quick run's, are shown where they are kept."""
    assert report.folder_of(report.RESULTS) == report.DOCS
    assert report.folder_of(tmp_path / "results.json") == tmp_path


def text_of(svg: str) -> list[str]:
    """The texts of a picture, which must be well-formed XML."""
    return [each.text or "" for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_are_made_of_measurements_alone(tmp_path: Path) -> None:
    """There is a picture for each part that was measured, and none for the others."""
    drawn = pictures_of(kept_in(tmp_path / "r.json", {"grpc_send": [sent(10_000, peer=7_000)]})["figures"])
    assert set(drawn) == {"send"}
    assert {"normal sends", "echo on our transport", "grpcio echo", rocketmq.NAME, "goal 20 k"} <= set(
        text_of(drawn["send"])
    )
    drawn = pictures_of(
        kept_in(tmp_path / "w.json", {"sizes": [waiting(10_000, 300), waiting(10_000_000, 20)]})["figures"]
    )
    assert set(drawn) == {"pending"}
    assert {"10 k", "10 M"} <= set(text_of(drawn["pending"]))


def test_a_picture_contains_any_drawing() -> None:
    """Also one value, zero, and names that XML would read."""
    pictures = [
        lines("a < b", [Series(name="x & y", values=[(1, 0.0)], colour=0)], x="n", y="m"),
        lines(
            "l", [Series(name=f"name {n}" * 4, values=[(1, n), (256, 1e6)], colour=n) for n in range(6)], x="n", y="m"
        ),
        lines("g", [Series(name="x", values=[(1, 1.0), (9, 2.0)], colour=0)], x="n", y="m", goals=[(9, 5.0)]),
        columns("c", ["1", "2"], [Series(name="x", values=[(1, 0.0), (2, 0.0)], colour=1)], x="n", y="m"),
        rows("r", [Row(label="none", value=0.0), Row(label="more", value=7e4, goal=9e4)], unit="ms"),
    ]
    assert not [svg for svg in pictures if "NaN" in svg or "undefined" in svg]
    assert {"a < b", "n", "m"} <= set(text_of(pictures[0]))
    assert {"none", "0", "more", "70 k (goal 90 k)"} <= set(text_of(pictures[4]))


def test_amounts_are_short() -> None:
    """Axes are marked as people say it."""
    assert [amount(value) for value in (0, 0.5, 20_000, 1_250_000)] == ["0", "0.5", "20 k", "1.25 M"]


def test_rounds_end_with_their_time_but_never_before_the_first() -> None:
    """However slow the machine, each part is measured once, and a run ends."""

    def rounds_of(minutes: float) -> list[int]:
        with Progress(disable=True) as progress:
            plan = Plan(
                rounds=3,
                is_quick=True,
                minutes=minutes,
                peer=None,
                pending=1,
                many=0,
                overdue=1,
                retries=1,
                spooled=1,
                events=1,
                load=Load(command=(), is_native=False),
                progress=progress,
                task=progress.add_task("x"),
            )
            return list(plan.each_round())

    assert rounds_of(0) == [0]
    assert rounds_of(1) == [0, 1, 2]


def test_an_unavailable_peer_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Java or Maven there is no figure of the peer, and a reason."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PeerMissing, match="java is not here"), rocketmq.running(Load(command=(), is_native=False)):
        pass


def test_syncs_are_made_one_by_one(tmp_path: Path) -> None:
    """The disk's own rate comes from records that were written and synced."""
    took_ms = syncs(tmp_path / "probe", count=5)
    assert len(took_ms) == 5
    assert all(each > 0 for each in took_ms)
    assert disk_bytes(tmp_path)["all"] >= 5 * 4096


def test_kept_figures_are_plain_json(tmp_path: Path) -> None:
    """What is kept can be read by anybody, with the bound of a goal as a number."""
    path = tmp_path / "results.json"
    kept_in(path, {"grpc_send": [sent(10_000)]})
    (figure,) = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert figure["bound"] == 20_000
    assert [each["what"] for each in figure["also"]] == ["grpcio echo"]
    assert figure["measured"].keys() == {"at_ms", "commit", "options"}
