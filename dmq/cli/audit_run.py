"""``dmq audit run`` and ``explain``: the jobs of ``spark_audit``, started as what they are, programs of their own.

Nothing of ours imports them, or Spark: where they are is found out without, and what they need is said before Java
starts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.audit_options import ConfigOption, TrailOption, is_elsewhere, trail_of
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import AddressOption, OutputOption, Session, session_of
from dmq.cli.times import After, parse_when
from dmq.units import parse_duration, parse_size

CODES = (
    "Exit codes: 0 clean, 10 late or duplicated beyond the threshold, 20 lost, 30 inconclusive, 40 the trail "
    "contradicts itself, 1 internal error, 2 usage."
)
MEANINGS = {
    0: "clean",
    10: "late or duplicated beyond the threshold",
    20: "lost",
    30: "inconclusive",
    40: "the trail contradicts itself",
}
_MIB = 2**20
_MEMORY_MAX = 4 * 1024 * _MIB
_SNAPSHOT_S = 5.0  # at least; taking one has a deadline of its own
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")
# Java's and Spark's own lines. What is none of these is the job's, and meant for who started it.
_NOISE = re.compile(
    r"WARNING: |Picked up |Using Spark's |Setting default log level|To adjust logging level|:: |\s+at |Warning: "
    r"|\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?:TRACE|DEBUG|INFO|WARN|ERROR) "
)
_LAUNCHER = 'import runpy\n\nrunpy.run_module("spark_audit", run_name="__main__", alter_sys=True)\n'
_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.append = true
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %c{{1}}: %m%n%ex
"""

_DurationOption = Annotated[str | None, typer.Option(metavar="DURATION")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """What starts a job: ``submit`` is spark-submit, ``environment`` what it needs beside ours."""

    submit: Path
    environment: Mapping[str, str]
    package: Path  # the directory of spark_audit


def run(
    ctx: typer.Context,
    *,
    into: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the report, findings and Spark's log.")
    ],
    trail: TrailOption = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory of the daemon.")] = None,
    config: ConfigOption = None,
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="RFC 3339, or epoch ms.")] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="RFC 3339, or epoch ms.")] = None,
    late_after: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Lateness above which a message is late.")
    ] = None,
    late_max: Annotated[int | None, typer.Option(min=0, help="Late messages tolerated.")] = None,
    duplicates_max: Annotated[int | None, typer.Option(min=0, help="Duplicates tolerated.")] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time after the due time before a message counts as lost.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare every message, even where sums agree.")] = False,
    incremental: Annotated[bool, typer.Option("--incremental", help="Read only what is new; needs --state.")] = False,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that keeps state between runs.")] = None,
    snapshot: Annotated[
        bool | None,
        typer.Option("--snapshot/--no-snapshot", help="Have the daemon take a snapshot first.  [default: try]"),
    ] = None,
    master: Annotated[str, typer.Option(metavar="URL", help="Spark's master.")] = "local[*]",
    driver_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Java memory (half, at most 4g).")] = None,
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Spark setting; may be repeated.")] = None,
    address: AddressOption = None,
    output: OutputOption = None,
) -> None:
    """Audit the trail with Spark: was anything lost, late, duplicated? Message by message, with the evidence."""
    session = session_of(ctx, address, output)
    arguments = ["--out", str(into)]
    for name, text in (("--from", since), ("--to", until)):
        arguments += [name, str(_instant_ms(name, text))] if text is not None else []
    for name, text in (("--late-after", late_after), ("--grace", grace)):
        arguments += [name, _duration(name, text)] if text is not None else []
    for name, number in (("--late-max", late_max), ("--duplicates-max", duplicates_max)):
        arguments += [name, str(number)] if number is not None else []
    arguments += ["--exact"] if exact else []
    if incremental != (state is not None):
        raise typer.BadParameter("--incremental and --state go together", param_hint="--incremental")
    if incremental and (since is not None or until is not None):
        why = "it audits the whole trail, and goes with neither --from nor --to"
        raise typer.BadParameter(why, param_hint="--incremental")
    arguments += ["--incremental", "--state", str(state)] if incremental else []
    for each in conf or ():
        if "=" not in each:
            raise typer.BadParameter(f"{out.printable(each)} is no KEY=VALUE", param_hint="--conf")
    memory = _memory(driver_memory)
    where = trail_of(trail, data, config)
    if not is_elsewhere(where) and not Path(where).is_dir():
        raise CommandFailed(f"there is no trail at {out.printable(where)}", ExitCode.NOT_FOUND)
    spark = find_spark()
    log = _log_in(into)
    taken = None if snapshot is False else _snapshot(session, is_wanted=snapshot is True)
    with tempfile.TemporaryDirectory(prefix="dmq-audit-") as scratch:
        command = submit_command(
            spark, Path(scratch), log, master=master, memory=memory, conf=conf or (), trail=where, arguments=arguments
        )
        code = _started(command, spark.environment, log, quiet=session.as_json)
    if code not in MEANINGS:
        typer.echo(f"dmq: the audit failed ({code}); Spark's log is {out.printable(str(log))}", err=True)
        code = code if code == ExitCode.USAGE else ExitCode.FAILURE
    if session.as_json:
        meaning = MEANINGS.get(code, "failed")
        out.show_json({"exit_code": code, "meaning": meaning, "out": str(into), "log": str(log), "snapshot": taken})
    raise typer.Exit(code)


