"""`make where MODULE=...` leads from a module to its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def where(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "where.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_tests_of_a_module_are_listed() -> None:
    """Direct imports come first, then tests that reach the module through support code."""
    found = where("dmq/broker/groups/lease_timers.py")
    assert found.returncode == 0, found.stderr
    direct, _, through = found.stdout.partition("reached through")
    assert "tests/dmq/broker/groups/test_lease_timers.py" in direct
    assert through


def test_an_unknown_module_is_a_usage_error() -> None:
    """The answer shows the form of the argument."""
    for arguments in ((), ("dmq/gone.py",)):
        found = where(*arguments)
        assert (found.returncode, found.stdout) == (2, "")
        assert "MODULE=" in found.stderr
