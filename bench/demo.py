"""``make demo-rocketmq``: the demo with a real Apache RocketMQ behind the daemon, both killed half-way.

It is started from Maven's artifacts, as the bench starts it, and ends with the demo.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.rocketmq import VERSION, PeerMissing, RocketMQ, artifacts
from dmq.demo.program import DemoCluster, run_demo

_TOPIC, _GROUP = "demo", "demo-consumers"
_HEAP_MB = 512
_INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    messages: Annotated[int, typer.Option(min=1, help="Number of messages to send.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Longest delay, in seconds.")] = 20.0,
    keep_data: Annotated[bool, typer.Option("--keep-data", help="Keep the daemon's store for inspection.")] = False,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Kill neither the daemon nor the broker.")] = False,
) -> None:
    """Kill a daemon and the Apache RocketMQ broker behind it half-way, and see that nothing is lost.

    Exit with 0, or with 1 if a message was lost or early, or if the demo could not run.
    """
    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    say(f"starting Apache RocketMQ {VERSION}, a name server and a broker with its proxy")
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # CI systems send it
        with tempfile.TemporaryDirectory(prefix="rock-dmq-rocketmq-") as folder:
            running = RocketMQ(Path(folder), artifacts(), heap_mb=_HEAP_MB)
            try:
                cluster = _cluster(running)
                code = run_demo(
                    messages=messages, seconds=seconds, keep_data=keep_data, kill=not no_kill, cluster=cluster
                )
            finally:
                running.close()
    except KeyboardInterrupt:
        say("interrupted; the processes are ended")
        code = _INTERRUPTED
    except PeerMissing as error:
        say(f"demo: Apache RocketMQ cannot be started, which takes Java 17 or newer and Maven: {error}")
        code = 1
    raise typer.Exit(code)


def _cluster(running: RocketMQ) -> DemoCluster:
    running.make_topics({_TOPIC: "NORMAL"})
    running.make_group(_GROUP)
    (node,) = running.nodes
    return DemoCluster(
        endpoints=running.endpoints,
        topic=_TOPIC,
        group=_GROUP,
        kill=lambda: running.kill(node),
        start=lambda: running.start(node),
    )


if __name__ == "__main__":
    app()
