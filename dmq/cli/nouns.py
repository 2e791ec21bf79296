"""Commands of ``dmq`` by name, with their modules, which are imported when the command runs."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from dmq.cli.output.errors import ExitCode

# In the order of the help, which shows these lines without importing the modules.
NOUNS = {
    "serve": "Run the daemon until SIGTERM or Ctrl-C.",
    "http-api": "Run the HTTP API for a daemon until SIGTERM or Ctrl-C.",
    "config": "Check and show the settings of the daemon; needs no daemon.",
    "console": "Serve the console until SIGTERM or Ctrl-C.",
    "demo": "Kill a daemon during a run and check that no message is lost.",
    "status": "Show the state of the daemon; exit with 6 unless it is serving.",
    "top": "Show the daemon live: rates, due messages, lateness, topics, groups.",
    "check": "Check one figure of the daemon for Nagios and compatible monitors.",
    "ledger": "Show message counts by state; exit with 4 if they do not balance.",
    "find": "Find messages in all topics by id, key or indexed property.",
    "tail": "Print new messages of a topic as they become visible.",
    "topic": "Topics.",
    "msg": "Messages.",
    "cron": "Recurring messages.",
    "group": "Consumer groups and their retry policies.",
    "retry": "Waiting retries.",
    "dead": "Dead letters.",
    "client": "Connected clients.",
    "clock": "The clock of the daemon's host.",
    "activity": "Changes and body readings by operators: access key, time and reason.",
    "quota": "Quotas of access keys and client addresses.",
    "backoff": "Preview a retry policy, given by options or by a group.",
    "broker": "Brokers, queues and groups of a RocketMQ cluster; needs no daemon.",
    "spool": "Spools of the producer hook on this host; needs no daemon.",
    "replay": "Send messages of the inner topic to the daemon again.",
    "audit": "Audit trail: the events and the result of every message.",
    "context": "Named daemons: addresses, TLS settings and access keys.",
    "acl": "Access keys and their permissions.",
    "store": "Back up, check and salvage the store.",
    "replica": "The second copy of the store: state, check, promotion and restore.",
}

# The package of ``dmq.cli`` with the module of each command.
_HOMES = {
    "service": "serve http-api config console demo status top check clock spool store replica",
    "trail": "ledger activity audit",
    "messages": "find tail msg cron retry dead backoff broker replay",
    "objects": "topic group client quota context acl",
}


def module_of(name: str) -> str:
    """Return the full name of the module of the command ``name``."""
    package = next(package for package, names in _HOMES.items() if name in names.split())
    return f"dmq.cli.{package}.{name.replace('-', '_')}"


class CommandGroup(TyperGroup):
    """Command that only has subcommands."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # vendored base
        """Show the help and end with a usage error if the subcommand is missing."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(ExitCode.USAGE)
        return super().parse_args(ctx, args)


def noun(name: str, group: type[TyperGroup] = CommandGroup) -> typer.Typer:
    """Return the group of commands of a noun, to which its module adds its commands."""
    return typer.Typer(name=name, cls=group, help=NOUNS[name], add_completion=False, rich_markup_mode=None)


def single() -> typer.Typer:
    """Return the application of a module with a single command."""
    return typer.Typer(add_completion=False, rich_markup_mode=None)
