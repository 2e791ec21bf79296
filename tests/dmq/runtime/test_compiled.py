"""The HTTP/2 server runs as it was compiled, or as Python: the same tests hold for both, and the sources decide."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.effort import drawn

import dmq.http2
from dmq.runtime.compiled import DIGEST, SUFFIX, compiled_first, digest_of, folder_of, is_made_of

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "dmq" / "http2"
OTHERS = re.compile(r"grpcio|h2spec|node")  # clients that take long
TESTS = sorted(each for each in (ROOT / "tests/dmq/http2").rglob("test_*.py") if not OTHERS.search(each.stem))
is_there = pytest.mark.skipif(not is_made_of(folder_of(PACKAGE), PACKAGE), reason="not compiled here: make env")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of one module, compiled."""
    (tmp_path / "one.py").write_text("ONE = 1\n", encoding="utf-8")
    folder = folder_of(tmp_path)
    folder.mkdir(parents=True)
    (folder / f"one{SUFFIX}").touch()
    (folder / DIGEST).write_text(digest_of(tmp_path), encoding="ascii")
    return tmp_path


def test_compiled_modules_come_first(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment says otherwise."""
    monkeypatch.delenv("DMQ_COMPILED", raising=False)
    assert compiled_first([str(package)]) == [str(folder_of(package)), str(package)]
    monkeypatch.setenv("DMQ_COMPILED", "0")
    assert compiled_first([str(package)]) == [str(package)]


@pytest.mark.parametrize("change", ["edited", "added", "added below", "removed", "half made", "of another Python"])
def test_a_build_of_other_sources_is_not_used(package: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Danger: an edit that does nothing, or a wheel's modules beside sources of another version."""
    monkeypatch.delenv("DMQ_COMPILED", raising=False)
    match change:
        case "edited":
            (package / "one.py").write_text("ONE = 2\n", encoding="utf-8")
        case "added":
            (package / "two.py").touch()
        case "added below":
            (package / "below").mkdir()
            (package / "below" / "two.py").touch()
        case "removed":
            (package / "one.py").unlink()
        case "half made":
            (folder_of(package) / DIGEST).unlink()
        case _:
            folder_of(package).rename(package / "_compiled" / "cpython-39-pdp11")
    assert compiled_first([str(package)]) == [str(package)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a wheel is built of, compiled by nobody yet."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("broker_adapter", "dmq", "retry", "spark_audit", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_compiled", "__pycache__"))
    return tmp_path


def run(tree: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, with such variables and no CI."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_without_a_compiler_it_runs_as_python(tree: Path) -> None:
    """Nothing needs it, and whoever asked for it in a wheel is told what is missing."""
    done = run(tree, "tools/compile_http2.py", PATH="/nonexistent")
    assert (done.returncode, "a C compiler" in done.stdout, "will run as Python" in done.stdout) == (0, True, True)
    wheel = run(tree, "-m", "hatchling", "build", "-t", "wheel", PATH="/nonexistent", DMQ_COMPILED="1")
    assert wheel.returncode != 0
    assert "a C compiler" in wheel.stderr
    assert not list((tree / "dist").glob("*.whl"))


@is_there
def test_a_failing_compiler_is_an_error_in_ci_only(tree: Path) -> None:
    """In CI it would hide that the sources do not compile any more. Nothing half made is left."""
    for each in (tree / "dmq" / "http2").glob("*/"):  # one module is enough: each costs seconds of a processor
        shutil.rmtree(each)
    compiler = tree / "bin" / (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho no room left; exit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    path = f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"
    for variables, code in (({}, 0), ({"CI": "true"}, 1)):
        done = run(tree, "tools/compile_http2.py", PATH=path, **variables)
        assert (done.returncode, "will run as Python" in done.stdout) == (code, True), done.stderr
    assert list((tree / "dmq" / "http2" / "_compiled").iterdir()) == []


@is_there
@pytest.mark.timeout(900)
def test_the_other_form_passes_the_same_tests() -> None:
    """Whichever of the two this process runs: a half of the modules by the seed, in a long run all."""
    tests = drawn(TESTS, -(-len(TESTS) // 2))
    other = "0" if dmq.http2.is_compiled else "1"
    environment = {**os.environ, "DMQ_TEST_COMPILED": other}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *map(str, tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0


@is_there
def test_a_process_reports_its_form() -> None:
    """Each of its modules is in that form, in all subpackages."""
    show = (
        "import sys, dmq.http2; print(dmq.http2.is_compiled, *{str(each.__file__).rpartition('.')[2]"
        " for name, each in sys.modules.items() if name.startswith('dmq.http2.') and not hasattr(each, '__path__')})"
    )
    for variable, said in {"0": "False py", "1": "True so"}.items():
        environment = {**os.environ, "DMQ_COMPILED": variable}
        command = [sys.executable, "-c", show]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == said, done.stderr
