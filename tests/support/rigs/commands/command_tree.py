"""The commands of ``dmq``, built once in a process that runs many of them, or forks into them.

Building them and what their options are read with takes longer than most commands do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import typer.main
import typer.testing

from dmq.cli.app import app


@cache
def keep() -> None:
    """Build each command no more than once from now on, and the root now."""
    typer.main.get_command = cache(typer.main.get_command)
    typer.testing._get_command = typer.main.get_command  # type: ignore[attr-defined]  # what it imported by that name
    typer.main.get_command(app)


def warm() -> None:
    """Build all commands, and what reads their options, before one of them is run."""
    keep()
    _warm(typer.main.get_command(app))


def _warm(command: Any) -> None:  # noqa: ANN401 - of typer's vendored classes
    for option in command.get_params(command.context_class(command, info_name=command.name)):
        option.get_runtime_param()
    for each in getattr(command, "commands", {}).values():
        _warm(each)
