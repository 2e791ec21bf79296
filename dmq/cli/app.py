"""The root of the command line: global options, the commands, and what becomes of errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dmq.cli import (
    acl,
    audit,
    backoff,
    client,
    clock,
    dead,
    demo,
    group,
    msg,
    quota,
    retry,
    serve,
    spool,
    status,
    store,
    topic,
)
from dmq.cli.errors import CommandFailed, ExitCode, describe, wants_json
from dmq.cli.options import (
    AccessKeyOption,
    Output,
    OutputOption,
    RootAddressOption,
    SecretFileOption,
    Session,
    TimeoutOption,
)
from dmq.errors import DmqError


class Group(TyperGroup):
    """Ends every error as one line on stderr and an exit code; never as a traceback."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # vendored base
        """Show the help, and call it a usage error, where a command is missing."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(ExitCode.USAGE)
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        """Run and exit the process, whatever ``standalone_mode`` is asked for."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            code = super().main(arguments, **extra)
        except Exception as error:
            if os.environ.get("DMQ_DEBUG"):
                raise
            text, code = _told(error)
            typer.echo(describe(text, code, as_json=wants_json(arguments)), err=True)
        sys.exit(code if isinstance(code, int) else ExitCode.OK)


def _told(error: Exception) -> tuple[str, int]:
    if isinstance(error, CommandFailed):
        return error.text, error.exit_code
    if isinstance(error, typer.TyperException):  # of the parser
        context = getattr(error, "ctx", None)
        hint = f"; see '{context.command_path} --help'" if context is not None else ""
        text = error.format_message().removesuffix(".").replace(": Value error, ", ": ")  # its validator's prefix
        return _one_line(text) + hint, error.exit_code
    if isinstance(error, typer.Abort):
        return "aborted", ExitCode.FAILURE
    if isinstance(error, DmqError):
        return _one_line(str(error)), ExitCode.FAILURE
    if isinstance(error, BrokenPipeError):
        # Whoever read our output is gone; writing at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "the output was closed", ExitCode.FAILURE
    if isinstance(error, OSError):
        return _one_line(str(error)), ExitCode.FAILURE
    text = _one_line(f"unexpected {type(error).__name__}: {error}")
    return f"{text} (DMQ_DEBUG=1 shows where)", ExitCode.FAILURE


def _one_line(text: str) -> str:
    return " ".join(text.split())


class ClockGroup(Group):
    """Shows the clock where nothing else is asked for."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # vendored base
        """Take no command for ``show``."""
        return super().parse_args(ctx, args or ["show"])


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dmq {version('rock-dmq')}")
        raise typer.Exit


# Plain help: with rich it takes 60 ms more and is cut to 80 columns in a pipe.
app = typer.Typer(
    cls=Group,
    name="dmq",
    help="Rock-DMQ, a delay and retry service for message queues.",
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 damaged, 5 not allowed, 6 unavailable.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
def _root(
    ctx: typer.Context,
    *,
    address: RootAddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
    access_key: AccessKeyOption = None,
    secret_file: SecretFileOption = None,
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    ctx.obj = Session(access_key=access_key or "", secret_file=secret_file).but(
        address, output or Output.TABLE, timeout
    )


app.command()(serve.serve)
app.command()(demo.demo)
app.command()(status.status)

_topic = typer.Typer(cls=Group, help="Topics.", rich_markup_mode=None)
_topic.command("ls")(topic.ls)
_topic.command("show")(topic.show)
_topic.command("create")(topic.create)
_topic.command("set")(topic.set_)
_topic.command("rm")(topic.rm)
app.add_typer(_topic, name="topic")

_msg = typer.Typer(cls=Group, help="Messages.", rich_markup_mode=None)
_msg.command("send")(msg.send)
_msg.command("get")(msg.get)
_msg.command("ls")(msg.ls)
_msg.command("recall")(msg.recall)
_msg.command("peek")(msg.peek)
_msg.command("count")(msg.count)
app.add_typer(_msg, name="msg")

_group = typer.Typer(cls=Group, help="Consumer groups and their retry policies.", rich_markup_mode=None)
_group.command("ls")(group.ls)
_group.command("show")(group.show)
_group.command("set-policy")(group.set_policy)
_group.command("create")(group.create)
_group.command("reset")(group.reset)
_group.command("rm")(group.rm)
app.add_typer(_group, name="group")

_retry = typer.Typer(cls=Group, help="Waiting retries.", rich_markup_mode=None)
_retry.command("ls")(retry.ls)
_retry.command("stats")(retry.stats)
_retry.command("run-now")(retry.run_now)
_retry.command("to-dead")(retry.to_dead)
app.add_typer(_retry, name="retry")

_dead = typer.Typer(cls=Group, help="Dead letters.", rich_markup_mode=None)
_dead.command("groups")(dead.groups)
_dead.command("ls")(dead.ls)
_dead.command("show")(dead.show)
_dead.command("export")(dead.export)
_dead.command("redrive")(dead.redrive)
_dead.command("purge")(dead.purge)
_dead.command("jobs")(dead.jobs)
_dead.command("stop")(dead.stop)
app.add_typer(_dead, name="dead")

_client = typer.Typer(cls=Group, help="Connected clients.", rich_markup_mode=None)
_client.command("ls")(client.ls)
_client.command("stack")(client.stack)
_client.command("verify")(client.verify)
app.add_typer(_client, name="client")

_clock = typer.Typer(cls=ClockGroup, help="The clock of the daemon's host.", rich_markup_mode=None)
_clock.command("show")(clock.show)
_clock.command("accept")(clock.accept)
app.add_typer(_clock, name="clock")

_quota = typer.Typer(cls=Group, help="Quotas of access keys and client addresses.", rich_markup_mode=None)
_quota.command("ls")(quota.ls)
_quota.command("set")(quota.set_)
_quota.command("unset")(quota.unset)
app.add_typer(_quota, name="quota")

_backoff = typer.Typer(cls=Group, help="Preview a retry policy; needs no daemon.", rich_markup_mode=None)
_backoff.command("show")(backoff.show)
_backoff.command("simulate")(backoff.simulate)
app.add_typer(_backoff, name="backoff")

app.add_typer(spool.mount(Group), name="spool")

app.add_typer(audit.mount(Group), name="audit")

app.add_typer(acl.mount(Group), name="acl")

app.add_typer(store.mount(Group), name="store")
