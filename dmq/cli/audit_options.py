"""What the commands on the audit trail have in common: where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmq.cli.errors import CommandFailed, ExitCode

DataOption = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Directory of a stopped daemon, or of a spool's process.")
]
TrailOption = Annotated[
    str | None, typer.Option("--trail", metavar="DIR", help="The trail.  [default: as the daemon is configured]")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar="DMQ_CONFIG", metavar="FILE", help="The daemon's TOML file.")
]


def trail_of(trail: str | None, data: Path | None, config: Path | None) -> str:
    """Return the trail that is meant: the one given, else that of the daemon's configuration; a usage error if off."""
    if trail is not None:
        return trail
    from dmq.config import ConfigError, load

    try:
        found = load({"data": str(data) if data is not None else None}, config_file=config).trail_path
    except ConfigError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    if found is None:
        raise CommandFailed("the trail is off in the configuration; name one with --trail", ExitCode.USAGE)
    return str(found)


def is_elsewhere(trail: str) -> bool:
    """Say whether a trail lies in a file system of its own, such as ``s3a://``, which only Spark can read."""
    return "://" in trail
