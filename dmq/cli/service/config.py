"""``dmq config``: the effective settings of ``dmq serve``, from the same flags, variables and file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.service.serve import with_settings
from dmq.cli.session.options import Session, with_output

if TYPE_CHECKING:
    from dmq.config.settings import DaemonConfig

app = noun("config")

Given = tuple[Mapping[str, object], Path | None]  # flags, and the file


@app.command()
@with_output
@with_settings
def check(session: Session, given: Given) -> None:
    """Check the settings and the addresses of the cluster.

    No daemon is started. The exit code is 2 for an invalid setting and 1 for any other problem.
    """
    config, _ = _loaded(given)
    from broker_adapter.runtime.clock import SystemClock
    from dmq.daemon.checks import cluster_report, problems_of
    from dmq.store.files.cell import holder_of

    clock = SystemClock()
    cluster, wrong = cluster_report(config, clock)
    problems, holder = [*problems_of(config, clock), *wrong], holder_of(config.data)
    if session.as_json:
        out.show_json({"is_good": not problems, "problems": problems, "pid": holder, "cluster": cluster})
    else:
        if holder is not None:
            typer.echo(f"a daemon runs on {config.data} (pid {holder}): its ports are not checked", err=True)
        for line in cluster:
            typer.echo(line)
        typer.echo("\n".join(problems) or "a daemon can start with these settings")
    if problems:
        raise typer.Exit(ExitCode.FAILURE)


@app.command()
@with_output
@with_settings
def show(
    session: Session,
    given: Given,
    *,
    source: Annotated[bool, typer.Option("--source", help="Show the source of each value.")] = False,
) -> None:
    """Show every setting in the format of the file, with masked secrets."""
    config, origins = _loaded(given)
    values = config.shown()
    if session.as_json:
        out.show_json({key: {"value": value, "source": origins[key]} for key, value in values.items()})
        return
    rows = [(key, str(value), origins[key]) for key, value in values.items()]
    columns = ("SETTING", "VALUE", "SOURCE")
    out.show_table(*((columns, rows) if source else (columns[:2], [row[:2] for row in rows])))


def _loaded(given: Given) -> tuple[DaemonConfig, dict[str, str]]:
    from dmq.config.settings import ConfigError, load_with_origins

    flags, file = given
    try:
        return load_with_origins(flags, config_file=file)
    except ConfigError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
