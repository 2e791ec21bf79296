"""The README's first screen, done by a newcomer: an empty folder, empty caches, a Python, and the wheel.

By default ``test_pages.py`` does the same with what is installed here, and ``test_wheel.py`` what it can with the wheel
and this one Python; installing takes half a minute of a processor for each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from support.clients.documentation.pages import ROOT, Block, blocks
from support.clients.documentation.reader import Newcomer
from support.effort import at_length

pytestmark = pytest.mark.integration
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


def first_screen() -> list[Block]:
    """The blocks from the top of the page to where the example says what it received."""
    found = blocks("README.md")
    (last,) = (place for place, each in enumerate(found) if "later.py\n" in each.text and each.has_output)
    return found[: last + 1]


def interpreter(version: str) -> Path | None:
    """A Python of that version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    for each in [
        *([Path(on_path)] if on_path else []),
        *sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")),
    ]:
        asked = [str(each), "-c", "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout.split()
        if told[1:] == [version]:  # a shim of pyenv may stand for a version that it does not start
            return Path(told[0])
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is published."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (built,) = target.glob("*.whl")
    return built


def test_the_versions_are_logged_once() -> None:
    """The metadata, the README and the Makefile name the same ones."""
    assert sorted(VERSIONS, key=lambda each: int(each.partition(".")[2])) == VERSIONS
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert f"Python {VERSIONS[0]} to {VERSIONS[-1]}" in (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"python{each}" in makefile for each in VERSIONS)


@at_length
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_screen(version: str, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It installs, both messages arrive, and the audit finds nothing wrong; how long it took is printed."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    install, *others = first_screen()
    with Newcomer(tmp_path, python, wheel) as newcomer:
        begun_s = time.monotonic()
        newcomer.do(install, is_piece=False)
        installed_s = time.monotonic()
        for each in others:
            newcomer.do(each, is_piece=False)
        took_s = time.monotonic() - begun_s
        assert sorted(line.partition(" ")[2] for line in newcomer.said[-1].splitlines()) == ["hello", "hello, later"]
        with capsys.disabled():
            print(
                f"\nPython {version}: both delayed messages are received {took_s:.0f} s after the first command,"
                f" {installed_s - begun_s:.0f} s of them for installing"
            )
        newcomer.shell(f".venv/bin/pip install --quiet '{wheel}[audit-local]'")
        told = newcomer.shell(".venv/bin/dmq audit run --out audit")
        assert "verdict: clean" in told, told
