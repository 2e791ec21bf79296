"""Change modules that decide in one place at a time, and see whether their tests notice.

    python tools/mutants.py [--per-module N] [--seed N] [--jobs N] [MODULE ...]

A *mutant* is a module with one change: a comparison turned, a number that is one more, an argument that is missing. The
changes are those of mutmut; which of them are made is drawn by the seed, place by place. The tests that hold the module
run against each mutant until one of them fails: then it is *killed*. One that *survives* is a line that could be wrong
without anybody noticing, or one that could be written otherwise. Everything happens in copies below build/mutants.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice, repeat
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue

import libcst as cst
import libcst.matchers as m
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parent.parent
COPIES = ROOT / "build" / "mutants"
BASELINE_S, GRACE_S = 600.0, 20.0  # without a change; what a mutant gets beside three times what that took
HELD = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))["held"]
TESTS: dict[str, list[str]] = {module: each["tests"] for each in HELD for module in each["modules"]}
# Annotations, aliases of types, decorators, logs, texts of errors, and others: words with a space between them.
_WORTHLESS = (
    m.Annotation()
    | m.Assign([m.AssignTarget(m.Name(m.MatchRegex(r"_?[A-Z]\w*[a-z]\w*")))])
    | m.Decorator()
    | m.If(test=m.Name("TYPE_CHECKING"))
    | m.Call(func=m.Attribute(value=m.Name("log")))
    | m.Raise(exc=m.Call(args=[m.Arg(m.FormattedString() | m.SimpleString())]))
    | m.SimpleString(value=m.MatchRegex(r".*\w.* .*"))
    | m.FormattedString()
    | m.Arg(keyword=m.Name("strict"))
)
# Examples are neither kept nor made smaller: that the tests fail is all that is asked.
_RUN = """
import sys, pytest
class Quick:
    def pytest_configure(self):
        from hypothesis import Phase, settings
        settings.register_profile("quick", database=None, deadline=None, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("quick")
sys.exit(pytest.main(["-x", "--timeout=60", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Quick()]))
"""


def places(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, list[cst.CSTNode]]]:
    """Yield the nodes that can be changed, each with what may stand in its place."""
    if not m.matches(node, _WORTHLESS):
        changes = [each for kind, changed in mutation_operators if isinstance(node, kind) for each in changed(node)]
        if changes:
            yield node, changes
        for child in node.children:
            yield from places(child)


def mutants_of(path: str, source: str, rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Yield mutants of a module in random order, one for each place: the source, and the lines that differ."""
    module = cst.parse_module(source)
    for node, changes in sorted(places(module), key=lambda _: rng.random()):
        mutated = cst.ensure_type(module.deep_replace(node, rng.choice(changes)), cst.Module).code
        diff = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm=""))
        number = diff[2].split()[1].strip("-").partition(",")[0]
        yield mutated, [f"{path}:{number}", *diff[3:]]


class Copies:
    """As many copies of the tree as there are jobs."""

    def __init__(self, jobs: int, seed: int) -> None:
        self._seed = seed
        self._free: SimpleQueue[Path] = SimpleQueue()
        shutil.rmtree(COPIES, ignore_errors=True)
        for number in range(jobs):
            copy = COPIES / str(number)
            for name in ("broker_adapter", "dmq", "retry", "tests"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            # Told apart by source, not by time: of two mutants of one second and one length, both are seen.
            compileall.compile_dir(copy, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
            self._free.put(copy)

    def passes(self, path: str, source: str, timeout_s: float) -> bool:
        """Say whether the tests of a module pass with this source of it, in time."""
        copy = self._free.get()
        original = (copy / path).read_bytes()
        (copy / path).write_text(source, encoding="utf-8")
        command = [sys.executable, "-c", _RUN, f"--hypothesis-seed={self._seed}", *TESTS[path]]
        with (copy / "tests.log").open("w") as log:
            run = subprocess.Popen(command, cwd=copy, stdout=log, stderr=log, start_new_session=True)
        try:
            return run.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return run.wait() == 0
        finally:
            (copy / path).write_bytes(original)
            self._free.put(copy)


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Change modules in one place at a time; see whether tests notice.")
    parser.add_argument("--per-module", type=int, default=20, help="how many mutants of each (default: 20)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeat the choices of a run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs of tests beside each other")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="a path (default: all in tools/mutants.toml)")
    options = parser.parse_args(argv)
    if unknown := [path for path in options.modules if path not in TESTS]:
        parser.error(f"{unknown[0]} is not in tools/mutants.toml, which says what tests hold a module")
    print(f"mutants: --per-module {options.per_module} --seed {options.seed}", flush=True)
    copies, table = Copies(options.jobs, options.seed), ["| module | mutants | killed | survived | score |"]
    for path in options.modules or TESTS:
        source, begun_s = (COPIES / "0" / path).read_text(encoding="utf-8"), time.monotonic()
        if not copies.passes(path, source, BASELINE_S):
            raise SystemExit(f"the tests of {path} fail without any change; see {COPIES}/*/tests.log")
        timeout_s = GRACE_S + 3 * (time.monotonic() - begun_s)
        if copies.passes(path, "raise SystemError\n", timeout_s):
            raise SystemExit(f"the tests of {path} pass without it: they hold something else")
        mutants = list(islice(mutants_of(path, source, random.Random(f"{options.seed} {path}")), options.per_module))
        with ThreadPoolExecutor(options.jobs) as pool:
            passed = list(pool.map(copies.passes, repeat(path), (each for each, _ in mutants), repeat(timeout_s)))
        for _, diff in compress(mutants, passed):
            print(*diff, sep="\n    ", flush=True)
        count, left = len(mutants), sum(passed)
        table.append(f"| `{path}` | {count} | {count - left} | {left} | {100 * (count - left) // count} % |")
        print(table[-1], flush=True)
    print("", table[0], "|---|---|---|---|---|", *table[1:], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
