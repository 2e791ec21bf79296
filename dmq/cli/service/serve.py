"""``dmq serve``: run the daemon in the foreground."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.nouns import single
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.session.options import OptionGroup, with_options

if TYPE_CHECKING:
    from dmq.config.settings import ConfigError

app = single()


def _key(text: str, metavar: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=text, metavar=metavar, show_default=False)
    return option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(OptionGroup):
    """Options of ``dmq serve``: the file of settings, and settings."""

    config: Annotated[
        Path | None, typer.Option(help="TOML file; ./dmq.toml if it exists.", envvar="DMQ_CONFIG", metavar="FILE")
    ] = None
    data: Annotated[str | None, _key("Directory of the store (./dmq-data).", "DIR")] = None
    must_exist: Annotated[
        bool | None,
        typer.Option("--must-exist", help="Refuse to start without an existing store.", show_default=False),
    ] = None
    listen: Annotated[str | None, _key("Address for clients (127.0.0.1:8081).", "HOST:PORT")] = None
    metrics_listen: Annotated[str | None, _key("Address of /metrics, or off (127.0.0.1:9464).", "HOST:PORT")] = None
    http_api: Annotated[str | None, _key("Address of the HTTP API, or off (off).", "HOST:PORT")] = None
    processes: Annotated[str | None, _key("Number of front processes, or auto; 1: no fronts (1).", "N")] = None
    broker: Annotated[
        str | None, _key("Broker that holds the queues: embedded, rocketmq or rocketmq-remoting (embedded).", "BROKER")
    ] = None
    endpoints: Annotated[str | None, _key("Proxies of the cluster, with --broker rocketmq.", "HOST:PORT;...")] = None
    namesrv: Annotated[
        str | None, _key("Name servers of the cluster, with --broker rocketmq-remoting.", "HOST:PORT;...")
    ] = None
    away: Annotated[
        str | None, _key("Treatment of sends while the cluster is unavailable: accept or refuse (accept).", "WORD")
    ] = None
    embedded_topics: Annotated[
        str | None, _key("In front of a cluster: topics of the embedded broker, such as a;b*.", "TOPICS")
    ] = None
    inner_topic: Annotated[
        str | None, _key("Topic of the cluster from which delayed messages are fetched, or off (off).", "TOPIC")
    ] = None
    durability: Annotated[
        str | None, _key("disk: messages survive a power loss; process: only a kill of the daemon (disk).", "MODE")
    ] = None
    delay_levels: Annotated[str | None, _key("Delay level table, such as '1s 5s 10s'.", "TABLE")] = None
    delay_max: Annotated[str | None, _key("Longest accepted delay, or none (none).", "DURATION")] = None
    queues_per_topic: Annotated[str | None, _key("Queues of a new topic (8).", "N")] = None
    group_start: Annotated[
        str | None, _key("Start position of a new group: earliest or latest (earliest).", "PLACE")
    ] = None
    idempotency_window: Annotated[
        str | None, _key("Minimum time for which message ids are remembered (15m).", "DURATION")
    ] = None
    disk_low_water_bytes: Annotated[str | None, _key("Refuse sends below this free space (auto).", "SIZE")] = None
    trail: Annotated[str | None, _key("Directory of the audit trail, auto or off (auto: DATA/trail).", "DIR")] = None
    trail_every: Annotated[str | None, _key("Interval of writes to the audit trail (1m).", "DURATION")] = None
    replica: Annotated[str | None, _key("Second copy: off, async or sync (off).", "MODE")] = None
    replica_url: Annotated[
        str | None, _key("Place of the second copy: s3://, gs://, az://BUCKET/PREFIX, file:///PATH.", "URL")
    ] = None
    standby: Annotated[
        bool | None,
        typer.Option(
            "--standby", help="Never start an empty second copy; wait for the primary to start it.", show_default=False
        ),
    ] = None
    shutdown_grace: Annotated[str | None, _key("Time limit of each part of a shutdown (10s).", "DURATION")] = None
    acl: Annotated[str | None, _key("File of access keys, or off (off).", "FILE")] = None
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Listen on external addresses without access keys and TLS.", show_default=False
        ),
    ] = None
    broker_name: Annotated[str | None, _key("Broker name shown to clients (rock-dmq).", "NAME")] = None
    log_level: Annotated[str | None, _key("debug, info, warning or error (info).", "LEVEL")] = None
    log_format: Annotated[str | None, _key("auto, json or console (auto).", "FORMAT")] = None

    def flags(self) -> dict[str, object]:
        """Return the settings by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "config"}


@app.command()
@with_options
def serve(*, settings: ServeOptions) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Every setting is also a variable of the environment (DMQ_DELAY_MAX) and a key of the TOML file (delay_max). A
    flag overrides the environment, and the environment overrides the file.
    """
    from dmq.config.settings import ConfigError, load_with_origins

    try:
        config, sources = load_with_origins(settings.flags(), config_file=settings.config)
    except ConfigError as error:
        raise _refused(error) from error
    from dmq.daemon import run

    raise typer.Exit(run(config, sources))


def _refused(error: ConfigError) -> Exception:
    """Return the error of an invalid configuration: a log line for programs, one line per fault for people."""
    from dmq.runtime.log import configure, is_for_people

    if is_for_people(error.log_format, sys.stderr):
        return CommandFailed(str(error), ExitCode.USAGE)
    from broker_adapter.runtime.clock import SystemClock

    configure("info", "json", SystemClock())
    import structlog

    structlog.get_logger("dmq.config.settings").critical(
        "start_failed", error="; ".join(error.problems), code=ExitCode.USAGE
    )
    return typer.Exit(ExitCode.USAGE)
