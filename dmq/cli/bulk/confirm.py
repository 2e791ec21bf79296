"""Confirmation of large changes.

A selection by filter, or of everything, is counted and needs confirmation. There is no prompt if items are named one by
one, if the change can be undone, or if nothing matches. A dry run shows the same counts. Scripts pass ``--yes``.
"""

from __future__ import annotations

import sys

import typer

from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.output import printable


def confirm(what: str, *, yes: bool, name: str = "") -> None:
    """Return if ``--yes`` is set or the user at the terminal agrees; otherwise end the command.

    With ``name``, for very large changes, the user has to type that name.
    """
    if yes:
        return
    if not is_terminal():
        raise CommandFailed(f"{what}; there is no terminal for a confirmation; use --yes", ExitCode.USAGE)
    # Not typer's prompt: it writes a part to stdout, which is reserved for the command's answer.
    prompt = f"Type {printable(name)} to continue:" if name else "Continue? [y/N]"
    typer.echo(f"dmq: {printable(what)}. {prompt} ", nl=False, err=True)
    answer = sys.stdin.readline().strip()
    if answer != name if name else answer.lower() not in {"y", "yes"}:
        raise typer.Abort


def is_terminal() -> bool:
    """Return True if the user can see a prompt and answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()
