"""The audit finds every lie that is told about a trail and all damage done to it, by name, and nothing besides."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.effort import EFFORT, at_length
from support.forges.cells.forge import Truth, forge
from support.forges.trail.damage import DAMAGERS, Damage
from support.forges.trail.mutations import MUTATORS, SPOOL_MUTATORS, Lie
from support.models.trail.judge import Outcome, audit_with, check_clean, check_damage, check_lies

from spark_audit.engines.table import TableEngine

pytestmark = pytest.mark.spark

# Kinds of lies by the exit code of a trail in which nothing else is wrong.
LOSSES = ("lose_hand_over", "lose_exit")
DELAYS = ("double_delivery", "double_accept", "double_exit", "delay", "hasten")
LIES = ("reorder", "misdate")
# A thousand of each must find room: two kinds to a cell.
HALVES = (
    (("lose_hand_over", "double_delivery"), ("lose_exit", "double_accept")),
    (("delay", "double_exit"), ("hasten", "reorder")),
)
Audit = Callable[[Path], Outcome]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A trail with a bit of everything."""
    messages = 20_000 if EFFORT > 1 else 5_000
    path = tmp_path_factory.mktemp("forged") / "trail"
    return forge(path, messages=messages, seed=11, snapshots=2, rows_per_file=messages // 5)


@pytest.fixture
def trail(truth: Truth, tmp_path: Path) -> Path:
    """A copy to bend."""
    return shutil.copytree(truth.path, tmp_path / "trail")


@pytest.fixture
def audit(engine: TableEngine, tmp_path: Path) -> Audit:
    """Audits a trail in this process, and reads what was left."""
    return lambda trail: audit_with(engine, trail, tmp_path / "out")


def tell(trail: Path, count: int, names: Sequence[str], cell: str, told: set[str]) -> list[Lie]:
    """Tell lies about ``count`` messages of each kind, each about messages of its own."""
    lies = []
    for name in names:
        lie = MUTATORS[name](trail, cell, count, count, told)
        told |= lie.message_ids
        lies.append(lie)
    return lies


@at_length
def test_clean(audit: Audit, truth: Truth) -> None:
    """Nothing is found in a sound trail, and every ledger is the truth to the last message."""
    check_clean(audit(truth.path), truth)


@at_length
@pytest.mark.parametrize(("names", "exit_code"), [(LOSSES, 20), (DELAYS, 10), (LIES, 40)])
def test_one_of_a_kind(audit: Audit, trail: Path, names: Sequence[str], exit_code: int) -> None:
    """One message in 20 000 is enough, and the exit code is that of what is wrong with it."""
    assert sorted((*LOSSES, *DELAYS, *LIES)) == sorted(MUTATORS)
    told: set[str] = set()
    lies = [lie for number, name in enumerate(names) for lie in tell(trail, 1, [name], f"daemon-{number % 2}", told)]
    outcome = audit(trail)
    check_lies(outcome, lies)
    assert outcome.exit_code == exit_code


def test_all_kinds_together(audit: Audit, trail: Path) -> None:
    """Lies of every kind, in three cells, are told apart."""
    lies = tell(trail, 2, list(MUTATORS), "daemon-0", set()) + tell(trail, 10, list(MUTATORS), "daemon-1", set())
    lies.append(SPOOL_MUTATORS["lose_sent"](trail, "spool-0", 10, 1, ()))
    outcome = audit(trail)
    check_lies(outcome, lies)
    assert outcome.exit_code == 40


@at_length
@pytest.mark.parametrize("half", [0, 1])
def test_a_thousand(audit: Audit, trail: Path, half: int) -> None:
    """A thousand of a kind are a thousand findings."""
    told: set[str] = set()
    lies = [
        lie for number, names in enumerate(HALVES[half]) for lie in tell(trail, 1_000, names, f"daemon-{number}", told)
    ]
    outcome = audit(trail)
    check_lies(outcome, lies)
    assert sum(outcome.report["findings"]["by_kind"].values()) == 4_000


@at_length
@pytest.mark.parametrize(("cut", "repeated", "of_spool"), [(1, 2, 10), (2, 10, 1), (10, 1, 2), (1_000, 1_000, 1_000)])
def test_missing_and_repeated_records(audit: Audit, trail: Path, cut: int, repeated: int, of_spool: int) -> None:
    """Each missing number is named, each number that is there twice too; nothing is lost because of it."""
    damages = [
        DAMAGERS["cut_records"](trail, "daemon-0", cut, 1),
        DAMAGERS["repeat_records"](trail, "daemon-1", repeated, 2),
        DAMAGERS["cut_records"](trail, "spool-0", of_spool, 3),
    ]
    outcome = audit(trail)
    check_lies(outcome, [], damages)
    assert outcome.exit_code == 30


@at_length
def test_behind_the_back_of_the_manifest(audit: Audit, trail: Path) -> None:
    """Altered files are named, beside what is missing in them; so are repeated records that differ."""
    damages = [
        DAMAGERS["cut_records_unmended"](trail, "daemon-0", 10, 1),
        DAMAGERS["repeat_records_changed"](trail, "daemon-1", 10, 2),
        DAMAGERS["cut_records_unmended"](trail, "spool-0", 1, 3),
    ]
    outcome = audit(trail)
    check_lies(outcome, [], damages)
    assert outcome.exit_code == 40


@at_length
def test_missing_files(audit: Audit, trail: Path) -> None:
    """Missing files are named if the manifest knows them, and are gaps either way; a cut end shows by the snapshot."""
    damages = [
        DAMAGERS["remove_files"](trail, "daemon-0", 2, 1),
        DAMAGERS["remove_files_and_lines"](trail, "daemon-1", 2, 2),
        DAMAGERS["cut_tail"](trail, "spool-0", 100, 3),
    ]
    outcome = audit(trail)
    check_lies(outcome, [], damages)
    assert outcome.exit_code == 30


@at_length
def test_altered_files(audit: Audit, trail: Path) -> None:
    """A file with another byte in it is named, whether it can be read or not, and nothing in it is taken for proof."""
    damage = DAMAGERS["alter_files"](trail, "daemon-0", 2, 1)
    outcome = audit(trail)
    assert {(row["cell"], row["detail"]) for row in outcome.findings if row["kind"] == "FILE_ALTERED"} == {
        ("daemon-0", path) for path in damage.altered
    }
    assert {row["kind"] for row in outcome.findings if row["severity"] == "lost"} == set()
    assert outcome.exit_code == 40


@at_length
def test_mutations_with_damage(audit: Audit, trail: Path) -> None:
    """A gap in one cell hides no loss in another one."""
    lies = tell(trail, 10, ("lose_hand_over", "lose_exit"), "daemon-1", set())
    damage: Damage = DAMAGERS["cut_records"](trail, "daemon-0", 10, 3)
    outcome = audit(trail)
    check_lies(outcome, lies, [damage])
    check_damage(outcome, [damage])
    assert outcome.exit_code == 20
