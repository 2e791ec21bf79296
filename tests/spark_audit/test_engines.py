"""Both engines say the same to the byte: of a sound trail, of one that lies in every way, of one that is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from support.effort import at_length, drawn
from support.forges.cells.forge import forge
from support.forges.trail.damage import DAMAGERS, change_column, vouch_for
from support.forges.trail.disagreements import DISAGREEMENTS
from support.forges.trail.files import files_of
from support.forges.trail.hand import Hand
from support.forges.trail.mutations import MUTATORS, SPOOL_MUTATORS
from support.forges.trail.read_back import Lies, Range, write_read_back

from spark_audit.engines.duck import DuckEngine
from spark_audit.engines.spark import SparkEngine
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import write_outcome

pytestmark = pytest.mark.spark
DRAWN = drawn(["lies", "damaged files"], 1)  # an audit on Spark takes half a minute of a processor
COMPARED = ("report.json", "findings.csv", "findings.jsonl", "report.html")


@pytest.fixture(scope="module")
def engines(spark: SparkSession) -> Iterator[Mapping[str, TableEngine]]:
    """One of each."""
    with closing(DuckEngine(threads=2)) as duckdb:
        yield {"duckdb": duckdb, "spark": SparkEngine(spark)}


def audited(engines: Mapping[str, TableEngine], trail: Path, out: Path, read_back: Path | None = None) -> int:
    """Audit a trail with both; fail unless all that they write is the same. Return the exit code."""
    codes = set()
    for name, engine in engines.items():
        outcome = run_audit(engine, str(trail), Options(), read_back=None if read_back is None else str(read_back))
        write_outcome(outcome, out / name)
        codes.add(outcome.exit_code)
    for name in COMPARED:
        one, other = ((out / engine / name).read_bytes() for engine in engines)
        assert one == other, name
    (code,) = codes
    return code


@at_length  # the other one has sound parts of every kind beside those that lie
def test_of_a_sound_trail(engines: Mapping[str, TableEngine], tmp_path: Path) -> None:
    """Nothing is found, and the ledgers and pictures are the same."""
    forge(tmp_path / "trail", messages=600, seed=4, rows_per_file=300, snapshots=2)
    assert audited(engines, tmp_path / "trail", tmp_path / "out") == 0


@pytest.mark.skipif("lies" not in DRAWN, reason="the other trail is drawn")
def test_of_a_mutated_and_damaged_trail(engines: Mapping[str, TableEngine], tmp_path: Path) -> None:
    """Every kind of lie that there is, events that disagree, records that are missing, repeated and changed; and of two
    messages that were read back, one is lost.
    """
    trail = tmp_path / "trail"
    forge(trail, messages=2_000, seed=5, rows_per_file=1_000)
    told: set[str] = set()
    for name in sorted(MUTATORS):
        told |= MUTATORS[name](trail, "daemon-0", 2, 7, told).message_ids
    SPOOL_MUTATORS["lose_sent"](trail, "spool-0", 2, 1, ())
    for name in ("cut_records", "repeat_records", "repeat_records_changed"):
        DAMAGERS[name](trail, "daemon-1", 3, 2)
    for write in DISAGREEMENTS:
        hand = Hand(trail, write.__name__, of=f" of {write.__name__}")
        write(hand)
        hand.end(620_000)
    hand = Hand(trail, "read-back", of=" read back")
    for number in range(2):
        hand.queued(number, number)
        hand.of_group("FORWARDED", number, at_ms=1, attempt=1, detail=number)
    before = hand.sequence
    hand.end(1_000)
    there = [Lies(hand.topic, 0, 0, hand.id_of(0)), Lies(hand.topic, 0, 1, hand.id_of(9))]
    write_read_back(tmp_path / "cluster", there, [Range(hand.topic, 0, 0, 2, 2)], {"read-back": before})
    assert audited(engines, trail, tmp_path / "out", tmp_path / "cluster") == 40
    findings = (tmp_path / "out" / "spark" / "findings.csv").read_text(encoding="utf-8").splitlines()
    assert [("message-1 read back" in each) for each in findings if "rules it out" in each] == [True]


@pytest.mark.skipif("damaged files" not in DRAWN, reason="the other trail is drawn")
def test_of_a_trail_with_damaged_files(engines: Mapping[str, TableEngine], tmp_path: Path) -> None:
    """A cell without its file, a line and a head that cannot be read, columns of other types, a beginning removed."""
    trail = tmp_path / "trail"
    forge(trail, messages=400, seed=6, rows_per_file=100)
    (trail / "cells" / "spool-0.json").unlink()
    (trail / "cells" / "daemon-0.json").write_text('{"version": 1, "cell": "daemon-1"}', encoding="utf-8")
    for pattern in ("manifest/cell=daemon-0/*.jsonl", "snapshots/cell=spool-0/*/manifest.json"):
        path = next(trail.glob(pattern))
        path.write_text(path.read_text(encoding="utf-8").replace('"', "", 1), encoding="utf-8")
    files_of(trail, "daemon-0")[0].unlink()
    kinds: tuple[tuple[str, pa.DataType | None], ...] = (
        ("sequence", pa.string()),
        ("entry", None),
        ("boot", pa.int64()),
    )
    paths = files_of(trail, "daemon-1")[2::2]
    for path, (column, kind) in zip(paths, kinds, strict=False):
        change_column(path, column, kind)
    vouch_for(trail, "daemon-1", set(paths))
    files_of(trail, "daemon-1")[1].write_bytes(b"")
    unreachable = files_of(trail, "daemon-1")[3]
    unreachable.unlink()
    unreachable.symlink_to("/proc/self/mem")
    assert audited(engines, trail, tmp_path / "out") == 40
    listed = (tmp_path / "out" / "duckdb" / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    findings = [json.loads(line) for line in listed]
    assert {each["kind"] for each in findings if each["severity"] == "inconsistent"} == {"FILE_ALTERED"}
    altered = sorted(each["rule"] for each in findings if each["kind"] == "FILE_ALTERED")
    assert altered == [
        "column boot is int64, not int32",
        "column entry is missing",
        "column sequence is binary (STRING), not int64",
        *["not as long as written, and cannot be read"] * 2,
    ]
    assert not [each for each in findings if each["severity"] == "lost"]