def explain(
    ctx: typer.Context,
    *,
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Message id, as returned to its producer.")],
    trail: TrailOption = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory of the daemon.")] = None,
    config: ConfigOption = None,
    output: OutputOption = None,
) -> None:
    """Tell the story of one message, event by event, and what became of it. Needs no Spark and no Java."""
    where = trail_of(trail, data, config)
    if is_elsewhere(where) or not Path(where).is_dir():
        raise CommandFailed(f"there is no trail at {out.printable(where)}", ExitCode.NOT_FOUND)
    package = _package("spark_audit")
    if find_spec("pyarrow") is None:
        raise CommandFailed("pyarrow is missing: pip install 'rock-dmq[server]'")
    command = [sys.executable, "-m", "spark_audit", "explain", "--trail", where]
    command += ["--json"] if session_of(ctx, output=output).as_json else []
    ended = subprocess.run([*command, "--", message_id], env={**os.environ, **_path_to(package)}, check=False)
    raise typer.Exit(ended.returncode if ended.returncode >= 0 else ExitCode.FAILURE)


# -- what is there -----------------------------------------------------------------------------------------------------


def find_spark() -> Spark:
    """Find the job, Spark and Java, and import none of them; the command ends with what is missing."""
    package = _package("spark_audit")
    home = os.environ.get("SPARK_HOME")
    root = Path(home) if home else _package("pyspark")
    submit = root / "bin" / "spark-submit"
    if not submit.is_file():
        raise CommandFailed(f"there is no Spark in {out.printable(str(root))}: bin/spark-submit is missing")
    java_home = os.environ.get("JAVA_HOME")
    java = Path(java_home) / "bin" / "java" if java_home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f" in JAVA_HOME ({out.printable(java_home)})" if java_home else ""
        raise CommandFailed(f"there is no Java{where}: Spark needs Java 17 or newer")
    environment = {
        "SPARK_HOME": str(root),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        **_path_to(package),
    }
    return Spark(submit=submit, environment=environment, package=package)


def _package(name: str) -> Path:
    """Return the directory of an installed package without importing it."""
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise CommandFailed(f"{name} is missing: pip install 'rock-dmq[audit]'")
    return Path(places[0])


def _path_to(package: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), *([known] if known else [])])}


