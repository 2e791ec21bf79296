"""Run a command while its processes are stopped at random for a moment each, as on a machine that stalls.

    python tools/disturb.py [--seed N] [--stop-s-max S] [--pause-s-max S] COMMAND ...

A process of the command that runs is sent SIGSTOP, and SIGCONT after at most ``--stop-s-max`` seconds; then another one
has its turn. Ends with the exit code of the command; the seed and how many were stopped are the last line on stderr.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def main(argv: list[str]) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Stop processes of a command at random, for a moment each.")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeat the choices of a run")
    parser.add_argument("--stop-s-max", type=float, default=1.0, help="how long a process is stopped (default: 1)")
    parser.add_argument("--pause-s-max", type=float, default=1.0, help="between two of them (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("a command is needed")
    rng, stopped = random.Random(options.seed), 0
    with subprocess.Popen(options.command) as command:
        family = psutil.Process(command.pid)
        while command.poll() is None:
            with _stopped(rng, family) as one:
                stopped += one is not None
                time.sleep(rng.uniform(0, options.stop_s_max) if one else 0)
            time.sleep(rng.uniform(0, options.pause_s_max))
    print(f"disturb: --seed {options.seed}, {stopped} processes were stopped for a moment", file=sys.stderr)
    return command.returncode


@contextmanager
def _stopped(rng: random.Random, family: psutil.Process) -> Iterator[psutil.Process | None]:
    """Stop one of the processes; nobody, where there is none. One that a test has stopped itself stays its own."""
    chosen = None
    with suppress(*_GONE):
        running = [each for each in family.children(recursive=True) if _runs(each)]
        chosen = rng.choice(running) if running else None
        if chosen:
            chosen.suspend()
    try:
        yield chosen
    finally:
        if chosen:
            with suppress(*_GONE):
                chosen.resume()


def _runs(process: psutil.Process) -> bool:
    with suppress(*_GONE):
        return str(process.status()) not in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE}
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
