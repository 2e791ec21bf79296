"""``dmq audit``: snapshots, exports and lists of a real daemon's trail; and how the Spark job is started.

Spark itself is played by a script that notes how it was called: what it finds is its own tests' affair.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.clients.wire.client import WireClient, a_message
from support.forges.cells.forge import forge
from support.forges.messages.stored import NOW, a_stored
from support.forges.trail.files import CellWriter, Event
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.rocketmq.remoting_peer import HeldQueue, remoting_peer

from dmq.cli.output.errors import CommandFailed
from dmq.cli.trail import engines
from dmq.cli.trail import spark as jobs
from dmq.cli.trail.engines import EngineOption

pytestmark = pytest.mark.integration
TIMEOUT_S = 60
SUBMIT = """#!/bin/sh
printf '%s\\n' "$@" > "$SPARK_HOME/arguments"
env > "$SPARK_HOME/environment"
cat "$SPARK_HOME/says" >&2
echo "the ledgers"
exit $(cat "$SPARK_HOME/code")
"""
NOISE = "WARNING: Using incubator modules: jdk.incubator.vector\n26/11/21 19:00:00 WARN Utils: noise\n"


def dmq(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return run_command(*arguments, env=env, cwd=cwd, timeout_s=TIMEOUT_S)


def answer_of(ended: subprocess.CompletedProcess[str]) -> Any:  # noqa: ANN401 - whatever it printed
    """The JSON that a command that did well printed."""
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def stopped(data: Path) -> Path:
    """The directory of a daemon that took three messages, and was killed before it exported them."""
    with Daemon(data) as daemon:
        with WireClient(daemon.address) as client:
            client.send(*(a_message("orders", f"01{number:032X}") for number in range(3)))
        daemon.kill()
    return data


class FakeSpark:
    """A Spark installation whose spark-submit does what a test says, and a Java that is never run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir(parents=True)
        submit = home / "bin" / "spark-submit"
        submit.write_text(SUBMIT, encoding="utf-8")
        submit.chmod(0o755)
        (home / "java" / "bin").mkdir(parents=True)
        (home / "java" / "bin" / "java").write_text("", encoding="utf-8")
        self.env = {"SPARK_HOME": str(home), "JAVA_HOME": str(home / "java")}
        self.will(0)

    def will(self, code: int, says: str = "") -> None:
        """Say how it ends, and what it says before."""
        (self.home / "code").write_text(str(code), encoding="utf-8")
        (self.home / "says").write_text(says, encoding="utf-8")

    @property
    def arguments(self) -> list[str]:
        """What it was called with last."""
        return (self.home / "arguments").read_text(encoding="utf-8").splitlines()

    def was_called(self) -> bool:
        """Whether it was called at all."""
        return (self.home / "arguments").exists()


@pytest.fixture
def spark(tmp_path: Path) -> FakeSpark:
    """A Spark of this test's own."""
    return FakeSpark(tmp_path / "spark")


# -- snapshot, export, ls ----------------------------------------------------------------------------------------------


def test_a_snapshot_of_a_running_daemon(daemon: Daemon) -> None:
    """There when the command returns; asked again with nothing new, the same one. Its trail need not be named."""
    with WireClient(daemon.address) as client:
        client.send(a_message("orders", "01" + "A" * 32, deliver_at_ms=4_000_000_000_000))
    first = answer_of(dmq("-a", daemon.address, "audit", "snapshot", "-o", "json"))
    assert first["is_new"]
    assert first["entries"] == 1
    assert (Path(first["path"]) / "manifest.json").exists()
    again = answer_of(dmq("-a", daemon.address, "audit", "snapshot", "-o", "json"))
    assert (again["path"], again["is_new"]) == (first["path"], False)
    shown = dmq("-a", daemon.address, "audit", "snapshot")
    assert shown.returncode == 0
    assert f"{first['path']}, which was there" in shown.stdout
    listed = answer_of(dmq("audit", "ls", "-a", daemon.address, "--json"))
    assert (Path(listed["trail"]), len(listed["cells"])) == ((daemon.data / "trail").absolute(), 1)
    told = dmq("audit", "explain", "01" + "A" * 32, "-a", daemon.address)
    assert (told.returncode, "ACCEPTED" in told.stdout.upper()) == (0, True), told.stdout
    nosuch = dmq("audit", "explain", "nosuch", "-a", daemon.address, "--json")
    assert (nosuch.returncode, json.loads(nosuch.stdout)["found"]) == (3, False)
    in_use = dmq("audit", "snapshot", "--data", str(daemon.data))
    assert (in_use.returncode, "is in use by another process" in in_use.stderr) == (6, True)
    assert dmq("-a", daemon.address, "audit", "snapshot", "--trail", "elsewhere").returncode == 2
    assert dmq("-a", "127.0.0.1:1", "audit", "snapshot").returncode == 6


