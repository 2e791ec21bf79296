"""Jobs of the daemon, as commands watch them: progress until the end, and the next step after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import NamedTuple, TypeVar

from dmq.cli.bulk.progress import Progress
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.errors import DmqError

_LOOK_AGAIN_S_MIN, _LOOK_AGAIN_S_MAX = 0.05, 0.5
_Job = TypeVar("_Job")


class JobLook(NamedTuple):
    """State of a job: whether it runs, its counts as text, and its progress."""

    is_running: bool
    counts: str
    done: int
    of: int


def watch_job(
    job: _Job,
    job_id: int,
    *,
    again: Callable[[], _Job],
    look: Callable[[_Job], JobLook],
    commands: tuple[str, str],
    quiet: bool,
) -> _Job:
    """Show the progress of a job until it ends, and return its last state.

    ``again`` reads its state. ``commands`` stop the job, and list the jobs of its object.
    """
    stop, listing = commands
    wait_s = _LOOK_AGAIN_S_MIN
    try:
        with Progress(f"job {job_id}", quiet=quiet) as progress:
            while (now := look(job)).is_running:
                progress.show(now.counts, done=now.done, of=now.of)
                pause(wait_s)
                wait_s = min(2 * wait_s, _LOOK_AGAIN_S_MAX)
                job = again()
    except KeyboardInterrupt:
        text = f"job {job_id} continues in the daemon; '{stop}' stops it"
        raise CommandFailed(text, ExitCode.INTERRUPTED) from None
    except DmqError as error:
        if not error.retriable:
            raise
        text = f"{error}; job {job_id} continues with the daemon, see '{listing}'"
        raise CommandFailed(text, ExitCode.UNAVAILABLE) from error
    return job


def pause(seconds: float) -> None:
    """Wait before the next look at a job."""
    Event().wait(seconds)
