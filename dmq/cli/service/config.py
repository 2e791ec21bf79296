"""``dmq config``: the effective settings of ``dmq serve``, from the same flags, variables and file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.service.serve import ServeOptions
from dmq.cli.session.options import Session, with_output

if TYPE_CHECKING:
    from dmq.config.settings import DaemonConfig

app = noun("config")


@app.command()
@with_output
def check(session: Session, *, settings: ServeOptions) -> None:
    """Check the settings and the addresses of the cluster.

    No daemon is started. The exit code is 2 for an invalid setting and 1 for any other problem.
    """
    config, _ = _loaded(settings)
    from broker_adapter.runtime.clock import SystemClock
    from dmq.daemon import checks
    from dmq.store.files.cell import holder_of

    clock = SystemClock()
    cluster, wrong = checks.cluster_report(config, clock)
    problems, holder = [*checks.problems_of(config, clock), *wrong], holder_of(config.data)
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
def show(
    session: Session,
    *,
    source: Annotated[bool, typer.Option("--source", help="Show the source of each value.")] = False,
    settings: ServeOptions,
) -> None:
    """Show every setting in the format of the file, with masked secrets."""
    config, origins = _loaded(settings)
    values = config.shown()
    plain = {key: {"value": value, "source": origins[key]} for key, value in values.items()}
    columns = 3 if source else 2
    rows = ((key, str(value), origins[key])[:columns] for key, value in values.items())
    session.show_table(plain, ("SETTING", "VALUE", "SOURCE")[:columns], rows)


def _loaded(settings: ServeOptions) -> tuple[DaemonConfig, dict[str, str]]:
    from dmq.config.settings import ConfigError, load_with_origins

    try:
        return load_with_origins(settings.flags(), config_file=settings.config)
    except ConfigError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