def test_explain_knows_the_newest_events(daemon: Daemon) -> None:
    """The daemon exports first: a message accepted a moment ago is found, and so is its acknowledgement."""
    message_id = "01" + "C" * 32
    with WireClient(daemon.address) as client:
        client.send(a_message("orders", message_id))
        told = dmq("audit", "explain", message_id, "-a", daemon.address)
        assert (told.returncode, "accepted, at once in queue" in told.stdout) == (0, True), told.stderr
        assert len(client.drain("orders", "billing", 1)) == 1
    told = dmq("audit", "explain", message_id, "-a", daemon.address)
    assert (told.returncode, "group billing: finished it" in told.stdout) == (0, True), told.stdout
    never = dmq("audit", "explain", "nosuch", "-a", daemon.address)
    assert (never.returncode, "exported" in never.stderr) == (3, False), never.stderr


def test_explain_names_possible_gaps_of_a_trail(stopped: Path) -> None:
    """Nothing answers, and the message is in no file yet: that is no proof that it never was there."""
    answer_of(dmq("audit", "export", "--data", str(stopped), "-o", "json"))
    told = dmq("audit", "explain", "nosuch", "--data", str(stopped), "-a", "127.0.0.1:1")
    (cell,) = (path.stem for path in (stopped / "trail" / "cells").iterdir())
    assert told.returncode == 3
    assert "no new snapshot" in told.stderr
    assert f"(1m by default) of {cell} may not be exported yet" in " ".join(told.stderr.split())
    assert dmq("audit", "explain", "nosuch", "--data", str(stopped), "-a", "127.0.0.1:1", "--snapshot").returncode == 6


def test_a_cell_can_be_retired(stopped: Path, tmp_path: Path) -> None:
    """By name, in the run, and so for all later ones; an unknown name ends the command before the audit."""
    answer_of(dmq("audit", "export", "--data", str(stopped), "-o", "json"))
    trail = stopped / "trail"
    (cell,) = (path.stem for path in (trail / "cells").iterdir())
    run = ["audit", "run", "--engine", "duckdb", "--trail", str(trail), "--out", str(tmp_path / "out"), "--no-snapshot"]
    unknown = dmq(*run, "--retired-cell", "nosuch")
    assert (unknown.returncode, "no cell 'nosuch'" in unknown.stderr, cell in unknown.stderr) == (2, True, True)
    for more in (["--retired-cell", cell], []):
        ended = dmq(*run, *more)
        assert "1 RETIRED_CELL" in " ".join(ended.stdout.split()), ended.stdout + ended.stderr
    assert (trail / "retired" / f"{cell}.json").is_file()


def test_a_stopped_daemon_is_exported_and_kept_as_a_snapshot(stopped: Path) -> None:
    """All that the killed daemon had not exported, then the snapshot of the same; the list shows both."""
    exported = answer_of(dmq("audit", "export", "--data", str(stopped), "-o", "json"))
    assert exported["sequence"] >= 4
    taken = answer_of(dmq("audit", "snapshot", "--data", str(stopped), "-o", "json"))
    assert taken["sequence"] == exported["sequence"]
    (cell,) = answer_of(dmq("audit", "ls", "--data", str(stopped), "-o", "json"))["cells"]
    assert (cell["first_sequence"], cell["last_sequence"], cell["gaps"]) == (1, exported["sequence"], [])
    assert cell["events"] == exported["sequence"]
    assert (cell["role"], cell["unlisted"]) == ("daemon", 0)
    assert [each["sequence"] for each in cell["snapshots"]] == [taken["sequence"]]
    shown = dmq("audit", "ls", "--trail", str(stopped / "trail"))
    assert cell["cell"] in shown.stdout
    assert shown.stderr == ""


