"""The documents speak of what is there: every path, test, key, metric and exit code they name."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
from enum import IntEnum
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import Gauge
from typer.main import get_command

from dmq.cli.app import app
from dmq.cli.output.errors import ExitCode
from dmq.cli.trail.spark import MEANINGS
from dmq.config.settings import DaemonConfig
from dmq.metrics.registry import Metrics
from dmq.states import MessageState
from dmq.store import schema
from dmq.trail.events import EventKind

pytestmark = pytest.mark.tidy

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FOLDERS = ("dmq", "retry", "broker_adapter", "spark_audit", "tests", "docs", "locks", "tools", "bench")
SUITE = re.compile(r"^from support\.clients\.official\.(\w+) import \*", re.MULTILINE)
# `dmq/store/writer/marks.py`, `tests/dmq/store`, `tests/dmq/store::test_name` (a test may move within its package)
CITED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(\w+))?`")
# in CONTRIBUTING, whose answers are names: `Leases.expire` in `dmq/broker/deliveries/lease_expiry.py`
NAMED = re.compile(r"`(?:\w+\.)*(\w+)`[^`|]{0,4}(?:in |of |\()+`([\w/]+\.py)`")
PAGE = re.compile(r"\bdocs/(?!x\.md)[\w/-]+\.md\b")
LINKED = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
ANCHORED = re.compile(r"(?:\]\(|runbook: )((?!https?:)[^)#\s]*)#([^)\s]+)")
NAMES = re.compile(r"`([^`]+)`")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows(path: Path, heading: str) -> list[list[str]]:
    """The cells of the table that follows the header row ``heading``, all but that row and the line below it."""
    lines = read(path).splitlines()
    start = lines.index(heading) + 2
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return table


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of functions, classes and module-level values of a module, or of all modules below a folder.

    Those of a suite of tests that it takes as a whole are its own.
    """
    names: set[str] = set()
    for module in path.rglob("*.py") if path.is_dir() else [path]:
        tree = ast.parse(read(module))
        names |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in _names(node)}
        names |= {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        for suite in SUITE.findall(read(module)):
            names |= names_in(ROOT / "tests" / "support" / "clients" / "official" / f"{suite}.py")
    return frozenset(names)


def _names(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]


def broken_citations(text: str) -> list[str]:
    """What ``text`` cites and the repository does not have."""
    broken = []
    for path, name in CITED.findall(text):
        found = ROOT / path
        if not found.exists() or (name and name not in names_in(found)):
            broken.append(f"{path}::{name}" if name else path)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_citations_exist(document: Path) -> None:
    text = read(document)
    assert broken_citations(text) == []
    assert [link for link in LINKED.findall(text) if not (document.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_of_links_exist() -> None:
    """Links between pages, and the runbooks that the alert rules name."""
    rules = ROOT / "deploy" / "prometheus" / "rules.yaml"
    links = [(page, *link) for page in [*DOCUMENTS, rules] for link in ANCHORED.findall(read(page))]
    assert len(links) > 100
    targets = [((ROOT if page == rules else page.parent) / path if path else page, name) for page, path, name in links]
    assert [(target, name) for target, name in targets if name not in anchors(target)] == []


def test_names_that_contributors_are_sent_to_exist() -> None:
    """``Leases.expire`` in ``dmq/broker/deliveries/lease_expiry.py``: the module defines it, or one of its classes
    does.
    """
    named = NAMED.findall(read(ROOT / "CONTRIBUTING.md"))
    assert len(named) >= 6
    assert [(name, path) for name, path in named if name not in names_in(ROOT / path)] == []


def test_pages_that_code_cites_exist() -> None:
    """Docstrings, comments and texts of the code name pages by their path from the root."""
    cited = {page for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") for page in PAGE.findall(read(path))}
    assert len(cited) > 5
    assert [page for page in sorted(cited) if not (ROOT / page).exists()] == []


def test_a_broken_citation_is_found() -> None:
    here = "tests/tidy/test_docs.py"
    assert broken_citations(f"`{here}`, `{here}::rows`, `tests/tidy::rows`, `dmq/store/`") == []
    broken = [f"{here}::gone", "tests/tidy::gone", "dmq/gone.py"]
    assert broken_citations(" ".join(f"`{each}`" for each in broken)) == broken


def sections(page: str) -> dict[str, str]:
    """Return the numbered sections of a page: title to text."""
    parts = re.split(r"^## ", read(REFERENCE / page), flags=re.MULTILINE)[1:]
    return {title: text for title, _, text in (part.partition("\n") for part in parts) if title[0].isdigit()}


def test_every_promise_cites_a_test() -> None:
    """``guarantees.toml`` has each section of the guarantees, with tests that exist, each of them once."""
    promises = sections("guarantees.md")
    tests = tomllib.loads(read(Path(__file__).with_name("guarantees.toml")))
    assert len(promises) > 30
    assert list(tests) == list(promises)
    assert [title for title, names in tests.items() if not names or len(set(names)) < len(names)] == []
    cited = [name for names in tests.values() for name in names]
    assert all(name.startswith("tests/") and "::" in name for name in cited)
    assert broken_citations(" ".join(f"`{name}`" for name in cited)) == []


def test_every_limit_belongs_to_a_promise() -> None:
    """The page of limits has sections of the guarantees only, under their titles, and each of them links to it."""
    promises, limits = sections("guarantees.md"), sections("guarantees-limits.md")
    assert limits
    assert [title for title in promises if title in limits] == list(limits)
    linking = [title for title, text in promises.items() if "(guarantees-limits.md#" in text]
    assert linking == list(limits)


def test_the_terms_of_the_glossary_are_in_the_code() -> None:
    """Each term is there once, and names one thing of the code: a module or package by its path, or a name."""
    lines = read(REFERENCE / "glossary.md").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    terms = [row for row in table if row[0] != "term"]
    assert 60 <= len(terms) <= 80
    assert len({term for term, _, _ in terms}) == len({named for _, _, named in terms}) == len(terms)
    code = " ".join(read(path) for folder in FOLDERS[:4] for path in sorted((ROOT / folder).rglob("*.py")))
    words = set(re.findall(r"\w+", code))
    named = [NAMES.fullmatch(cell) for _, _, cell in terms]
    assert [row for row, found in zip(terms, named, strict=True) if not found] == []
    assert [found[1] for found in named if found and not _is_in_code(found[1], words)] == []


def _is_in_code(name: str, words: set[str]) -> bool:
    if "." not in name:
        return name in words
    module = ROOT.joinpath(*name.split("."))
    return module.with_suffix(".py").exists() or (module / "__init__.py").exists()


def test_the_configuration_table_is_the_configuration() -> None:
    table = rows(REFERENCE / "configuration.md", "| key | default | what it does |")
    written = {key.strip("`"): default.strip("`") for key, default, _ in table}
    assert written == {key: str(value) for key, value in DaemonConfig().shown().items()}


def test_the_tables_of_exit_codes_are_complete() -> None:
    page = REFERENCE / "commands.md"
    assert [int(code) for code, _ in rows(page, "| exit code | meaning |")] == sorted(ExitCode)
    verdicts = rows(page, "| exit code of `dmq audit run` | meaning |")
    assert {int(code): meaning for code, meaning in verdicts} == MEANINGS


def test_the_table_of_states_is_complete() -> None:
    table = rows(REFERENCE / "commands.md", "| state | of | meaning |")
    assert sorted(state.strip("`") for state, _, _ in table) == sorted(each.word for each in MessageState)


def test_the_page_of_commands_has_each_of_them_once() -> None:
    """``dmq topic ls|show``: the commands that the help shows, and no others."""
    written = re.findall(
        r"^    dmq ([a-z-]+)(?: ([a-z|-]+))?(?: [A-Z]+)*  ", read(REFERENCE / "commands.md"), re.MULTILINE
    )
    there: list[tuple[str, str]] = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]  # the root is a group
        verbs = getattr(command, "commands", None)
        there += [(name, verb) for verb, each in verbs.items() if not each.hidden] if verbs else [(name, "")]
    assert sorted((name, verb) for name, verbs in written for verb in verbs.split("|")) == sorted(there)


def test_the_table_of_metrics_is_complete() -> None:
    table = rows(REFERENCE / "metrics.md", "| metric | meaning |")
    written = [name for cell, _ in table for name in NAMES.findall(cell)]
    metrics = Metrics(process=False)
    there = {
        family.name + ("_total" if family.type == "counter" else "_info" if family.type == "info" else "")
        for family in metrics.registry.collect()
    }
    assert isinstance(metrics.pending, Gauge)
    assert sorted(written) == sorted(there)


def test_the_page_of_the_trail_has_each_kind_of_event() -> None:
    """The tables of kinds name each ``EventKind``, and no other."""
    events = read(REFERENCE / "trail.md").partition("## Events")[2].partition("## Manifest")[0]
    cells = [line.split("|")[1] for line in events.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in NAMES.findall(cell) if name.isupper()} == set(EventKind.__members__)


def test_the_page_of_the_store_is_the_code() -> None:
    """Each family, kind, letter and version of ``dmq.store.schema`` is drawn under its number, and no other is."""
    there = set()
    for found in pkgutil.walk_packages(schema.__path__, f"{schema.__name__}."):
        module = importlib.import_module(found.name)
        own = found.name.rpartition(".")[2]
        for name, value in vars(module).items():
            if name.endswith("VERSION") and name[0] != "_":
                there.add(f"`{own}.{name}` = {value}")
            elif name.startswith(("META_", "SPOOL_")) and isinstance(value, bytes):
                there.add(f"`{name}` = `{value.decode()}`")
            elif isinstance(value, type) and issubclass(value, IntEnum) and value.__module__ == found.name:
                there |= {f"`{name}.{kind.name}` = {kind}" for kind in value}
    drawn = re.findall(r"`\w+\.[A-Z_]+` = \d+|`(?:META|SPOOL)_\w+` = `\w`", read(REFERENCE / "store.md"))
    assert len(there) > 50
    assert set(drawn) == there
