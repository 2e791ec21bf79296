"""``dmq demo``: kill the daemon during a run and prove that no message is lost."""

from __future__ import annotations

from typing import Annotated

import typer

from dmq.cli.nouns import single

app = single()


@app.command()
def demo(
    messages: Annotated[int, typer.Option(min=1, help="Number of messages to send.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Longest delay, in seconds.")] = 20.0,
    keep_data: Annotated[bool, typer.Option("--keep-data", help="Keep the store for inspection.")] = False,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Do not kill the daemon.")] = False,
    failover: Annotated[
        bool, typer.Option("--failover", help="Delete the data of the killed daemon; a standby takes over.")
    ] = False,
) -> None:
    """Kill a daemon during a run and check that no message is lost.

    The demo sends delayed messages with the official client. It kills the daemon with SIGKILL, starts it again, and
    counts the deliveries and their times. With --failover a standby takes over from a second copy instead.
    """
    from dmq.demo import run

    raise typer.Exit(run(messages=messages, seconds=seconds, keep_data=keep_data, kill=not no_kill, failover=failover))
