"""List the tests that reach a module: they import it, or import a module of tests/support that does.

python tools/where.py dmq/broker/groups/lease_timers.py
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def imported(path: Path, words: set[str]) -> set[str]:
    """Return the full names that a file with one of the words imports: modules, and names of modules."""
    names: set[str] = set()
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if any(word in text for word in words) else ():
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{each.name}" for each in node.names)
    return names


def tests_of(module: str) -> tuple[list[Path], list[Path]]:
    """Return the tests that import a module themselves, and those that reach it through support code."""
    word, tests = module.rpartition(".")[2], ROOT / "tests"
    support = {
        ".".join(each.relative_to(tests).with_suffix("").parts): imported(each, {word})
        for each in (tests / "support").rglob("*.py")
    }
    reaching = {name for name, names in support.items() if module in names}
    words = {word, *(name.rpartition(".")[2] for name in reaching)}
    direct: list[Path] = []
    through: list[Path] = []
    for test in sorted(tests.rglob("test_*.py")):
        names = imported(test, words)
        if module in names:
            direct.append(test)
        elif names & reaching:
            through.append(test)
    return direct, through


def main(arguments: list[str]) -> int:
    """Print both lists; return 2 if the argument is not a module of the repository."""
    path = Path(arguments[0] if arguments else "")
    if path.suffix != ".py" or not (ROOT / path).is_file():
        print("usage: make where MODULE=dmq/broker/groups/lease_timers.py", file=sys.stderr)
        return 2
    direct, through = tests_of(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    for title, tests in (("imported by", direct), ("reached through tests/support by", through)):
        print(f"{title} {len(tests)} test modules")
        for test in tests:
            print(f"  {test.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