def test_another_trail_can_be_named(stopped: Path, tmp_path: Path) -> None:
    """By option, by configuration, and never for a spool by guessing."""
    elsewhere = tmp_path / "elsewhere"
    answer_of(dmq("audit", "snapshot", "--data", str(stopped), "--trail", str(elsewhere), "-o", "json"))
    assert list(elsewhere.glob("snapshots/*/*"))
    listed = dmq("audit", "ls", "-o", "json", env={"DMQ_TRAIL": str(elsewhere)})
    assert len(answer_of(listed)["cells"]) == 1
    off = dmq("audit", "ls", env={"DMQ_TRAIL": "off"})
    assert (off.returncode, "the trail is off" in off.stderr) == (2, True)
    spool = stopped.rename(stopped.with_name("spool-1"))
    unnamed = dmq("audit", "export", "--data", str(spool))
    assert (unnamed.returncode, "give --trail" in unnamed.stderr) == (2, True)


def test_gaps_are_listed(stopped: Path) -> None:
    """A file that is gone with its line is a gap; one that only lost its line is none."""
    trail = stopped / "trail"
    with Daemon(stopped) as daemon:
        for number in range(3):
            with WireClient(daemon.address) as client:
                client.send(a_message("orders", f"02{number:032X}"))
            answer_of(dmq("-a", daemon.address, "audit", "snapshot", "-o", "json"))
        daemon.stop()
    (manifest,) = trail.glob("manifest/cell=*/*.jsonl")
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) >= 3
    manifest.write_text(lines[0] + "".join(lines[2:]), encoding="utf-8")
    (cell,) = answer_of(dmq("audit", "ls", "--trail", str(trail), "-o", "json"))["cells"]
    assert (cell["gaps"], cell["unlisted"], cell["missing"]) == ([], 1, 0)
    lost = json.loads(lines[1])
    (trail / lost["path"]).unlink()
    (cell,) = answer_of(dmq("audit", "ls", "--trail", str(trail), "-o", "json"))["cells"]
    assert cell["gaps"] == [{name: lost[name] for name in ("first_sequence", "last_sequence")}]
    assert cell["missing"] == lost["rows"]
    assert (
        f"events {lost['first_sequence']:,} to {lost['last_sequence']:,} are missing"
        in dmq("audit", "ls", "--trail", str(trail)).stderr
    )


@pytest.mark.parametrize("command", ["snapshot", "export"])
def test_there_must_be_a_store(command: str, tmp_path: Path) -> None:
    """A directory that holds none is not made one."""
    ended = dmq("audit", command, "--data", str(tmp_path / "nothing"), "--trail", str(tmp_path / "trail"))
    assert (ended.returncode, "there is no store" in ended.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_there_must_be_a_trail(tmp_path: Path) -> None:
    """The list, the run and the story of a message say so before anything is started."""
    for arguments in (["ls"], ["run", "--out", str(tmp_path / "out")], ["explain", "01AB"]):
        ended = dmq("audit", *arguments, "--trail", str(tmp_path / "nothing"))
        assert (ended.returncode, "there is no trail" in ended.stderr) == (3, True), arguments
    assert list(tmp_path.iterdir()) == []


ON_SPARK = ("--engine", "spark")


# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 10, 20, 30, 40])
def test_the_jobs_exit_code_is_passed_through(code: int, spark: FakeSpark, tmp_path: Path) -> None:
    """Its own lines go through, Java's only to the log; JSON says what the code means."""
    trail, into = tmp_path / "trail", tmp_path / "out"
    trail.mkdir()
    spark.will(code, NOISE + "stage join: 7 rows\n")
    arguments = ["audit", "run", *ON_SPARK, "--trail", str(trail), "--out", str(into), "--no-snapshot"]
    ended = dmq(*arguments, env=spark.env)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "the ledgers\n", "stage join: 7 rows\n")
    assert NOISE in (into / "spark.log").read_text(encoding="utf-8")
    ended = dmq(*arguments, "-o", "json", env=spark.env)
    assert ended.returncode == code
    assert json.loads(ended.stdout) == {
        "exit_code": code,
        "meaning": jobs.MEANINGS[code],
        "out": str(into),
        "engine": "spark",
        "log": str(into / "spark.log"),
        "snapshot": None,
    }


