"""Rules of the house that no linter has, as pure functions from a file to what is wrong with it.

A rule that only reviews enforce is forgotten; these run in ``make lint``. Rules for Python read the syntax tree, so
that a docstring may name what code must not call; rules for text read every tracked file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

# Budgets of a module: it is one idea, however many lines that takes.
IMPORTED_MODULES_MAX = 32  # of ours
PUBLIC_NAMES_MAX = 40
FUNCTION_LINES_MAX = 70

PACKAGES = ("dmq", "retry", "broker_adapter", "spark_audit")
CLOCK_MODULE = "broker_adapter/runtime/clock.py"
# It sleeps by the name that tests of applications replace (`retry.api.time.sleep`).
SLEEPING_MODULE = "retry/api.py"
ENGINE_MODULE = "dmq/store/engines/rocks.py"
# where output for people is the purpose
PRINTING_MODULES = ("dmq/cli", "dmq/cli.py", "dmq/demo", "dmq/demo.py", "spark_audit/cli.py")

# They end silently at a corrupt block: a short result that looks whole. `iter()` with a look at `status()` does not.
UNCHECKED_SCANS = frozenset({"items", "keys", "values"})
# Sets the *upper* bound.
WRONG_BOUND = "set_iterate_lower_bound"
# A test that shows a trap of RocksDB has to step into it; such a file says so in its name.
TRAP_TEST = re.compile(r"tests/.*trap[^/]*\.py")

CLOCK_READS = frozenset({"now", "utcnow", "today", "GetCurrentTime", "uuid1"})

# Written in pieces, so that this file does not report itself.
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
# Where package managers download from. A lock that names one ties the project to one machine's set-up.
REGISTRY_HOST = re.compile(
    r"\b(?:(?:test\.)?pypi\.(?:org|python)|files\.pythonhosted|registry\.(?:npmjs|yarnpkg|npmmirror)|"
    r"(?:static\.|index\.)?crates\.io|proxy\.golang|repo1?\.maven|repo\.maven\.apache|deb\.debian)\b"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.~/*-])(?:/(?:hom[e]|User[s])/[\w.-]+/|/roo[t]/|/wor[k]/[\w.-]+|/op[t]/(?:wheels|hostedtoolcache)|[A-Z]:\\User[s]\\)"
)
# Hashes, where any letters may come together.
HASH_FILES = re.compile(r"(?:locks/.*\.txt|(?:.*/)?package-lock\.json)")


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Finding:
    """One breach of a rule: ``path:line: what``."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def check_text(path: str, text: str) -> list[Finding]:
    """Check a tracked file of any kind; ``path`` is relative to the root, with slashes."""
    found: list[Finding] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if (match := UNFINISHED.search(line)) and not HASH_FILES.fullmatch(path):
            found.append(Finding(path=path, line=number, what=f"unfinished work: {match[0]}; open an issue instead"))
        if match := REGISTRY_HOST.search(line):
            found.append(Finding(path=path, line=number, what=f"names a registry host: {match[0]}"))
        if match := MACHINE_PATH.search(line):
            found.append(Finding(path=path, line=number, what=f"names a path of one machine: {match[0]}"))
    return found


def check_python(path: str, text: str) -> list[Finding]:
    """Check a Python module; an empty one is always right."""
    if not text.strip():
        return []
    tree = ast.parse(text, path)
    found = [*_budgets(path, tree), *_head(path, tree), *_banned_names(path, tree)]
    if PurePosixPath(path).parts[0] in PACKAGES:
        found += _clock(path, tree)
        found += _prints(path, tree)
    if path == ENGINE_MODULE or _imports(tree, "rocksdict"):
        found += _unchecked_scans(path, tree)
    return sorted(found)


def _budgets(path: str, tree: ast.Module) -> Iterator[Finding]:
    imported = len({module for module in _imported_modules(tree) if module.partition(".")[0] in PACKAGES})
    if imported > IMPORTED_MODULES_MAX:
        what = f"imports {imported} of our modules, more than {IMPORTED_MODULES_MAX}"
        yield Finding(path=path, line=1, what=what)
    definitions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    public = sum(not node.name.startswith(("_", "test_")) for node in definitions)
    if public > PUBLIC_NAMES_MAX:
        yield Finding(path=path, line=1, what=f"defines {public} public names, more than {PUBLIC_NAMES_MAX}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                what = f"{node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"
                yield Finding(path=path, line=node.lineno, what=what)


def _head(path: str, tree: ast.Module) -> Iterator[Finding]:
    if ast.get_docstring(tree) is None:
        yield Finding(path=path, line=1, what="a module without a docstring")
    if len(tree.body) > 1 and not any(  # a docstring alone has nothing to annotate
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    ):
        yield Finding(path=path, line=1, what="a module without `from __future__ import annotations`")


def _banned_names(path: str, tree: ast.Module) -> Iterator[Finding]:
    if TRAP_TEST.fullmatch(path):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == WRONG_BOUND:
            yield Finding(path=path, line=node.lineno, what=f"{WRONG_BOUND} sets the upper bound; seek and compare")


def _clock(path: str, tree: ast.Module) -> Iterator[Finding]:
    if path == CLOCK_MODULE:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name == "time" and path != SLEEPING_MODULE]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            names = [] if path == SLEEPING_MODULE and node.attr == "sleep" else [f"time.{node.attr}"]
        elif isinstance(node, ast.ImportFrom):
            names = ["time"] if node.module == "time" else []
        elif isinstance(node, ast.Attribute) and node.attr in CLOCK_READS:
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "time":
            names = ["time()"]  # of an event loop, or of a module imported under another name
        else:
            continue
        for name in names:
            yield Finding(path=path, line=node.lineno, what=f"`{name}` reads a clock; only {CLOCK_MODULE} may")


def _prints(path: str, tree: ast.Module) -> Iterator[Finding]:
    if any(path == place or path.startswith(f"{place}/") for place in PRINTING_MODULES):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield Finding(path=path, line=node.lineno, what="print; log it, or return it to the command line")


def _unchecked_scans(path: str, tree: ast.Module) -> Iterator[Finding]:
    if TRAP_TEST.fullmatch(path):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in UNCHECKED_SCANS:
            what = f"`.{node.attr}` ends silently at a corrupt block; use iter() and check status()"
            yield Finding(path=path, line=node.lineno, what=what)


def _imports(tree: ast.Module, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in _imported_modules(tree))


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
