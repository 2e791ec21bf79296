"""Forged trails keep the format, and what is said about them is true; so are the lies told about them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.effort import EFFORT, at_length
from support.forges.cells.forge import Truth, forge, same_ledger
from support.forges.trail.damage import DAMAGERS
from support.forges.trail.files import (
    EVENT_SCHEMA,
    cells_of,
    files_of,
    hour_of,
    read_events,
    read_file,
    read_manifest,
    read_snapshots,
)
from support.forges.trail.mutations import MUTATORS, SPOOL_MUTATORS
from support.models.trail.oracle import ask, rows_of

from bench.trail_maker import make_trail

EXITS = {"ACKED", "NACKED", "FILTERED"}
EVENTS = 20_000 if EFFORT > 1 else 5_000  # of a bench's trail
MESSAGES = 2_500 if EFFORT > 1 else 1_500
KEYS = {"window_start_ms", "topic", "group", "cell", "type"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A trail with a bit of everything, and three snapshots of each cell."""
    return forge(tmp_path_factory.mktemp("forged"), messages=MESSAGES, seed=7, snapshots=3, rows_per_file=300)


@pytest.fixture
def copy(truth: Truth, tmp_path: Path) -> Path:
    """A copy to bend."""
    return shutil.copytree(truth.path, tmp_path / "trail")


