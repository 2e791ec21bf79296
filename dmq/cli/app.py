"""Root of the command line: global options, the list of commands, and error handling."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from broker_adapter.runtime.extras import ExtraMissing, command
from dmq.cli.nouns import NOUNS, CommandGroup, module_of
from dmq.cli.output.errors import CommandFailed, ExitCode, describe, wants_json
from dmq.cli.session.options import (
    AddressOption,
    ConnectionOptions,
    ContextOption,
    JsonOption,
    OutputOption,
    Session,
    TimeoutOption,
    with_options,
)
from dmq.config.contexts import ContextError
from dmq.errors import DmqError

# All others are in the extra "server".
_EXTRA_OF = {"rocketmq": "demo", "pyspark": "audit", "spark_audit": "audit", "starlette": "http", "uvicorn": "http"}


class _Commands(Mapping[str, Any]):  # of typer's vendored class of commands
    """Commands by name. Looking one up imports its module."""

    def __getitem__(self, name: str) -> object:
        if name not in NOUNS:
            raise KeyError(name)
        return typer.main.get_command(import_module(module_of(name)).app)

    def __iter__(self) -> Iterator[str]:
        return iter(NOUNS)

    def __len__(self) -> int:
        return len(NOUNS)


class RootCommand(CommandGroup):
    """Root command. Import the module of the selected command, and report every error as one line with an exit code."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is ever added

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # noqa: ARG002 - vendored base
        """Return the names of the commands without importing their modules."""
        return list(NOUNS)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401, ARG002
        """Show the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(NOUNS.items()))

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        """Run the command and exit the process, even if ``standalone_mode`` is off."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        if sys.stdout is None:  # stdout was closed before the start: the answer is discarded
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - it stays open to the end
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
    if isinstance(error, typer.TyperException):  # an error of the parser
        context = getattr(error, "ctx", None)
        hint = f"; see '{context.command_path} --help'" if context is not None else ""
        text = error.format_message().removesuffix(".").replace(": Value error, ", ": ")  # the validator's prefix
        return _one_line(text) + hint, error.exit_code
    if isinstance(error, typer.Abort):
        return "aborted", ExitCode.FAILURE
    if isinstance(error, ModuleNotFoundError) and (missing := _missing(error)):
        return missing, ExitCode.FAILURE
    if isinstance(error, ContextError):
        return _one_line(str(error)), ExitCode.USAGE
    if isinstance(error, UnicodeEncodeError):
        return _no_unicode(error.object), ExitCode.USAGE
    if isinstance(error, DmqError):
        return _one_line(str(error)), ExitCode.FAILURE
    if isinstance(error, BrokenPipeError):
        # The reader of our output is gone; another write at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "the output was closed", ExitCode.FAILURE
    if isinstance(error, OSError):
        return _one_line(str(error)), ExitCode.FAILURE
    text = _one_line(f"unexpected {type(error).__name__}: {error}")
    return f"{text} (DMQ_DEBUG=1 shows where)", ExitCode.FAILURE


def _no_unicode(text: str) -> str:
    """Return the name of the variable with invalid UTF-8, whose value may be secret; otherwise quote the argument."""
    for name, value in sorted(os.environ.items()):
        if name.startswith("DMQ_") and not value.isascii() and (value in text or text in value):
            return f"{name} is not a string in UTF-8"
    return f"an argument is not UTF-8 text: {text!r:.80}"


def _missing(error: ModuleNotFoundError) -> str:
    """Return the extra that installs the missing module; empty for a module of this project."""
    if isinstance(error, ExtraMissing):
        return str(error)
    name = (error.name or "").partition(".")[0]
    if name in {"", "dmq", "retry", "broker_adapter"}:
        return ""
    return f"this command needs {name}, which is missing: {command(_EXTRA_OF.get(name, 'server'))}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"dmq {version('rock-dmq')}")
        raise typer.Exit


# Plain help: with rich it needs 60 ms more and is cut to 80 columns in a pipe.
app = typer.Typer(
    cls=RootCommand,
    name="dmq",
    help="Rock-DMQ, a delay and retry service for message queues.",
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 damaged, 5 not allowed, 6 unavailable, 7 partial.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
@with_options
def _root(
    ctx: typer.Context,
    *,
    address: AddressOption = None,
    context: ContextOption = None,
    output: OutputOption = None,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    given: ConnectionOptions,
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    ctx.obj = Session(given=given.context()).but(address, output, timeout, context, json=json)
