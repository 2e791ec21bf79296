"""Selection of the audit engine: DuckDB in a local process, or Spark. The rules and the outcome are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from dmq.cli.output.errors import CommandFailed, refused
from dmq.cli.trail.spark import package_folder, path_to

# Events of a local trail: DuckDB needs about 30 s of a processor, and 1 GB of memory, for each 100 MB.
AUTO_MAX_BYTES = 8 * 2**30


class EngineOption(StrEnum):
    """Values of ``--engine``."""

    auto = "auto"
    duckdb = "duckdb"
    spark = "spark"


def chosen(asked: EngineOption, trail: str, *, is_elsewhere: bool, is_for_spark: bool) -> EngineOption:
    """Return the engine of a run; the command ends if it is not installed or cannot read the trail.

    ``auto`` selects DuckDB if it is installed, the trail is on this machine and holds at most 8 GiB, and no option
    needs Spark (``is_for_spark``). A larger trail goes to Spark if that is installed.
    """
    has_duckdb = find_spec("duckdb") is not None
    if asked is EngineOption.duckdb:
        if is_elsewhere:
            raise refused("DuckDB reads only trails on this machine: use --engine spark", "--trail", given=trail)
        if is_for_spark:
            raise refused(
                "--master, --driver-memory and --conf apply to Spark only: use --engine spark",
                "--engine",
                given="duckdb",
            )
        if not has_duckdb:
            raise CommandFailed("duckdb is missing: pip install 'rock-dmq[audit-local]'")
    if asked is not EngineOption.auto:
        return asked
    if is_elsewhere or is_for_spark:
        return EngineOption.spark
    has_spark = "SPARK_HOME" in os.environ or find_spec("pyspark") is not None
    if not has_duckdb and not has_spark:
        raise CommandFailed("neither DuckDB nor Spark is installed: pip install 'rock-dmq[audit-local]'")
    is_long = has_spark and _event_bytes(Path(trail)) > AUTO_MAX_BYTES
    return EngineOption.duckdb if has_duckdb and not is_long else EngineOption.spark


def run_here(trail: str, arguments: Sequence[str], *, quiet: bool) -> int:
    """Audit a trail with DuckDB, in a separate process; its output passes through. Return its exit code."""
    command = [sys.executable, "-m", "spark_audit", "run", "--engine", "duckdb", "--trail", trail, *arguments]
    environment = {**os.environ, **path_to(package_folder("spark_audit"))}
    ended = subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL if quiet else None)
    return ended.returncode


def _event_bytes(trail: Path) -> int:
    return sum(path.stat().st_size for path in (trail / "events").rglob("*.parquet"))
