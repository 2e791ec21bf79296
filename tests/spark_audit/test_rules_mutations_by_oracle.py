"""Spark and a plain replay of the same files come to the same verdicts, on random small trails with random faults."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.effort import EFFORT, SEED
from support.forges.cells.forge import forge, same_ledger
from support.forges.trail.damage import DAMAGERS, Damage
from support.forges.trail.mutations import MUTATORS
from support.models.trail.judge import audit_with
from support.models.trail.oracle import ask, rows_of

from spark_audit.engines.table import TableEngine

pytestmark = pytest.mark.spark
LEDGERS = (
    ("scheduled", ("window_start_ms", "topic")),
    ("fired", ("topic", "group")),
    ("spooled", ("cell", "type")),
)
_OF_MESSAGES = {
    *("LOST", "OVERDUE", "INCONCLUSIVE", "LATE", "EARLY", "ORPHAN", "ILLEGAL"),
    *("DUPLICATE_ACCEPT", "DUPLICATE_DELIVERY", "DUPLICATE_EXIT"),
}
Found = set[tuple[str, str | None, str | None, str]]


def draw(path: Path, random: Random) -> None:
    """Forge a small trail of a random shape."""
    forge(
        path,
        messages=random.choice([10, 100, 400, 1_200]),
        seed=random.randrange(1 << 30),
        cells=random.randint(1, 3),
        spools=random.randint(0, 2),
        topics=random.randint(1, 3),
        queues=random.randint(1, 3),
        span_ms=random.choice([600_000, 3_600_000, 10_000_000]),
        kills=random.randint(0, 3),
        stops=random.randint(0, 2),
        snapshots=random.randint(1, 3),
        rows_per_file=random.choice([50, 400, 5_000]),
        failing=random.choice([0.0, 0.2, 0.6]),
        filtered=random.choice([0.0, 0.5]),
        is_closed=random.random() < 0.2,
        with_late_group=random.random() < 0.5,
        with_stalled_group=random.random() < 0.5,
    )


def lie(path: Path, random: Random) -> None:
    """Tell lies of up to three kinds, as far as there are messages for it."""
    told: set[str] = set()
    for name in random.sample(sorted(MUTATORS), random.randint(0, 3)):
        try:
            told |= MUTATORS[name](path, "daemon-0", random.choice([1, 3]), random.randrange(1 << 30), told).message_ids
        except AssertionError:  # too few messages of that kind
            continue


def damage(path: Path, random: Random) -> Damage | None:
    """Do some damage, in a third of all trails."""
    if random.random() > 0.35:
        return None
    name = random.choice(["cut_records", "repeat_records", "cut_tail"])
    try:
        return DAMAGERS[name](path, "daemon-0", random.choice([1, 5]), random.randrange(1 << 30))
    except (AssertionError, ValueError):  # too few records
        return None


@pytest.mark.parametrize("number", range(1 if EFFORT == 1 else 5 * EFFORT))
def test_second_opinion(engine: TableEngine, tmp_path: Path, number: int) -> None:
    """Findings are the same, and the ledgers to the last message."""
    print(f"DMQ_TEST_SEED={SEED}")
    random = Random(f"{SEED}/{number}")
    trail = tmp_path / "trail"
    draw(trail, random)
    lie(trail, random)
    done = damage(trail, random)
    outcome, said = audit_with(engine, trail, tmp_path / "out"), ask(trail)
    assert outcome.report["range"]["watermark_ms"] == said.watermark_ms
    found: Found = {
        (row["kind"], row["topic"], row["group"] or None, row["message_id"])
        for row in outcome.findings
        if row["kind"] in _OF_MESSAGES
    }
    expected: Found = {(each.kind, each.topic, each.group, each.message_id) for each in said.findings}
    # of what has its beginning in a gap the audit says so, the replay nothing
    extra = {
        each for each in found - expected if done is None or each[0] != "INCONCLUSIVE" or each[3] not in done.touched
    }
    assert (expected - found, extra) == (set(), set())
    if done is None:
        for name, keys in LEDGERS:
            mine = rows_of(getattr(said, name), keys)
            theirs = [{key: row[key] for key in row if key != "duplicated"} for row in outcome.report[name]]
            assert same_ledger(mine, theirs, keys) == [], name
