"""Language rules of the project: words that hide the noun of a sentence, counted per package.

The limits stand in ``language.toml`` next to this module. A count may only fall: a change that lowers one lowers its
limit too. ``python tests/tidy/language.py`` writes ``language.toml``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PRODUCT: Final = ("dmq", "retry", "broker_adapter", "spark_audit")

# Words that usually stand for a noun the sentence should name ("what waits" for "pending messages").
# Words with a second, plain meaning ("let", "take", "say" of a person) are left to review.
EXPRESSIONS: Final = {
    "what": re.compile(r"\bwhat(?:ever)?\b", re.IGNORECASE),
    "who": re.compile(r"\b(?:who|whom|whose|whoever|nobody|somebody|anybody)\b", re.IGNORECASE),
    "say": re.compile(r"\b(?:says?|said|tells?|told)\b", re.IGNORECASE),
    "dialect": re.compile(
        r"\banew\b|\bl(?:ie|ies|ay)\b|\bbut for\b|\bof which\b|\bwhat is there\b|\ba moment ago\b|\bgo(?:es)? on\b"
        r"|\bgives? back\b|\bbeside\b|\bbehind it\b|\bmends?\b|\bthat which\b",
        re.IGNORECASE,
    ),
    "opening": re.compile(r"\A(?:Return what|Say|Tell|Let)\b"),
}


def documents() -> list[Path]:
    """Return the pages that people read, without the change log."""
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, of its classes and of its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def package_of(path: Path) -> str:
    """Return the package whose limits a module counts against: ``dmq.broker``, ``retry``."""
    parts = path.relative_to(ROOT).parts
    return ".".join(parts[:2]) if parts[0] == "dmq" and len(parts) > 2 else parts[0]


def counts() -> dict[str, Counter[str]]:
    """Count each kind of expression per package, and in all documents together under ``docs``."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                for text in docstrings(path):
                    found[package_of(path)] += _count(text)
    for page in documents():
        found["docs"] += _count(page.read_text(encoding="utf-8"))
    return found


def _count(text: str) -> Counter[str]:
    return Counter({name: len(pattern.findall(text)) for name, pattern in EXPRESSIONS.items()})


def table() -> str:
    """Return the counts as the text of ``language.toml``."""
    head = "# Limits of tests/tidy/language.py: they only go down. Made by `python tests/tidy/language.py`.\n"
    lines = [
        f'"{package}" = {{ {", ".join(f"{name} = {counted[name]}" for name in EXPRESSIONS)} }}'
        for package, counted in sorted(counts().items())
    ]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "tests" / "tidy" / "language.toml").write_text(table(), encoding="utf-8")
