"""``dmq status``: the status of a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dmq.cli.nouns import single
from dmq.cli.output import output as out
from dmq.cli.output.errors import ExitCode
from dmq.cli.output.facts import clock_line, disk_line, lateness_line, paused_line, shown_quota
from dmq.cli.session.options import Session, with_session
from dmq.config.units import format_size

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

app = single()


@app.command()
@with_session
def status(session: Session) -> None:
    """Show the state of the daemon; exit with 6 unless it is serving."""
    with session.connect() as client:
        found = client.status()
    session.show_facts(found, _facts(found))
    if _state(found) != "serving":
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _state(found: wire.GetStatusResponse) -> str:
    return out.enum_word(found, "state")


def _address(found: wire.GetStatusResponse) -> str:
    others = {"metrics": found.metrics_listen, "HTTP API": found.http_api, "console": found.console}
    return ", ".join([found.listen, *(f"{name} {place}" for name, place in others.items() if place)])


def _facts(found: wire.GetStatusResponse) -> list[tuple[str, str]]:
    now_ms = found.now_ms
    timeline, recovery = found.timeline, found.recovery
    next_due = f"; next {out.when(timeline.next_due_at_ms, now_ms)}" if timeline.next_due_at_ms else ""
    if found.replica.role == "standby":
        return [
            ("state", f"{_state(found)}: {found.state_reason}"),
            ("daemon", f"{found.broker_name} {found.version}, pid {found.pid}"),
            ("up since", out.when(found.started_at_ms, now_ms)),
            ("address", _address(found)),
            ("data", found.data),
            *replica_facts(found.replica, now_ms),
        ]
    but = ", but" if _state(found) == "serving" else ""
    reason = f"{but}: {found.state_reason}" if found.state_reason else ""
    if recovery.is_new:
        start = f"NEW: an empty store was created at {found.data}"
    elif recovery.was_clean:
        start = "after a clean stop"
    else:
        start = f"recovered after a kill, {recovery.cut_bytes} B of torn log cut"
    return [
        ("state", f"{_state(found)}{reason}"),
        ("daemon", f"{found.broker_name} {found.version}, pid {found.pid}, cell {found.cell_id}"),
        ("up since", out.when(found.started_at_ms, now_ms)),
        *_processes(found),
        ("address", _address(found)),
        ("data", f"{found.data}, durability {found.durability}"),
        ("opened", f"in {out.about(recovery.open_ms)}, {start}"),
        ("pending", f"{timeline.pending:,}; overdue {timeline.overdue:,}{_held(timeline)}{next_due}"),
        ("paused", paused_line(timeline)),
        *_quotas(found),
        ("clock", clock_line(found.clock) if found.HasField("clock") else ""),
        ("lateness", lateness_line(found.lateness)),
        *(_cluster(found.cluster, now_ms) if found.HasField("cluster") else ()),
        ("messages", _totals(found.totals)),
        ("commits", _commits(found.commits)),
        ("disk", disk_line(found.disk)),
        *(_backups(found.backups, now_ms) if found.HasField("backups") else ()),
        *(replica_facts(found.replica, now_ms) if found.HasField("replica") else ()),
        ("audit outbox", _outbox(found.outbox)),
        ("audit trail", _trail(found.outbox)),
    ]


def _processes(found: wire.GetStatusResponse) -> list[tuple[str, str]]:
    if len(found.processes) == 1:
        return [("processes", f"1: {_doing(found.processes[0])}")]
    return [("" if number else "processes", _process(each)) for number, each in enumerate(found.processes)]


def _process(one: wire.Process) -> str:
    pid = f", pid {one.pid}" if one.pid else ""
    again = f"; STARTED {one.starts:,} TIMES" if one.starts > 1 else ""
    last_end = f"; ended last: {one.last_end}" if one.last_end else ""
    if one.state != "serving":
        return f"{one.name}{pid}: {one.state.upper()}{again}{last_end}"
    return f"{one.name}{pid}: {_doing(one)}{again}{last_end}"


def _doing(one: wire.Process) -> str:
    of_clients = ((one.connections, "connection"), (one.streams, "open call")) if one.HasField("connections") else ()
    clients = "".join(f"{out.counted(count, noun)}, " for count, noun in of_clients)
    return f"{clients}cpu {out.about(one.cpu_s * 1000)}, {format_size(one.memory_bytes)}"


def _backups(backups: wire.PeriodicBackups, now_ms: int) -> list[tuple[str, str]]:
    last = f"none yet in {backups.folder}"
    if backups.last_at_ms:
        size = format_size(backups.last_bytes)
        last = f"last {out.when(backups.last_at_ms, now_ms)}, {size}, {backups.last_folder}"
    following = f"next {out.when(backups.next_at_ms, now_ms)}" if backups.next_at_ms else "no next one"
    failed = f"FAILED {out.when(backups.failed_at_ms, now_ms)}: {backups.error}"
    return [
        ("backups", last),
        *([("", failed)] if backups.error else []),
        ("", f"{following}; {backups.rule}, {backups.kept_max:,} kept"),
    ]


def _link_facts(replica: wire.Replica) -> list[tuple[str, str]]:
    """Return the line about the direct link; none if it is off."""
    address, error = replica.link_address, f": {replica.link_error}" if replica.link_error else ""
    texts = {
        "waiting": "no standby offers one" if replica.role == "primary" else "the primary is not connected",
        "down": f"DOWN to {address}{error}; writes wait for the object store",
        "in_sync": f"in sync with {address}, {replica.link_batches:,} batches acknowledged",
        "sealed": "SEALED by a takeover; writes wait for the object store",
        "connected": "the primary is connected",
        "reserved": f"NO TAKEOVER here: only {address} may take over, since the log may lack its batches",
    }
    return [("link", texts.get(replica.link, replica.link))] if replica.link else []


def replica_facts(replica: wire.Replica, now_ms: int) -> list[tuple[str, str]]:
    """Return the lines about the second copy of the store."""
    if replica.role == "standby":
        applied = f", written {out.when(replica.sent_at_ms, now_ms)}" if replica.sent_at_ms else ""
        return [
            ("replica", f"{replica.mode}, {replica.url}"),
            *([("", f"UNREACHABLE: {replica.error}")] if replica.error else []),
            ("role", f"standby of {replica.primary or 'an unknown primary'}"),
            ("", f"had the whole log {out.about(replica.lag_ms)} ago"),
            ("", f"applied: epoch {replica.epoch:,}, segment {replica.segment:,}{applied}"),
            *_link_facts(replica),
        ]
    at_risk = "nothing would be lost with this machine"
    if replica.lag_batches:
        waiting = f"{format_size(replica.lag_bytes)} wait, " if replica.lag_bytes else ""
        at_risk = f"BEHIND by {replica.lag_batches:,} batches, {waiting}for {out.about(replica.lag_ms)}"
    sent = f", written {out.when(replica.sent_at_ms, now_ms)}" if replica.sent_at_ms else ""
    base = f"newest {out.when(replica.base_at_ms, now_ms)}" if replica.base_bytes else "none yet"
    size = f", {format_size(replica.base_bytes)}" if replica.base_bytes else ""
    check = f"; verified {out.when(replica.verified_at_ms, now_ms)}" if replica.verified_at_ms else "; never verified"
    state = "" if replica.state == "following" else f", {replica.state.replace('_', ' ').upper()}"
    return [
        ("replica", f"{replica.mode}, {replica.url}{state}"),
        *([("", f"UNREACHABLE: {replica.error}")] if replica.error else []),
        ("", at_risk),
        ("", f"epoch {replica.epoch:,}, segment {replica.segment:,}{sent}"),
        *_link_facts(replica),
        ("bases", f"{base}{size}{check if replica.base_bytes else ''}"),
        *([("", f"FAILED: {replica.base_error}")] if replica.base_error else []),
    ]


def _held(timeline: wire.Timeline) -> str:
    return f"; held {timeline.held:,}" if timeline.held else ""


def _quotas(found: wire.GetStatusResponse) -> list[tuple[str, str]]:
    said = [f"{each.quota} of {each.name}: {shown_quota(each)}" for each in found.topic_quotas]
    refused = ", ".join(f"{each.messages:,} by {each.quota}" for each in found.quota_refusals)
    said += [f"refused {refused}"] if refused else []
    return [("quotas" if not number else "", each) for number, each in enumerate(said)]


def _cluster(cluster: wire.Cluster, now_ms: int) -> list[tuple[str, str]]:
    away = f"AWAY since {out.when(cluster.away_since_ms, now_ms)}: " if cluster.away_since_ms else ""
    done = f"forwarded {cluster.forwarded:,}, refused {cluster.refused:,}, in doubt {cluster.in_doubt:,}"
    kept = f"; kept {cluster.kept:,} sends" if cluster.kept else ""
    return [
        ("cluster", away + ", ".join(cluster.endpoints)),
        *(("", f"{each.address} does not answer: {each.why}") for each in cluster.proxies),
        ("to cluster", f"{cluster.waiting:,} wait, {cluster.in_flight:,} on their way; {done}{kept}"),
        *(("", f"topic {each.topic} is not taken, {each.waiting:,} wait: {each.why}") for each in cluster.lanes),
        ("its lateness", lateness_line(cluster.lateness)),
        *([("inner topic", _inner(cluster.inner))] if cluster.HasField("inner") else []),
    ]


def _inner(inner: wire.Inner) -> str:
    trouble = f"; NOTHING TAKEN: {inner.error}" if inner.error else ""
    return f"{inner.topic}, {inner.fetched:,} taken, {inner.unreadable:,} unreadable{trouble}"


def _totals(totals: wire.Totals) -> str:
    finished = f"acknowledged {totals.acked:,}, leases expired {totals.expired:,}"
    return f"accepted {totals.accepted:,}, delivered {totals.delivered:,}, {finished}"


def _commits(commits: wire.Commits) -> str:
    if not commits.batches:
        return ""
    volume = f"{commits.batches:,} with {commits.ops:,} operations, {format_size(commits.written_bytes)}"
    sync = f"sync p50 {out.about(commits.sync_p50_ms)} p99 {out.about(commits.sync_p99_ms)}"
    return f"{volume}; p99 {out.about(commits.commit_p99_ms)}, {sync}"


def _outbox(outbox: wire.Outbox) -> str:
    held = f"{outbox.rows:,} events, {format_size(outbox.held_bytes)} of {format_size(outbox.held_bytes_max)}"
    return held + (f"; {outbox.lost_rows:,} LOST before export" if outbox.lost_rows else "")


def _trail(outbox: wire.Outbox) -> str:
    if not outbox.trail:
        return "off"
    lag = f", the oldest event after that is {out.about(outbox.lag_ms)} old" if outbox.lag_ms else ""
    stopped = f"STOPPED: {outbox.export_error}; " if outbox.export_error else ""
    return f"{stopped}{outbox.trail}, exported up to {outbox.exported_sequence:,}{lag}"
