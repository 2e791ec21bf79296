"""The wheel, as a user has it: only its own files, and only what each extra brings, are there to be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.daemon import START_S_MAX, free_port
from support.jvm import SHORT_LIVED

ROOT = Path(__file__).parents[2]
_HOOK = """
import sys
from dmq import Spool, durable
from retry import Redelivery, Spooled

def away(payload):
    raise ConnectionError("away")

redelivery = Redelivery(Spool(sys.argv[1]))
redelivery.add_handler("orders", away)
assert isinstance(redelivery.send("orders", b"1", key="k"), Spooled)
print(redelivery.close().still_waiting)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = target.glob("rock_dmq-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(target / "site")
    return target / "site"


def required(installed: Path, extra: str) -> set[str]:
    """The names of all distributions that the wheel asks for, with an extra or without, and that those ask for."""
    (metadata,) = installed.glob("*.dist-info/METADATA")
    asked = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    open_, found = [(Requirement(each), extra) for each in asked], set[str]()
    while open_:
        requirement, of = open_.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of}):
            continue
        if requirement.name in found:
            continue
        found.add(requirement.name)
        for own in ("", *requirement.extras):
            open_ += [(Requirement(each), own) for each in distribution(requirement.name).requires or ()]
    return found


@contextmanager
def environment(installed: Path, tmp: Path, extra: str) -> Iterator[dict[str, str]]:
    """Variables under which ``python -S`` finds the wheel and those distributions, and nothing else."""
    tmp.mkdir()
    for name in required(installed, extra):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files if file.parts[0] not in {"..", "__pycache__"}}:
            target = Path(str(distribution(name).locate_file(top)))
            if not (tmp / top).exists():
                (tmp / top).symlink_to(target)
    yield {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{tmp}", "PYTHONNOUSERSITE": "1"}


def run(env: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the packages of this environment."""
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_the_base_is_the_hook(installed: Path, tmp_path: Path) -> None:
    """It spools with two dependencies; the command says what it lacks."""
    assert required(installed, "") >= {"rocksdict", "structlog"}
    with environment(installed, tmp_path / "site", "") as env:
        done = run(env, tmp_path, "-c", _HOOK, str(tmp_path / "spool"))
        assert (done.stdout.strip()[-1:], done.returncode) == ("1", 0), done.stderr
        done = run(env, tmp_path, "-m", "dmq", "status")
        assert done.returncode != 0
        assert "rock-dmq[server]" in done.stderr, done.stderr


def test_the_server_serves(installed: Path, tmp_path: Path) -> None:
    """A daemon, and the command that sends to it and asks it."""
    address = f"127.0.0.1:{free_port()}"
    with environment(installed, tmp_path / "site", "server") as env:
        command = ["-m", "dmq", "serve", "--listen", address, "--metrics-listen", "off", "--log-format", "json"]
        with subprocess.Popen(
            [sys.executable, "-S", *command], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        ) as daemon:
            try:
                assert daemon.stderr is not None
                assert any('"serving"' in line for line in daemon.stderr)
                sent = run(env, tmp_path, "-m", "dmq", "msg", "send", "orders", "hello", "--address", address)
                assert sent.returncode == 0, sent.stderr
                told = run(env, tmp_path, "-m", "dmq", "topic", "ls", "--address", address)
                assert "orders" in told.stdout
            finally:
                daemon.terminate()
                daemon.communicate(timeout=START_S_MAX)
        assert daemon.returncode == 0


def test_the_audit_has_its_job(installed: Path, tmp_path: Path) -> None:
    """It starts, reads its options, and says which trail is not there."""
    with environment(installed, tmp_path / "site", "audit") as env:
        arguments = ("-m", "spark_audit", "run", "--trail", "nowhere", "--out", str(tmp_path / "out"))
        done = run(env | {"SPARK_SUBMIT_OPTS": SHORT_LIVED[0]}, tmp_path, *arguments)
        assert (done.returncode, "no such directory" in done.stderr) == (1, True), done.stderr


def test_the_audit_draws_its_report(installed: Path, tmp_path: Path) -> None:
    """Its templates, style sheet and script are in the wheel, and the extra brings what draws the charts."""
    row = {"window_start_ms": 600_000, "topic": "orders", "scheduled": 1, "fired": 1}
    report = {"range": {"to_ms": 1_200_000}, "scheduled": [row]}
    code = f"from spark_audit.report.html import page; print(page({report}, []))"
    with environment(installed, tmp_path / "site", "audit") as env:
        done = run(env, tmp_path, "-c", code)
        assert "Messages due and fired over time" in done.stdout, done.stderr