@pytest.mark.parametrize(("code", "becomes"), [(1, 1), (2, 2), (137, 1)])
def test_a_failed_job_names_its_log(code: int, becomes: int, spark: FakeSpark, tmp_path: Path) -> None:
    """With the code of an internal error, or of usage."""
    (tmp_path / "trail").mkdir()
    spark.will(code, NOISE)
    arguments = ["--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out"), "--no-snapshot"]
    ended = dmq("audit", "run", *ON_SPARK, *arguments, env=spark.env)
    assert ended.returncode == becomes
    assert ended.stderr == f"dmq: the audit failed ({code}); Spark's log is {tmp_path / 'out' / 'spark.log'}\n"


@pytest.mark.parametrize(("memory", "told"), [("1GiB", "1024m"), ("3g", "3g"), ("512M", "512m")])
def test_the_request_reaches_the_job(spark: FakeSpark, tmp_path: Path, memory: str, told: str) -> None:
    """Times as milliseconds, durations with their unit, Spark's options to Spark, and nothing that was not given."""
    (tmp_path / "trail").mkdir()
    base = ["--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out")]
    given = ["--from", "2026-11-21T00:00:00Z", "--to", "1795305600000", "--late-after", "1m", "--late-max", "3"]
    given += ["--duplicates-max", "4", "--grace", "2m", "--exact"]
    of_spark = ["--master", "local[2]", "--driver-memory", memory, "--conf", "spark.a=b=c"]
    of_spark += ["--conf", "spark.driver.extraJavaOptions=-Dx=y"]
    assert dmq("audit", "run", *ON_SPARK, *base, *given, *of_spark, "--no-snapshot", env=spark.env).returncode == 0
    arguments = spark.arguments
    at = arguments.index("run")
    passed = ["--from", "1795219200000", "--to", "1795305600000", "--late-after", "60000ms", "--grace", "120000ms"]
    passed += ["--late-max", "3", "--duplicates-max", "4", "--exact"]
    assert arguments[at:] == ["run", *base, *passed]
    assert arguments[:4] == ["--master", "local[2]", "--driver-memory", told]
    assert arguments[4] == "--driver-java-options"
    assert arguments[5].endswith("-Dx=y -XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    assert arguments[6:8] == ["--conf", "spark.a=b=c"]
    assert "--py-files" not in arguments
    assert not Path(arguments[at - 1]).exists(), "the launcher is removed with the run"
    environment = (spark.home / "environment").read_text(encoding="utf-8").splitlines()
    assert f"PYSPARK_PYTHON={sys.executable}" in environment
    for more in ([], ["--incremental", "--state", str(tmp_path / "state")]):
        assert dmq("audit", "run", *ON_SPARK, *base, *more, "--no-snapshot", env=spark.env).returncode == 0
        assert spark.arguments[spark.arguments.index("run") :] == ["run", *base, *more]


@pytest.mark.parametrize(
    ("size", "first"),
    [
        (500_000, ["TieredStopAtLevel=1", "+UseSerialGC"]),
        (500_001, ["TieredStopAtLevel=1", "+UseParallelGC"]),
        (25_000_001, ["+UseParallelGC", "Tier4InvocationThreshold=100000"]),
    ],
)
def test_a_trail_gets_the_collector_and_the_compilers_that_pay(
    spark: FakeSpark, tmp_path: Path, size: int, first: list[str]
) -> None:
    """Java is set for a short life only where the trail is known to be small."""
    (tmp_path / "trail").mkdir()
    with (tmp_path / "trail" / "some.parquet").open("wb") as file:
        file.truncate(size)
    base = ["--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out"), "--no-snapshot"]
    assert dmq("audit", "run", *ON_SPARK, *base, env=spark.env).returncode == 0
    options = spark.arguments[spark.arguments.index("--driver-java-options") + 1]
    assert re.findall(r"-XX:(\S+)", options)[:2] == first


def test_a_garbage_collector_that_is_asked_for_is_the_only_one(spark: FakeSpark, tmp_path: Path) -> None:
    """With two of them Java does not start."""
    (tmp_path / "trail").mkdir()
    base = ["--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out"), "--no-snapshot"]
    asked = ["--conf", "spark.driver.extraJavaOptions=-Xss4m -XX:+UseSerialGC"]
    assert dmq("audit", "run", *ON_SPARK, *base, *asked, env=spark.env).returncode == 0
    assert re.findall(r"-XX:\S+", spark.arguments[spark.arguments.index("--driver-java-options") + 1]) == [
        "-XX:+UseSerialGC"
    ]


