"""The source keeps the rules of the house: every file git knows, or would with the next `git add`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tidy import rules

pytestmark = pytest.mark.tidy

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[str]:
    """Paths relative to the root of all files that are tracked, or new and not ignored."""
    # The clone may belong to somebody else (a container): that guard of git is about hooks, and none runs here.
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    return sorted(path for path in set(listed.split("\0")) if path and (ROOT / path).is_file())


PATHS = tracked()


def report(findings: list[rules.Finding]) -> str:
    return "".join(f"\n  {finding}" for finding in findings)


def test_there_is_source_to_check() -> None:
    """A walk that finds nothing would pass every rule."""
    for package in rules.PACKAGES:
        assert f"{package}/py.typed" in PATHS
    assert "tests/tidy/rules.py" in PATHS


def test_python_is_tidy() -> None:
    findings = [
        finding
        for path in PATHS
        if path.endswith(".py")
        for finding in rules.check_python(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


def test_text_is_tidy() -> None:
    """Binary files are read as well as they can be: a descriptor set could hold the path it was compiled in."""
    findings = [
        finding
        for path in PATHS
        for finding in rules.check_text(path, (ROOT / path).read_text(encoding="utf-8", errors="replace"))
    ]
    assert not findings, report(findings)


def test_nothing_names_this_checkout() -> None:
    """Whatever machine this is: no file holds the path of the folder it stands in."""
    if len(ROOT.parts) < 3:
        pytest.skip(f"{ROOT} is too short a path to tell from others")
    named = [path for path in PATHS if str(ROOT).encode() in (ROOT / path).read_bytes()]
    assert named == []


def test_locks_name_no_host_and_pin_every_package() -> None:
    """A lock is packages, exact versions and hashes."""
    for lock in ("run", "dev", "build"):
        text = (ROOT / "locks" / f"{lock}.txt").read_text(encoding="utf-8")
        assert "://" not in text
        assert "--index-url" not in text
        assert "--find-links" not in text
        packages = [line for line in text.splitlines() if line[:1].isalpha()]
        assert packages
        for line in packages:
            assert "==" in line, line
            assert line.endswith("\\"), f"no hash follows: {line}"


def test_the_development_lock_contains_the_running_one() -> None:
    """So that `make test` and `make demo` can share one environment in any order."""

    def pins(lock: str) -> dict[str, str]:
        text = (ROOT / "locks" / f"{lock}.txt").read_text(encoding="utf-8")
        lines = (line.rstrip(" \\").partition("==") for line in text.splitlines() if line[:1].isalpha())
        return {name: version for name, _, version in lines}

    development = pins("dev")
    assert pins("run").items() <= development.items()
    shared = pins("build").keys() & development.keys()
    assert {name: pins("build")[name] for name in shared} == {name: development[name] for name in shared}


def test_the_rust_lock_names_no_host_and_pins_by_hash() -> None:
    """Every package but our own program has its checksum; the lock that cargo reads is made of it and not kept."""
    text = (ROOT / "tests/clients/rust/Cargo.lock.in").read_text(encoding="utf-8")
    assert "://" not in text
    assert text.count("\nchecksum = ") == text.count("[[package]]") - 1 > 100
    assert "tests/clients/rust/Cargo.lock" not in PATHS


def test_the_node_lock_names_no_host_and_pins_by_hash() -> None:
    text = (ROOT / "tests/clients/node/package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in text
    assert text.count('"integrity"') >= text.count('"node_modules/') > 1