def _memory(given: str | None) -> str:
    """Return what Java gets: as given, ours or Java's way (``4g``), else half of what there is, at most 4 GiB."""
    if given is not None:
        if re.fullmatch(r"[1-9][0-9]*[kmgtKMGT]", given):
            return given.lower()
        try:
            return f"{max(parse_size(given) // _MIB, 1)}m"
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--driver-memory") from error
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bound = Path("/sys/fs/cgroup/memory.max")  # of a container
    if bound.is_file() and (text := bound.read_text(encoding="ascii").strip()).isdecimal():
        there = min(there, int(text))
    return f"{min(_MEMORY_MAX, there // 2) // _MIB}m"


def _instant_ms(name: str, text: str) -> int:
    try:
        instant = parse_when(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from error
    if isinstance(instant, After):
        raise typer.BadParameter("a time is expected, no distance from now", param_hint=name)
    return instant.epoch_ms


def _duration(name: str, text: str) -> str:
    try:
        return f"{parse_duration(text)}ms"
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from error


def _log_in(into: Path) -> Path:
    try:
        into.mkdir(parents=True, exist_ok=True)
        log = into.resolve() / "spark.log"
        log.write_bytes(b"")
    except OSError as error:
        raise CommandFailed(f"nothing can be written to {out.printable(str(into))}: {error.strerror}") from error
    return log


def _snapshot(session: Session, *, is_wanted: bool) -> dict[str, object] | None:
    """Have the daemon take a snapshot; if it cannot, that is a line, or the end where one is wanted."""
    try:
        with session.connect() as client:
            taken = out.to_plain(client.take_snapshot())
    except CommandFailed as error:
        if is_wanted:
            raise
        typer.echo(f"dmq: no new snapshot, the audit takes those that are there: {error.text}", err=True)
        return None
    typer.echo(f"dmq: snapshot {taken['sequence']} with {taken['entries']} entries", err=True)
    return taken


# -- running it --------------------------------------------------------------------------------------------------------


def submit_command(
    spark: Spark,
    scratch: Path,
    log: Path,
    *,
    master: str,
    memory: str,
    conf: Sequence[str],
    trail: str,
    arguments: Sequence[str],
) -> list[str]:
    """Write what spark-submit reads to ``scratch`` and return its command line."""
    launcher, logging = scratch / "audit.py", scratch / "log4j2.properties"
    launcher.write_text(_LAUNCHER, encoding="utf-8")
    logging.write_text(_LOGGING.format(log=log), encoding="utf-8")
    java_options = [f"-Dlog4j2.configurationFile=file:{logging}"]
    options: list[str] = []
    for each in conf:
        key, _, value = each.partition("=")
        if key == "spark.driver.extraJavaOptions":
            java_options.append(value)
        else:
            options += ["--conf", each]
    if not any(_COLLECTOR.search(each) for each in java_options):  # Java starts with one only
        java_options.append("-XX:+UseParallelGC")
    command = [str(spark.submit), "--master", master, "--driver-memory", memory]
    command += ["--driver-java-options", " ".join(java_options), *options]
    if not master.startswith("local"):
        command += ["--py-files", str(_zipped(spark.package, scratch))]
    return [*command, str(launcher), "run", "--trail", trail, *arguments]


def _zipped(package: Path, scratch: Path) -> Path:
    made = scratch / "spark_audit.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(package.parent))
    return made


def _started(command: Sequence[str], environment: Mapping[str, str], log: Path, *, quiet: bool) -> int:
    """Run the job; what it says goes through, what Java says goes to the log. Return its exit code."""
    with (
        log.open("a", encoding="utf-8") as kept,
        _running(command, {**os.environ, **environment}, stdout=kept if quiet else None) as job,
    ):
        assert job.stderr is not None
        for line in job.stderr:
            kept.write(line)
            kept.flush()
            if not _NOISE.match(line):
                typer.echo(line.rstrip("\n"), err=True)
        return job.wait()


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], *, stdout: IO[str] | None
) -> Iterator[subprocess.Popen[str]]:
    """Start a process; it ends with this block."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                job.terminate()