def test_files(truth: Truth) -> None:
    """Files follow one another without a gap, lie where their hour says, and are as the manifest says."""
    for cell in cells_of(truth.path):
        following = 1
        lines = read_manifest(truth.path, cell)
        assert [truth.path / line["path"] for line in lines] == files_of(truth.path, cell)
        for line in lines:
            path = truth.path / line["path"]
            table = pq.ParquetFile(path).read()
            rows = table.num_rows
            assert table.schema == EVENT_SCHEMA
            assert table.schema.metadata[b"rockdmq.trail_version"] == b"1"
            assert table["sequence"].to_pylist() == list(range(following, following + rows))
            assert (line["first_sequence"], line["last_sequence"]) == (following, following + rows - 1)
            assert path.name == f"{following:020}-{following + rows - 1:020}.parquet"
            assert line["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
            assert {hour_of(event.at_ms) for event in read_file(path)} == {
                (path.parents[1].name.removeprefix("date="), path.parent.name.removeprefix("hour="))
            }
            following += rows


def test_every_way(truth: Truth) -> None:
    """A trail holds every kind of event that a daemon and a spool write when nothing is wrong with them."""
    kinds = {event.kind for cell in cells_of(truth.path) for event in read_events(truth.path, cell)}
    assert kinds >= EXITS | {
        *(
            "SCHEDULED",
            "QUEUED",
            "DELIVERED",
            "RECALLED",
            "REPLACED",
            "ABSORBED",
            "EXPIRED",
            "RETRIED",
            "RETRY_MOVED",
            "LEASE_EXPIRED",
        ),
        *("GIVEN_BACK", "POSTPONED", "INVISIBLE_CHANGED", "REDRIVEN", "PURGED", "DEAD_EXHAUSTED", "DEAD_TOO_OLD"),
        "QUEUED_FOR_GROUP",
        *("DEAD_FORWARDED", "DEAD_SENT_BACK", "DEAD_BY_OPERATOR", "SENT", "SEND_FAILED", "SEND_DEAD", "REQUEUED"),
        *("DROPPED", "OPENED", "CLOSED", "HEARTBEAT", "TOPIC_CREATED", "GROUP_CREATED", "SUBSCRIBED"),
    }


def test_ledgers_add_up(truth: Truth) -> None:
    """What went in is what came out, in every row of the truth."""
    for rows, whole in ((truth.scheduled, "scheduled"), (truth.fired, "fired"), (truth.spooled, "spooled")):
        for row in rows:
            assert row.get(whole, 0) == sum(row[name] for name in row.keys() - {*KEYS, whole, "accepted_at_once"})


@pytest.mark.parametrize("seed", range(3 if EFFORT == 1 else 8))
def test_second_opinion(tmp_path: Path, seed: int) -> None:
    """Who knows the files alone comes to the same ledgers, and finds nothing."""
    truth = forge(tmp_path, messages=(30, 300, 1_500)[seed % 3], seed=seed, snapshots=1 + seed % 3, failing=0.3)
    said = ask(tmp_path)
    assert said.watermark_ms == truth.watermark_ms
    assert said.findings == set()
    assert (
        same_ledger(
            truth.scheduled, rows_of(said.scheduled, ("window_start_ms", "topic")), ("window_start_ms", "topic")
        )
        == []
    )
    assert same_ledger(truth.fired, rows_of(said.fired, ("topic", "group")), ("topic", "group")) == []
    assert same_ledger(truth.spooled, rows_of(said.spooled, ("cell", "type")), ("cell", "type")) == []


def test_snapshots(truth: Truth) -> None:
    """Snapshots lie at the end and in the middle; each is of a number of the trail."""
    for cell, about in zip(cells_of(truth.path), truth.cells, strict=True):
        sequences = [snapshot.sequence for snapshot in read_snapshots(truth.path, cell)]
        assert len(sequences) == 3
        assert sequences[-1] == about["snapshot_sequence"] == about["last_sequence"]


@pytest.mark.parametrize("count", [pytest.param(1, marks=at_length), 10, pytest.param(100, marks=at_length)])
@pytest.mark.parametrize("name", MUTATORS)
def test_mutations(copy: Path, name: str, count: int) -> None:
    """A mutator lies about the messages it names, and about nothing else."""
    lie = MUTATORS[name](copy, "daemon-0", count, 3, ())
    assert len(lie.message_ids) == count
    assert [event.sequence for event in read_events(copy, "daemon-0")] == [
        number for number, _ in enumerate(read_events(copy, "daemon-0"), start=1)
    ]
    found = {(each.kind, each.group, each.message_id) for each in ask(copy).findings}
    assert found == set(lie.findings)


def test_mutations_together(copy: Path) -> None:
    """Mutators can be laid over one another when each avoids the messages of those before it."""
    told: set[tuple[str, str | None, str]] = set()
    for mutator in MUTATORS.values():
        told |= mutator(copy, "daemon-0", 20, 5, {message_id for _, _, message_id in told}).findings
    assert {(each.kind, each.group, each.message_id) for each in ask(copy).findings} == told


def test_mutations_of_spools(copy: Path) -> None:
    """Entries that a spool never sent are found, and nothing else."""
    lie = SPOOL_MUTATORS["lose_sent"](copy, "spool-0", 10, 3, ())
    assert len(lie.message_ids) == 10
    assert {(each.kind, each.group, each.message_id) for each in ask(copy).findings} == set(lie.findings)


@pytest.mark.parametrize("name", [name for name in DAMAGERS if name != "alter_files"])
def test_damage(copy: Path, name: str) -> None:
    """Damage leaves the gaps that it names; nothing is lost because of it, and only what it touched is unclear."""
    damage = DAMAGERS[name](copy, "daemon-0", 3, 3)
    said = ask(copy)
    assert tuple(said.gaps["daemon-0"]) == damage.gaps
    assert {each.kind for each in said.findings} <= {"INCONCLUSIVE"}
    assert {each.message_id for each in said.findings} <= damage.touched


def test_altered_files(copy: Path) -> None:
    """An altered file differs from its line of the manifest, the others do not."""
    damage = DAMAGERS["alter_files"](copy, "daemon-0", 2, 3)
    lines = read_manifest(copy, "daemon-0")
    found = {
        line["path"]
        for line in lines
        if hashlib.sha256((copy / line["path"]).read_bytes()).hexdigest() != line["sha256"]
    }
    assert found == damage.altered
    assert len(damage.altered) == 2


def test_long_trails(tmp_path: Path) -> None:
    """What the bench audits is a sound trail too, of about as many events as were asked for."""
    made = make_trail(tmp_path / "trail", EVENTS)
    said = ask(tmp_path / "trail")
    assert said.findings == set()
    assert said.gaps == {"bench": []}
    assert made.events == pytest.approx(EVENTS, rel=0.05)
    assert sum(row["scheduled"] for row in said.scheduled.values()) == made.scheduled
    assert sum(row["fired"] for row in said.fired.values()) == made.fired
