"""``dmq dead redrive|purge|jobs|stop``: what is done with dead letters in bulk, as jobs of the daemon."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli import output as out
from dmq.cli.confirm import confirm
from dmq.cli.dead_filter import (
    IdsOption,
    KeyOption,
    ReasonOption,
    SinceOption,
    TopicOption,
    UntilOption,
    filter_of,
    means_all,
)
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import AddressOption, OutputOption, Session, TimeoutOption, session_of
from dmq.cli.progress import Progress
from dmq.errors import DmqError

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient

_LOOK_AGAIN_S_MIN, _LOOK_AGAIN_S_MAX = 0.05, 0.5

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Count what it would do, and do nothing.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start it and do not wait for its end.")]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask; needed for all of a group without a terminal.")
]


def redrive(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    message_id: IdsOption = None,
    to: Annotated[
        str,
        typer.Option("--to", metavar="TOPIC", help="Send them to this topic, for all its groups.  [default: to GROUP]"),
    ] = "",
    all_groups: Annotated[
        bool, typer.Option("--all-groups", help="Send each to the topic it came from, for all groups that read it.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="At most so many a second.  [default: as fast as it goes]")
    ] = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Send dead letters again, with new message ids, to the group that failed them, and wait until it is done.

    Other groups of the topic do not get them again, unless --all-groups or --to says so; a group that was removed needs
    one of these. Without a filter: all of the group. The daemon does it, also after Ctrl-C or a restart of it; each
    dead letter keeps what became of it ('dmq dead show'). One that somebody sent to the dead-letter queue came from no
    topic and needs --to. Ends with 1 if some failed, or somebody stopped it.
    """
    if to and all_groups:
        raise typer.BadParameter(
            "--to is for all groups of its topic already: give one of them", param_hint="--all-groups"
        )
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        from dmq.admin import admin_v1 as wire

        request = wire.StartJobRequest(
            kind=wire.REDRIVE,
            group=group,
            filter=filter_of(client, reason=reason, topic=topic, key=key, since=since, until=until, ids=message_id),
            to_topic=to,
            all_groups=all_groups,
            rate_per_s=rate or 0.0,
            is_dry_run=dry_run,
        )
        _run(session, client, request, detach=detach, yes=yes)