def test_a_cluster_gets_the_package(tmp_path: Path, spark: FakeSpark) -> None:
    """As a zip, from which it can be imported."""
    package = jobs.package_folder("spark_audit")
    command = jobs.submit_command(
        jobs.Spark(submit=spark.home / "bin" / "spark-submit", environment={}, package=package),
        tmp_path,
        tmp_path / "log",
        master="spark://somewhere:7077",
        memory="1g",
        conf=(),
        trail="s3a://bucket/trail",
        arguments=(),
    )
    archive = Path(command[command.index("--py-files") + 1])
    with zipfile.ZipFile(archive) as files:
        assert "spark_audit/__init__.py" in files.namelist()
        assert not [name for name in files.namelist() if "__pycache__" in name]
    assert command[-3:] == ["run", "--trail", "s3a://bucket/trail"]


def test_options_are_checked_before_anything_starts(spark: FakeSpark, tmp_path: Path) -> None:
    """Each with its name, and 2."""
    (tmp_path / "trail").mkdir()
    base = ["audit", "run", "--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out")]
    wrong = {
        "--from": ["--from", "yesterday"],
        "--to": ["--to", "+5m"],
        "--late-after": ["--late-after", "soon"],
        "--grace": ["--grace", "-1"],
        "--late-max": ["--late-max", "-1"],
        "--incremental": ["--incremental"],
        "--conf": ["--conf", "novalue"],
        "--driver-memory": ["--driver-memory", "much"],
    }
    cases = [*wrong.items(), ("--incremental", ["--incremental", "--state", "s", "--from", "2026-11-21T00:00:00Z"])]
    for name, given in cases:
        ended = dmq(*base, *given, env=spark.env)
        assert (ended.returncode, name in ended.stderr) == (2, True), ended.stderr
    assert not spark.was_called()
    assert not (tmp_path / "out").exists()


def test_missing_input_is_reported(spark: FakeSpark, tmp_path: Path) -> None:
    """Java, Spark, or the job, each in one line, before anything starts."""
    (tmp_path / "trail").mkdir()
    base = ["audit", "run", *ON_SPARK, "--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out")]
    base.append("--no-snapshot")
    ended = dmq(*base, env={**spark.env, "JAVA_HOME": str(tmp_path)})
    assert (ended.returncode, "there is no Java in JAVA_HOME" in ended.stderr) == (1, True)
    ended = dmq(*base, env={**spark.env, "SPARK_HOME": str(tmp_path)})
    assert (ended.returncode, "bin/spark-submit is missing" in ended.stderr) == (1, True)
    ended = dmq(*base, env={"JAVA_HOME": "", "PATH": str(tmp_path), "SPARK_HOME": str(spark.home)})
    assert (ended.returncode, ended.stderr) == (1, "dmq: there is no Java: Spark needs Java 17 or newer\n")
    assert not spark.was_called()


def test_a_trail_is_judged_without_java(tmp_path: Path) -> None:
    """By DuckDB if nobody asks for another engine: the verdict is the exit code, the report is there."""
    forge(tmp_path / "trail", messages=60, seed=3)
    base = ["audit", "run", "--trail", str(tmp_path / "trail"), "--out", str(tmp_path / "out"), "--no-snapshot"]
    ended = dmq(*base, "-o", "json", env={"JAVA_HOME": str(tmp_path), "SPARK_HOME": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert (answer["engine"], answer["meaning"], answer["log"]) == ("duckdb", "clean", None)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.html", "report.json", "findings.csv"}


def test_functions_missing_in_duckdb_are_refused(tmp_path: Path) -> None:
    """Trails elsewhere, and options that only Spark has; what to do instead is said."""
    (tmp_path / "trail").mkdir()
    base = ["audit", "run", "--engine", "duckdb", "--out", str(tmp_path / "out"), "--no-snapshot"]
    for given in (["--trail", "s3a://bucket/trail"], ["--trail", str(tmp_path / "trail"), "--conf", "spark.a=b"]):
        ended = dmq(*base, *given)
        assert (ended.returncode, "--engine" in ended.stderr) == (2, True), ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("has", "of_events", "expected"),
    [
        ({"duckdb", "pyspark"}, 0, EngineOption.duckdb),
        ({"pyspark"}, 0, EngineOption.spark),
        ({"duckdb"}, 5_001, EngineOption.duckdb),
        ({"duckdb", "pyspark"}, 5_001, EngineOption.spark),
    ],
)
def test_an_engine_is_chosen_by_installation_and_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has: set[str], of_events: int, expected: EngineOption
) -> None:
    """DuckDB, unless it is missing or the trail is a long one and Spark is there."""
    monkeypatch.setattr(engines, "AUTO_MAX_BYTES", 5_000)
    monkeypatch.setattr(engines, "find_spec", lambda name: name if name in has else None)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    (tmp_path / "events").mkdir()
    with (tmp_path / "events" / "long.parquet").open("wb") as file:
        file.truncate(of_events)
    assert engines.chosen(EngineOption.auto, str(tmp_path), is_elsewhere=False, is_for_spark=False) is expected


