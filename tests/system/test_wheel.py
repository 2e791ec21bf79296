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
from support.forges.cells.forge import forge
from support.rigs.daemon.process import START_S_MAX, free_port

from dmq.runtime.compiled import folder_of, is_made_of

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
HTTP2 = ROOT / "dmq" / "http2"
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


_CLIENT = """
import sys
from dmq import AdminClient, SidecarClient
from retry import Redelivery, Spooled

def away(payload):
    raise ConnectionError("away")

redelivery = Redelivery(SidecarClient(sys.argv[1]))
redelivery.add_handler("orders", away)
assert isinstance(redelivery.send("orders", b"1"), Spooled)
with AdminClient(sys.argv[1]) as admin:
    print(admin.status().broker_name, redelivery.close().still_waiting)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    return built(tmp_path_factory.mktemp("wheel"), "py3-none-any")


def built(target: Path, tag: str, **variables: str) -> Path:
    """Build a wheel, which must have this tag, and return a folder with what it holds."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    env = {**os.environ, **variables}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=100)
    (wheel,) = target.glob(f"rock_dmq-*-{tag}.whl")
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
        if requirement.name == "rock-dmq":  # an extra that has another one in it
            open_ += [(Requirement(each), own) for each in asked for own in requirement.extras]
            continue
        if requirement.name in found:
            continue
        found.add(requirement.name)
        for own in ("", *requirement.extras):
            open_ += [(Requirement(each), own) for each in distribution(requirement.name).requires or ()]
    return found


def megabytes(names: set[str]) -> float:
    """How much lies on disk of these distributions, as they are locked; what Python compiles is left out."""
    files = [Path(str(file.locate())) for name in names for file in distribution(name).files or ()]
    return sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc") / 1e6


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


@contextmanager
def serving(env: dict[str, str], cwd: Path, *options: str) -> Iterator[str]:
    """The address of a daemon that serves meanwhile, and ends in order."""
    address = f"127.0.0.1:{free_port()}"
    command = ["-m", "dmq", "serve", "--listen", address, "--metrics-listen", "off", "--log-format", "json", *options]
    with subprocess.Popen(
        [sys.executable, "-S", *command], env=env, cwd=cwd, stderr=subprocess.PIPE, text=True
    ) as daemon:
        try:
            assert daemon.stderr is not None
            assert any('"serving"' in line for line in daemon.stderr)
            yield address
        finally:
            daemon.terminate()
            daemon.communicate(timeout=START_S_MAX)
    assert daemon.returncode == 0


def test_the_base_is_the_hook(installed: Path, tmp_path: Path) -> None:
    """It spools with two dependencies; the command says what it lacks."""
    assert required(installed, "") >= {"rocksdict", "structlog"}
    with environment(installed, tmp_path / "site", "") as env:
        done = run(env, tmp_path, "-c", _HOOK, str(tmp_path / "spool"))
        assert (done.stdout.strip()[-1:], done.returncode) == ("1", 0), done.stderr
        done = run(env, tmp_path, "-m", "dmq", "status")
        assert done.returncode != 0
        assert "rock-dmq[server]" in done.stderr, done.stderr


# What is said of sizes in docs/how-to/deploy.md.
@pytest.mark.parametrize(("extra", "most"), [("", 15), ("client", 40), ("daemon", 90), ("otel", 100), ("server", 320)])
def test_the_disk_size_of_each_extra(installed: Path, extra: str, most: float) -> None:
    """The size of an installation is a promise: whatever makes one of them larger is noticed here."""
    assert megabytes(required(installed, extra)) <= most


_DOORS = {
    "from dmq import SidecarClient": "client",
    "from dmq import AdminClient": "client",
    "from dmq.client import SidecarClient": "client",
    "from dmq.admin.admin_v1 import Schedule": "client",
    "import dmq.daemon": "server",
    "from dmq import Spool, SpoolOptions; Spool('spool', options=SpoolOptions(trail_path='trail'))": "server",
    "import asyncio; from broker_adapter import connect; asyncio.run(connect('rocketmq://127.0.0.1:1'))": "client",
    "import asyncio; from broker_adapter import connect; asyncio.run(connect('embedded:data'))": "server",
}


def test_a_missing_extra_is_reported_in_a_line(installed: Path, tmp_path: Path) -> None:
    """Every door of the packages, without any extra: the last line has the command that installs what is missing."""
    tries = "".join(
        f"try:\n    {code}\nexcept ImportError as error:\n    print(error)\nelse:\n    print('there')\n"
        for code in _DOORS
    )
    with environment(installed, tmp_path / "site", "") as env:
        done = run(env, tmp_path, "-c", tries)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        for (code, extra), line in zip(_DOORS.items(), said, strict=True):
            assert line.endswith(f"which is missing: pip install 'rock-dmq[{extra}]'"), (code, line)
        for command, extra in (("dmq", "server"), ("spark_audit", "audit")):
            done = run(env, tmp_path, "-m", command, "run")
            assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
            assert f"pip install 'rock-dmq[{extra}]'" in done.stderr


