"""Start of Spark for the jobs of ``spark_audit``, which are separate programs.

No module of this package imports them or Spark. They are located without an import, and missing parts are reported
before Java starts.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import typer

from broker_adapter.runtime.extras import command
from dmq.cli.output.errors import CommandFailed, refusing
from dmq.config.units import parse_size

MEANINGS = {
    0: "clean",
    10: "late or duplicated beyond the threshold",
    20: "lost",
    30: "inconclusive",
    40: "the trail contradicts itself",
}
_MIB = 2**20
_MEMORY_MAX = 4 * 1024 * _MIB
# Java's collector and compilers by the bytes of a trail. The second compiler uses a third to a half of two processors.
# An audit of one or two million events ends before that pays off; a larger one compiles only the hottest methods.
# The first bound is the job's own for a small trail (``SMALL_BYTES``).
_HOTTEST = (
    "Tier4InvocationThreshold=100000",
    "Tier4MinInvocationThreshold=20000",
    "Tier4CompileThreshold=300000",
    "Tier4BackEdgeThreshold=800000",
)
_JAVA: tuple[tuple[float, tuple[str, ...]], ...] = (
    (500_000, ("TieredStopAtLevel=1", "+UseSerialGC")),
    (25_000_000, ("TieredStopAtLevel=1", "+UseParallelGC")),
    (math.inf, ("+UseParallelGC", *_HOTTEST)),
)
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")
# Lines of Java and Spark. All other lines are of the job, and are meant for the user.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """Launcher of a job: ``submit`` is spark-submit; ``environment`` are the variables that it needs in addition."""

    submit: Path
    environment: Mapping[str, str]
    package: Path  # the directory of spark_audit


def find_spark() -> Spark:
    """Locate the job, Spark and Java without importing them; the command ends with the name of a missing one."""
    package = package_folder("spark_audit")
    home = os.environ.get("SPARK_HOME")
    root = Path(home) if home else package_folder("pyspark")
    submit = root / "bin" / "spark-submit"
    if not submit.is_file():
        raise CommandFailed(f"there is no Spark in {root}: bin/spark-submit is missing")
    java_home = os.environ.get("JAVA_HOME")
    java = Path(java_home) / "bin" / "java" if java_home else shutil.which("java")
    if java is None or not Path(java).is_file():
        where = f" in JAVA_HOME ({java_home})" if java_home else ""
        raise CommandFailed(f"there is no Java{where}: Spark needs Java 17 or newer")
    environment = {
        "SPARK_HOME": str(root),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        **path_to(package),
    }
    return Spark(submit=submit, environment=environment, package=package)


def package_folder(name: str) -> Path:
    """Return the directory of an installed package without importing it."""
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise CommandFailed(f"{name} is missing: {command('audit')}")
    return Path(places[0])


def path_to(package: Path) -> dict[str, str]:
    """Return the environment in which another Python finds ``package``."""
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), *([known] if known else [])])}


def java_memory(given: str | None) -> str:
    """Return the memory for Java: the given size in either notation (``4g``), else half of the available, at most 4
    GiB.
    """
    if given is not None:
        if re.fullmatch(r"[1-9][0-9]*[kmgtKMGT]", given):
            return given.lower()
        with refusing("--driver-memory", given):
            return f"{max(parse_size(given) // _MIB, 1)}m"
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bound = Path("/sys/fs/cgroup/memory.max")  # limit of a container
    if bound.is_file() and (text := bound.read_text(encoding="ascii").strip()).isdecimal():
        there = min(there, int(text))
    return f"{min(_MEMORY_MAX, there // 2) // _MIB}m"


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
    """Write the files of spark-submit to ``scratch`` and return its command line."""
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
    if not any(_COLLECTOR.search(each) for each in java_options):  # Java accepts only one
        size = _bytes_of(trail)
        java_options += [f"-XX:{each}" for each in next(options for most, options in _JAVA if size <= most)]
    command = [str(spark.submit), "--master", master, "--driver-memory", memory]
    command += ["--driver-java-options", " ".join(java_options), *options]
    if not master.startswith("local"):
        command += ["--py-files", str(_zipped(spark.package, scratch))]
    return [*command, str(launcher), "run", "--trail", trail, *arguments]


def _bytes_of(trail: str) -> float:
    """Return the size of a local trail; it is unknown for any other before Java starts."""
    folder = Path(trail)
    return sum(file.stat().st_size for file in folder.rglob("*.parquet")) if folder.is_dir() else math.inf


def _zipped(package: Path, scratch: Path) -> Path:
    made = scratch / "spark_audit.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(package.parent))
    return made


def run_job(command: Sequence[str], environment: Mapping[str, str], log: Path, *, quiet: bool) -> int:
    """Run the job. Its output passes through; the lines of Java go to the log. Return its exit code."""
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
    """Start a process, and end it with this block."""
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
