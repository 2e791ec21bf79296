"""The command line as a program of its own: by itself, and by spark-submit on a Spark cluster of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.clients.java.jvm import SHORT_LIVED, SPARK, UNCOMPILED_OPTIONS
from support.effort import at_length
from support.forges.cells.forge import forge
from support.forges.trail.mutations import MUTATORS

from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import write_outcome

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]
COMPARED = ("report.json", "findings.csv", "findings.jsonl")
LOOPBACK = "127.0.0.1"


def spark_home() -> Path:
    """Return where the installed package keeps Spark."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def environment() -> dict[str, str]:
    """Return an environment in which Spark's own programs find Python, us and nothing but this machine."""
    own = {"SPARK_LOCAL_IP": LOOPBACK, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    own |= {"SPARK_HOME": str(spark_home()), "SPARK_PUBLIC_DNS": LOOPBACK, "SPARK_DAEMON_JAVA_OPTS": SPARK}
    own["SPARK_SUBMIT_OPTS"] = SHORT_LIVED[0]
    return {**os.environ, **own}


@contextmanager
def daemon(log: Path, name: str, *arguments: str) -> Iterator[Path]:
    """Run one of Spark's daemons in the foreground, its words in ``log``; it ends with the block."""
    command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
    with (
        log.open("wb") as words,
        subprocess.Popen(
            [*command, "--host", LOOPBACK, "--port", "0", "--webui-port", "0", *arguments],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
        ) as process,
    ):
        try:
            yield log
        finally:
            process.terminate()
            process.wait(30)


def wait_for(log: Path, pattern: str) -> str:
    """Return the first match in a log that another process writes; the test's own timeout ends it."""
    with subprocess.Popen(["tail", "-n", "+1", "-F", str(log)], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                if match := re.search(pattern, line):
                    return match[0]
        finally:
            tail.terminate()
    raise AssertionError(f"{pattern} was not said")


def audited(command: list[str], trail: Path, out: Path) -> tuple[int, dict[str, bytes]]:
    """Run the job and return its exit code and the files that are compared."""
    arguments = ["run", "--trail", str(trail), "--out", str(out)]
    done = subprocess.run([*command, *arguments], env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    assert (out / "report.html").stat().st_size > 1_000
    return done.returncode, {name: (out / name).read_bytes() for name in COMPARED}


@pytest.fixture(scope="module")
def bent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trail in which two messages are lost."""
    trail = tmp_path_factory.mktemp("bent") / "trail"
    forge(trail, messages=300, seed=6, rows_per_file=200)
    MUTATORS["lose_hand_over"](trail, "daemon-0", 2, 1, ())
    return trail


@pytest.fixture(scope="module")
def expected(engine: TableEngine, bent: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the job writes in this process."""
    out = tmp_path_factory.mktemp("expected")
    outcome = run_audit(engine, str(bent), Options())
    assert outcome.report["findings"]["by_kind"] == {"LOST": 2}
    write_outcome(outcome, out)
    return {name: (out / name).read_bytes() for name in COMPARED}


@at_length
def test_by_itself_it_writes_the_same_bytes(bent: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """``python -m spark_audit`` needs no cluster and no spark-submit; its exit code is the verdict."""
    assert audited([sys.executable, "-m", "spark_audit"], bent, tmp_path / "out") == (20, expected)


@at_length
def test_on_a_cluster_it_writes_the_same_bytes(bent: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Two workers read the files, in processes of their own; the driver is a third."""
    with daemon(tmp_path / "master.log", "master.Master") as log:
        master = wait_for(log, r"spark://127\.0\.0\.1:\d+")
        worker = ("worker.Worker", "--cores", "1", "--memory", "1g", "--work-dir")
        with (
            daemon(tmp_path / "one.log", *worker, str(tmp_path / "one"), master) as one,
            daemon(tmp_path / "two.log", *worker, str(tmp_path / "two"), master) as two,
        ):
            for each in (one, two):
                wait_for(each, "Successfully registered with master")
            command = [str(spark_home() / "bin" / "spark-submit"), "--master", master, "--executor-memory", "700m"]
            command += ["--driver-java-options", SPARK, "--conf", f"spark.executor.extraJavaOptions={SPARK}"]
            command += [*UNCOMPILED_OPTIONS, str(ROOT / "spark_audit" / "__main__.py")]
            assert audited(command, bent, tmp_path / "out") == (20, expected)
            for name in ("one", "two"):
                assert list((tmp_path / name).glob("app-*/*/stderr")), "a worker had nothing to do"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--trail", "nowhere", "--incremental"], 2, "--state"),
        (["--trail", "nowhere", "--grace", "soon"], 2, "not a duration"),
        (["--trail", "nowhere", "--from", "tomorrow"], 2, "ISO 8601"),
        (["--trail", "nowhere", "--engine", "duckdb"], 1, "no such directory"),
    ],
)
def test_an_example_that_cannot_run_is_marked(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    """Wrong options end with 2 before an engine starts, a trail that is not there with 1; nothing is written."""
    command = [sys.executable, "-m", "spark_audit", "run", "--out", str(tmp_path / "out"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "out").exists()
