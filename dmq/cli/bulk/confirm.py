"""Leave for what changes much.

What is meant by a filter or as a whole is counted and asked about; what is named one by one, and what another command
takes back, is not. Nobody is asked about nothing, and a dry run shows the same counts. Scripts answer with ``--yes``.
"""

from __future__ import annotations

import sys

import typer

from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.output import printable


def confirm(what: str, *, yes: bool) -> None:
    """Go on if the command line says ``--yes`` or a person at the terminal does; end the command otherwise."""
    if yes:
        return
    if not is_terminal():
        raise CommandFailed(f"{what}; there is no terminal to ask at; use --yes", ExitCode.USAGE)
    # Not by typer's own: that writes a part of its prompt to stdout, where the answer of the command belongs.
    typer.echo(f"dmq: {printable(what)}. Go on? [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise typer.Abort


def is_terminal() -> bool:
    """Say whether somebody can be asked: sees the question, and can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()
