"""``dmq demo``: kill the daemon half-way through a run and see that nothing is lost."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    messages: Annotated[int, typer.Option(min=1, help="How many messages to send.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Longest delay of a message.")] = 20.0,
    keep_data: Annotated[bool, typer.Option("--keep-data", help="Leave the store for a look at it.")] = False,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Let the daemon live.")] = False,
) -> None:
    """Kill a daemon half-way and see that nothing is lost.

    Sends delayed messages with the official client, kills the daemon with SIGKILL and starts it again, and counts what
    arrives, when.
    """
    from dmq.demo import run

    raise typer.Exit(run(messages=messages, seconds=seconds, keep_data=keep_data, kill=not no_kill))
