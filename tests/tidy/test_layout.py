"""The tests of a module are at its path below ``tests``, and name their kind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.tidy

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Tests of whole daemons, of pages and of the distribution; tests of the source.
WITHOUT_MODULE = {"system", "tidy"}


def modules_in(folder: Path) -> set[str]:
    """Return the names of the modules and packages of a folder."""
    return {each.stem for each in folder.glob("*.py")} | {each.parent.name for each in folder.glob("*/__init__.py")}


def is_of(test: str, module: str) -> bool:
    """Return True if a test file is of a module: it has its name, or its name and an aspect."""
    return test == f"test_{module}" or test.startswith(f"test_{module}_")


def test_each_test_file_is_at_the_path_of_its_module() -> None:
    """``tests/dmq/store/test_store_bounds.py`` is of ``dmq/store/store.py`` or of a package ``dmq/store/store``."""
    misplaced = []
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS)
        if ".cache" in folder.parts:  # installed clients
            continue
        is_free = folder.parts[0] in WITHOUT_MODULE
        if not is_free and not any(is_of(path.stem, module) for module in modules_in(ROOT / folder)):
            misplaced.append(str(path.relative_to(ROOT)))
    assert misplaced == []


def test_tests_of_a_cluster_are_known_by_their_names() -> None:
    """``support.parallel`` hands them out by the names of their files: it sees no markers."""
    named = {path for path in TESTS.rglob("test_*.py") if "_on_rocketmq" in path.stem}
    marked = {
        path
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and "pytest.mark.cluster" in ast.unparse(node)
    }
    assert marked == named
