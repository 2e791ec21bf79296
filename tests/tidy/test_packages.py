"""Packages have an interface: other packages import from the package, never from a module inside it."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from tidy.rules import PACKAGES

pytestmark = pytest.mark.tidy

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
INITS = [path for top in PACKAGES for path in sorted((ROOT / top).rglob("__init__.py"))]
LAZY = [path.parent for path in INITS if "lazy_exports(" in path.read_text(encoding="utf-8")]
# Packages whose modules other packages still import. The list only becomes shorter.
OPEN = frozenset(
    [
        "broker_adapter.contracts",
        "broker_adapter.runtime",
        "broker_adapter.wire",
        "dmq.acl",
        "dmq.cli.bulk",
        "dmq.cli.output",
        "dmq.cli.session",
        "dmq.config",
        "dmq.metrics",
        "dmq.processes",
        "dmq.producer_store.entries",
        "dmq.recovery.check",
        "dmq.recovery.reading",
        "dmq.rocketmq_server.calls",
        "dmq.rocketmq_server.codec",
        "dmq.rocketmq_server.rpc",
        "dmq.rocketmq_server.sessions",
        "dmq.rocketmq_server.transport",
        "dmq.replication",
        "dmq.runtime",
        "dmq.store.engines",
        "dmq.store.files",
        "dmq.store.writer",
        "dmq.trail",
        "retry",
        "spark_audit.rules",
    ]
)


def _interface(path: Path) -> set[str]:
    """Return the names in ``__all__`` of a package; they include modules that are namespaces."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {f"{_name(path.parent)}.{each}" for each in ast.literal_eval(node.value)}
    return set()


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _imported(path: Path) -> set[str]:
    """Return the modules that a file imports, or from which it imports names."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def test_other_packages_import_from_the_package() -> None:
    """A package that is closed stays closed, and one that became closed is off the list.

    A subpackage is internal to its package, which may import any module of it.
    """
    paths = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    modules = {_name(path): _name(path.parent) for path in paths}
    interfaces = set[str]().union(*map(_interface, INITS))
    reached: dict[str, list[str]] = {}
    for path in paths:
        own = _name(path.parent)
        for module in _imported(path) - interfaces:
            home = modules.get(module)
            if home is not None and not f"{own}.".startswith(f"{home}.") and not home.startswith(f"{own}."):
                reached.setdefault(home, []).append(str(path))
    assert not {home: found for home, found in reached.items() if home not in OPEN}
    assert OPEN & set(modules.values()) <= reached.keys()


def test_packages_of_support_import_the_packages_they_name() -> None:
    """Each module is in a package, whose docstring lists its imports; these form no cycle."""
    assert {path.name for path in SUPPORT.glob("*/*.py")} == {"__init__.py"}
    named, found = dict[str, set[str]](), dict[str, set[str]]()
    for init in SUPPORT.glob("*/*/__init__.py"):
        package = ".".join(init.parent.relative_to(SUPPORT).parts)
        named[package] = set(re.findall(r"``(\w+\.\w+)``", init.read_text(encoding="utf-8")))
        modules = set[str]().union(*map(_imported, init.parent.glob("*.py")))
        found[package] = {".".join(each.split(".")[1:3]) for each in modules if each.startswith("support.")} - {package}
    found = {package: names & found.keys() for package, names in found.items()}
    assert named == found
    TopologicalSorter(found).prepare()


@pytest.mark.parametrize(
    "package", [path.parent for path in INITS if "lazy_exports(" in path.read_text(encoding="utf-8")], ids=str
)
def test_exports_that_are_imported_at_their_first_use_exist(package: Path) -> None:
    """Each name in ``__all__`` is there, and no other."""
    module = import_module(".".join(package.relative_to(ROOT).parts))
    assert all(hasattr(module, name) for name in module.__all__)
    assert not hasattr(module, "Anything")