def purge(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, kept with each of them.")],
    reason: ReasonOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    message_id: IdsOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Give dead letters up for good, and wait until it is done.

    Without a filter: all of the group. Their bodies are removed; 'dmq dead show' still tells what they were, how they
    died, and why they were given up. Ends with 1 if some failed, or somebody stopped it.
    """
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        from dmq.admin import admin_v1 as wire

        request = wire.StartJobRequest(
            kind=wire.PURGE,
            group=group,
            filter=filter_of(client, reason=reason, topic=topic, key=key, since=since, until=until, ids=message_id),
            why=why,
            is_dry_run=dry_run,
        )
        _run(session, client, request, detach=detach, yes=yes)


def jobs(
    ctx: typer.Context,
    *,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Only of this consumer group.")] = "",
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List redrives and purges, the newest first, at most 100."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = client.jobs(group)
    if session.as_json:
        out.show_json([out.to_plain(job) for job in found])
        return
    out.show_table(
        ("JOB", "KIND", "GROUP", "STATE", "LOOKED AT", "DONE", "PASSED OVER", "FAILED", "STARTED AT"),
        [
            (
                *(str(job.job_id), _kind(job), job.group, _state(job), f"{_looked_at(job):,} of {_size(job):,}"),
                *(f"{job.done:,}", f"{job.passed:,}", f"{job.failed:,}", out.when(job.created_at_ms)),
            )
            for job in found
        ],
        numbers=("JOB", "LOOKED AT", "DONE", "PASSED OVER", "FAILED"),
    )


def stop(
    ctx: typer.Context,
    *,
    job: Annotated[int, typer.Argument(metavar="JOB", help="Its number in 'dmq dead jobs'.", min=1)],
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """End a running job where it is; what it has done stays done."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        ended = client.stop_job(job)
    if session.as_json:
        out.show_json(out.to_plain(ended))
    else:
        typer.echo(f"job {ended.job_id} is {_state(ended)}: {_counts(ended)}")


def pause(seconds: float) -> None:
    """Wait before a job is looked at again."""
    Event().wait(seconds)


def _run(session: Session, client: AdminClient, request: wire.StartJobRequest, *, detach: bool, yes: bool) -> None:
    job = _start(client, request, yes=yes)
    if request.is_dry_run:
        would = "would be " + _done(job)
        told = f"{job.done:,} {would}, {job.passed:,} would be passed over, {job.failed:,} would fail"
    elif detach and _state(job) == "running":
        told = f"job {job.job_id} runs; 'dmq dead jobs {job.group}' shows it, 'dmq dead stop {job.job_id}' ends it"
    else:
        job = _watch(client, job, quiet=session.as_json)
        told = _counts(job)
    if session.as_json:
        out.show_json(out.to_plain(job))
    else:
        typer.echo(out.printable(told))
    if _state(job) == "stopped":
        raise CommandFailed(f"job {job.job_id} was stopped before its end")
    if job.failed and not request.is_dry_run:
        is_bound = _kind(job) == "redrive" and not job.to_topic
        origin = ", or their topic or group is gone and they need --to" if is_bound else ""
        raise CommandFailed(f"{job.failed:,} failed and stay dead: they cannot be read{origin}")


def _start(client: AdminClient, request: wire.StartJobRequest, *, yes: bool) -> wire.Job:
    if means_all(request.filter) and not request.is_dry_run and not yes:
        confirm(f"{_all_of(client, request.group)} would be {_done(request)}", yes=yes)
    try:
        return client.start_job(request)
    except DmqError as error:
        if not error.retriable or request.is_dry_run:
            raise
        text = f"{error} (if in doubt, 'dmq dead jobs {request.group}' tells whether it was started)"
        raise CommandFailed(out.printable(text), ExitCode.UNAVAILABLE) from error


def _all_of(client: AdminClient, group: str) -> str:
    from dmq.admin.client import NotFound

    try:
        return f"all {client.group(group).dead:,} dead letters of group {group}"
    except NotFound:  # a group may be gone, or never have been, and have dead letters
        return f"all dead letters of group {group}"


def _watch(client: AdminClient, job: wire.Job, *, quiet: bool) -> wire.Job:
    """Show how ``job`` goes on until it has ended, and return it then."""
    wait_s = _LOOK_AGAIN_S_MIN
    if not quiet and _state(job) == "running":
        typer.echo(out.printable(f"dmq: job {job.job_id}: {_kind(job)} of {job.group}"), err=True)
    try:
        with Progress(f"job {job.job_id}", quiet=quiet) as progress:
            while _state(job) == "running":
                progress.show(_counts(job), done=_looked_at(job), of=_size(job))
                pause(wait_s)
                wait_s = min(2 * wait_s, _LOOK_AGAIN_S_MAX)
                job = _again(client, job)
    except KeyboardInterrupt:
        text = f"no longer watching, but job {job.job_id} goes on; 'dmq dead stop {job.job_id}' ends it"
        raise CommandFailed(text, ExitCode.INTERRUPTED) from None
    except DmqError as error:
        if not error.retriable:
            raise
        text = f"{error}; job {job.job_id} goes on when the daemon does, see 'dmq dead jobs {job.group}'"
        raise CommandFailed(out.printable(text), ExitCode.UNAVAILABLE) from error
    return job


def _again(client: AdminClient, job: wire.Job) -> wire.Job:
    for found in client.jobs(job.group):
        if found.job_id == job.job_id:
            return found
    raise CommandFailed(f"job {job.job_id} is no longer among the newest jobs of its group")


def _counts(job: wire.Job) -> str:
    return f"{_done(job)} {job.done:,}, passed over {job.passed:,}, failed {job.failed:,}"


def _done(job: wire.Job | wire.StartJobRequest) -> str:
    return {"redrive": "redriven", "purge": "purged"}.get(_kind(job), "done")


def _kind(job: wire.Job | wire.StartJobRequest) -> str:
    return str(out.to_plain(job)["kind"]).lower()


def _state(job: wire.Job) -> str:
    return str(out.to_plain(job)["state"]).lower()


def _looked_at(job: wire.Job) -> int:
    return min(job.next_offset, job.end_offset) - job.first_offset


def _size(job: wire.Job) -> int:
    return job.end_offset - job.first_offset