def test_a_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch, spark: FakeSpark) -> None:
    """Of the job, or of Spark."""
    for name, value in spark.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.setattr(jobs, "find_spec", lambda name: None)
    with pytest.raises(CommandFailed, match=r"spark_audit is missing: pip install 'rock-dmq\[audit\]'"):
        jobs.find_spark()


def test_nothing_of_spark_is_imported_to_start_it() -> None:
    """Finding it is not importing it; nor is the help slow for it."""
    code = (
        "import sys; from dmq.cli.trail import spark; spark.find_spark(); "
        "print([name for name in sys.modules if name.split('.')[0] in ('pyspark', 'spark_audit', 'pyarrow', 'numpy')])"
    )
    if shutil.which("java") is None:
        pytest.skip("no Java")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.stdout == "[]\n", ended.stderr


def test_a_run_takes_a_snapshot_first(daemon: Daemon, spark: FakeSpark, tmp_path: Path) -> None:
    """If somebody answers; if nobody does that is one line, and the end only where it was asked for."""
    trail, into = daemon.data / "trail", tmp_path / "out"
    base = ["audit", "run", *ON_SPARK, "--trail", str(trail), "--out", str(into)]
    found = answer_of(dmq("-a", daemon.address, *base, "-o", "json", env=spark.env))
    assert Path(found["snapshot"]["path"]).is_dir()
    ended = dmq("-a", "127.0.0.1:1", *base, env=spark.env)
    assert (ended.returncode, ended.stderr.count("\n")) == (0, 1)
    assert "no new snapshot" in ended.stderr
    (spark.home / "arguments").unlink()
    ended = dmq("-a", "127.0.0.1:1", *base, "--snapshot", env=spark.env)
    assert (ended.returncode, spark.was_called()) == (6, False)


def test_a_cluster_is_read_back_before_the_job(tmp_path: Path, spark: FakeSpark) -> None:
    """What was found lies beside the outcome, and the job is told where; one that cannot be read ends it before."""
    writer = CellWriter(tmp_path / "trail", "one")
    made: dict[str, Any] = dict.fromkeys(Event._fields)
    made |= {"sequence": 1, "boot": 1, "kind": "FORWARDED", "at_ms": NOW, "attempt": 1, "detail": 0}
    writer.add(Event(**(made | {"topic": "orders", "message_id": b"\0M1"})))
    writer.close()
    out = tmp_path / "out"
    asked = ["audit", "run", *ON_SPARK, "--trail", str(tmp_path / "trail"), "--no-snapshot"]
    asked += ["--out", str(out), "-o", "json"]
    with remoting_peer() as peer:
        peer.topics["orders"] = [HeldQueue([a_stored(offset=0)]), HeldQueue()]
        found = answer_of(dmq(*asked, "--cluster", peer.address, env=spark.env))
        assert found["read_back"] == {"messages": 1, "queues": 2, "unread": 0}
        assert spark.arguments[-2:] == ["--read-back", str(out / "cluster")]
        assert (out / "cluster" / "messages.parquet").exists()
        for wrong in (("--incremental", "--state", "x"), ("--master", "spark://host:7077"), ("--cluster-timeout", "x")):
            assert dmq(*asked, "--cluster", peer.address, *wrong, env=spark.env).returncode == 2
        peer.topics.clear()
        ended = dmq(*asked, "--cluster", peer.address, env=spark.env)
    assert (ended.returncode, "no queue of the cluster was read: topic not found" in ended.stderr) == (6, True)
