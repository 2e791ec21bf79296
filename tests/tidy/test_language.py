"""Docstrings and documents use the nouns of the field: counts of vague words only go down, names mean one thing."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict

import pytest
from tidy.language import EXPRESSIONS, PRODUCT, ROOT, counts

pytestmark = pytest.mark.tidy

LIMITS = tomllib.loads((ROOT / "tests" / "tidy" / "language.toml").read_text(encoding="utf-8"))


def test_vague_words_only_become_fewer() -> None:
    """Each count equals its limit: more is a regression, fewer lowers the limit (python tests/tidy/language.py)."""
    found = {package: {name: counted[name] for name in EXPRESSIONS} for package, counted in counts().items()}
    assert found == LIMITS


def test_no_classes_share_a_name() -> None:
    """A public class name of the product stands for one thing."""
    homes = defaultdict(set)
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].add(path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