def test_one_extra_names_the_packages_of_another(installed: Path, tmp_path: Path) -> None:
    """Where the command is there, and what one of its commands needs is not: a line, and no traceback."""
    with environment(installed, tmp_path / "daemon", "daemon") as env:
        done = run(env, tmp_path, "-m", "dmq", "serve", "--data", "data")
        last = done.stderr.splitlines()[-1]
        assert (done.returncode, '"critical"' in last) == (1, True), done.stderr
        assert "the audit trail (trail = 'off' does without) needs pyarrow" in last
        assert "pip install 'rock-dmq[server]'" in last
        assert not (tmp_path / "data").exists()
        collector = "http://127.0.0.1:4318"
        with serving({**env, "OTEL_EXPORTER_OTLP_ENDPOINT": collector}, tmp_path, "--trail", "off"):
            pass  # platforms set the variable for each of their containers
        asked = "-m", "dmq", "config", "check", "--trail", "off"
        done = run({**env, "DMQ_OTEL_ENDPOINT": collector}, tmp_path, *asked)
        assert (done.returncode, "pip install 'rock-dmq[otel]'" in done.stdout + done.stderr) == (1, True), done
        (tmp_path / "trail").mkdir()
        done = run(env, tmp_path, "-m", "dmq", "audit", "run", "--trail", "trail", "--out", "out")
        assert (done.returncode, "pip install 'rock-dmq[audit-local]'" in done.stderr) == (1, True), done.stderr
    with environment(installed, tmp_path / "audit", "audit") as env:
        done = run(env, tmp_path, "-m", "dmq", "status")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "which is missing: pip install 'rock-dmq[" in done.stderr


def test_the_server_serves(installed: Path, tmp_path: Path) -> None:
    """A daemon, and the command that sends to it and asks it."""
    with environment(installed, tmp_path / "site", "server") as env, serving(env, tmp_path) as address:
        sent = run(env, tmp_path, "-m", "dmq", "msg", "send", "orders", "hello", "--address", address)
        assert sent.returncode == 0, sent.stderr
        told = run(env, tmp_path, "-m", "dmq", "topic", "ls", "--address", address)
        assert "orders" in told.stdout
        with environment(installed, tmp_path / "client", "client") as of_client:
            used = run(of_client, tmp_path, "-c", _CLIENT, address)
            assert used.stdout == "rock-dmq 1\n", used.stderr


@pytest.mark.skipif(not is_made_of(folder_of(HTTP2), HTTP2), reason="not compiled here: make env")
def test_a_compiled_wheel_serves_compiled(tmp_path: Path) -> None:
    """It is of this Python and this kind of machine, and says what runs."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    installed = built(tmp_path, f"{python}-{python}-linux_*", DMQ_COMPILED="1")
    with environment(installed, tmp_path / "extras", "daemon") as env:
        env.pop("DMQ_COMPILED", None)
        shown = run(env, tmp_path, "-c", "import dmq.http2, dmq.http2.codec.hpack as it; print(it.__file__)")
        assert Path(shown.stdout.strip()).suffix == ".so", shown.stderr
        with serving(env, tmp_path, "--trail", "off") as address:
            done = run(env, tmp_path, "-m", "dmq", "--address", address, "status")
            assert done.returncode == 0, done.stderr


def test_a_trail_is_judged_on_one_machine(installed: Path, tmp_path: Path) -> None:
    """With what ``audit-local`` brings, and without Spark; a trail that is not there is said."""
    forge(tmp_path / "trail", messages=40, seed=1)
    with environment(installed, tmp_path / "site", "audit-local") as env:
        base = ("-m", "spark_audit", "run", "--engine", "duckdb", "--out", str(tmp_path / "out"), "--trail")
        done = run(env, tmp_path, *base, str(tmp_path / "trail"))
        assert (done.returncode, "verdict: clean" in done.stdout) == (0, True), done.stderr
        done = run(env, tmp_path, *base, "nowhere")
        assert (done.returncode, "no such directory" in done.stderr) == (1, True), done.stderr


def test_the_audit_draws_its_report(installed: Path, tmp_path: Path) -> None:
    """Its templates, style sheet and script are in the wheel, and the extra brings what draws the charts."""
    row = {"window_start_ms": 600_000, "topic": "orders", "scheduled": 1, "fired": 1}
    report = {"range": {"to_ms": 1_200_000}, "scheduled": [row]}
    code = f"from spark_audit.report.html import page; print(page({report}, []))"
    with environment(installed, tmp_path / "site", "audit") as env:
        done = run(env, tmp_path, "-c", code)
        assert "Messages due and fired over time" in done.stdout, done.stderr
