"""The commands of ``dmq``, built once in a process that runs many of them, or forks into them.

Building them and what their options are read with takes longer than most commands do.
"""

from __future__ import annotations

from functools import cache

import typer.main
import typer.testing

from dmq.cli.app import app


@cache
def keep() -> None:
    """Build each command no more than once from now on, and the root now."""
    typer.main.get_command = cache(typer.main.get_command)
    typer.testing._get_command = typer.main.get_command
    typer.main.get_command(app)


def warm(name: str) -> None:
    """Build a command, and what reads its options, before it is run."""
    keep()
    command = typer.main.get_command(app)
    for each in (command, command.commands[name]):  # type: ignore[attr-defined]  # it is the root
        for option in each.params:
            option.get_runtime_param()
