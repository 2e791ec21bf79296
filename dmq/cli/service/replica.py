"""``dmq replica``: state, check, promotion and restore of the second copy of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.output.times import instant_ms
from dmq.cli.service.status import replica_facts
from dmq.cli.session.offline import offline
from dmq.cli.session.options import Session, with_output, with_session

app = noun("replica")

UrlOption = Annotated[
    str,
    typer.Option(
        "--replica-url",
        envvar="DMQ_REPLICA_URL",
        metavar="URL",
        help="Place of the second copy: s3://, gs://, az://BUCKET/PREFIX or file:///PATH.",
        show_default=False,
    ),
]


@app.command()
@with_session
def status(session: Session) -> None:
    """Show the second copy; exit with 6 unless it is complete.

    The output has the number of changes that the copy lacks, and their age.
    """
    with session.connect() as client:
        found = client.status()
    if not found.HasField("replica"):
        raise CommandFailed("the store has no second copy; see 'dmq serve --replica'", ExitCode.NOT_FOUND)
    if session.as_json:
        out.show_json(to_plain(found.replica))
    else:
        out.show_facts(replica_facts(found.replica, found.now_ms))
    if found.replica.state != "following" or found.replica.error:
        raise typer.Exit(ExitCode.UNAVAILABLE)


@app.command()
@with_output
def check(
    session: Session,
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Directory of a daemon, whose replaced stores are compared.",
            show_default=False,
        ),
    ] = None,
    replica_url: UrlOption,
) -> None:
    """List the faults of the second copy; exit with 4 if there are any.

    The command reads every segment and base, changes nothing, and needs no daemon. With --data it also reads the stores
    of replaced primaries in that directory (diverged-EPOCH-BATCH), and lists their messages that are not in the log.
    """
    with offline(), Progress("check of the replica", quiet=session.as_json) as progress:
        from dmq.recovery.replica import diverged_tails
        from dmq.replication.objects import open_objects
        from dmq.replication.restore import check as check_log

        objects = open_objects(replica_url)
        found = check_log(objects, lambda number: progress.show(f"segment {number:,}"))
        tails = diverged_tails(objects, data.absolute()) if data is not None else []
    if session.as_json:
        diverged = [{**each._asdict(), "messages": [message._asdict() for message in each.messages]} for each in tails]
        out.show_json({**found._asdict(), "diverged": diverged})
    else:
        facts = [
            ("store", f"{found.store:016x}"),
            ("bases", f"{found.bases:,}"),
            ("segments", f"{found.segments:,}, the last is {found.last_number:,} with batch {found.last_batch:,}"),
        ]
        if found.first_ms:
            facts.append(("restores", f"from {out.when(found.first_ms)} to {out.when(found.last_ms)}"))
        for tail in tails:
            count = f"{len(tail.messages):,} messages are not in the log"
            place = f"epoch {tail.epoch:,}, after batch {tail.common_batch:,} up to {tail.batch:,}"
            facts.append(("diverged", f"{tail.path}, {place}: {count}"))
            facts += [("", f"{each.message_id} of {each.topic}, {each.state}") for each in tail.messages]
        out.show_facts(facts)
        for fault in found.faults:
            typer.echo(out.printable(fault))
    if found.faults:
        raise CommandFailed(f"the replica is not whole: {len(found.faults):,} faults", ExitCode.DAMAGED)


@app.command()
@with_output
def promote(
    session: Session,
    *,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Allow any standby to take over, without the messages that only the standby of the direct link has.",
        ),
    ] = False,
    replica_url: UrlOption,
) -> None:
    """Release the lease of the primary; a running standby takes over.

    A primary that is still running ends. It acknowledges no write after the takeover. If a standby with a direct link
    may have messages that the log lacks, only that one takes over. If it is lost, stop the primary and repeat the
    command with --accept-loss: messages acknowledged since the last segment are lost then.
    """
    with offline():
        from dmq.replication.objects import open_objects
        from dmq.replication.role import link_member, release_lease, release_link

        objects = open_objects(replica_url)
        member = link_member(objects)
        if accept_loss:
            release_link(objects)
        record = release_lease(objects)
    if record is None:
        raise CommandFailed("the replica has no lease: no primary was started with it", ExitCode.NOT_FOUND)
    if session.as_json:
        link = member.address or member.member if member is not None else ""
        out.show_json({"released": record.address, "epoch": record.epoch, "link": link, "loss_accepted": accept_loss})
        return
    facts = [("released", f"the lease of {record.address}, epoch {record.epoch:,}")]
    if member is not None:
        name = member.address or member.member
        lost = f"any standby, without the messages that only {name} has"
        only = f"only the standby at {name}; --accept-loss allows others, and loses the messages that only it has"
        facts.append(("takes over", lost if accept_loss else only))
    out.show_facts(facts)


@app.command()
@with_output
def restore(
    session: Session,
    *,
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Directory for the store, new or empty.")],
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time of the state to restore.  [default: the newest]", show_default=False),
    ] = None,
    replica_url: UrlOption,
) -> None:
    """Restore the store from its second copy.

    The result is another store, as with a restored backup: handles of the original are invalid there. 'dmq serve
    --data DIR' serves it. The result does not contain the trail.
    """
    at_ms = instant_ms(at, "--at")
    with offline():
        from dmq.replication.objects import open_objects
        from dmq.replication.restore import restore as restore_store

        found = restore_store(open_objects(replica_url), data.absolute(), at_ms)
    if session.as_json:
        out.show_json({**found._asdict(), "path": str(found.path), "store": f"{found.store:016x}"})
        return
    base = f"base {found.base} and " if found.base else ""
    facts = [("restored", str(found.path)), ("from", f"{base}{found.segments:,} segments")]
    facts += [("state of", out.when(found.time_ms)), ("segment", f"{found.number:,}, batch {found.batch:,}")]
    out.show_facts(facts)
