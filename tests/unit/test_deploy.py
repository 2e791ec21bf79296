"""What is installed with: the unit of systemd is hardened, and no file names a setting that there is not."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dmq.config import DaemonConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "dmq.service"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
def test_the_unit_is_hardened() -> None:
    """An exposure of 2.0 at most, by systemd's own count."""
    found = analyze("security", "--offline=true", "--threshold=20", str(UNIT))
    assert found.returncode == 0, found.stdout[-500:] + found.stderr


@needs_systemd
def test_the_unit_is_one(tmp_path: Path) -> None:
    """Systemd reads it without a complaint; what it starts is not installed here."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(encoding="utf-8")))
    found = analyze("verify", "--man=no", str(copy))
    assert (found.returncode, [line for line in found.stderr.splitlines() if UNIT.name in line]) == (0, [])


def test_a_stop_is_given_the_time_it_takes() -> None:
    """Whoever stops the daemon waits for longer than its own grace."""
    (seconds,) = re.findall(r"(?m)^TimeoutStopSec=(\d+)$", UNIT.read_text(encoding="utf-8"))
    assert int(seconds) > DaemonConfig().shutdown_grace_s + 10


def test_every_setting_is_one() -> None:
    """No variable of the environment is misspelt: the daemon would refuse it at its start."""
    known = {f"DMQ_{key.upper()}" for key in DaemonConfig.model_fields}
    for path in sorted(each for each in DEPLOY.rglob("*") if each.is_file()):
        named = set(re.findall(r"\bDMQ_[A-Z_]+", path.read_text(encoding="utf-8")))
        assert named <= known, path.name


def test_the_image_runs_as_nobody_in_particular() -> None:
    """A fixed user without rights, the exec form so that signals arrive, packages by their hashes."""
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    for word in ("ENTRYPOINT ", "CMD "):
        assert all(line.removeprefix(word).startswith("[") for line in lines if line.startswith(word))
    installs = [line for line in lines if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)
    assert not any(line.startswith("ADD ") or ":latest" in line for line in lines)
