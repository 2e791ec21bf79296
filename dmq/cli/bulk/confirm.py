"""Confirmation of large changes.

A selection by filter, or of everything, is counted and needs confirmation. There is no prompt if items are named one by
one, if the change can be undone, or if nothing matches. A dry run shows the same counts. Scripts pass ``--yes``.
"""

from __future__ import annotations

import sys

import typer

from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.output import printable


def confirm(what: str, *, yes: bool) -> None:
    """Return if ``--yes`` is set or the user at the terminal agrees; otherwise end the command."""
    if yes:
        return
    if not is_terminal():
        raise CommandFailed(f"{what}; there is no terminal for a confirmation; use --yes", ExitCode.USAGE)
    # Not typer's prompt: it writes a part to stdout, which is reserved for the command's answer.
    typer.echo(f"dmq: {printable(what)}. Continue? [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise typer.Abort


def is_terminal() -> bool:
    """Return True if the user can see a prompt and answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()
