"""``dmq top``: a daemon live, on one screen."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dmq.cli.nouns import single
from dmq.cli.output import output as out
from dmq.cli.output.facts import disk_line, flow_word, lateness_line, paused_line, shown_age
from dmq.cli.output.watch import INTERVAL_DEFAULT, interval_s, repeat, wait
from dmq.cli.session.options import IntervalOption, Session, with_session

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire
    from dmq.admin.client import AdminClient, Sample

app = single()

_RATE_SAMPLES = 6  # rates are those of the last five refreshes
_SLOW_EVERY_S = 5.0  # topics, groups and the histogram cost the daemon more than its status
_ROWS_MIN, _ROWS_PIPE = 3, 10
_LINES_OF_FACTS = 16  # of a screen, with headings and empty lines; the two lists share the others


class Lists(NamedTuple):
    """Figures of topics and groups, and the due times of pending messages and retries."""

    due: wire.GetDueHistogramResponse
    topics: Sequence[wire.Topic]  # the most pending messages first
    groups: Sequence[wire.Group]  # the most unfinished messages first


class LiveFigures:
    """Figures of one daemon, refreshed by each ``draw``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._samples = deque["Sample"](maxlen=_RATE_SAMPLES)
        self._started_at_ms = 0
        self._lists: tuple[float, Lists] | None = None

    def read(self) -> tuple[wire.GetStatusResponse, Lists]:
        """Ask the daemon."""
        from broker_adapter.runtime.clock import SystemClock
        from dmq.admin.client import sample_of

        with self._session.connect() as client:
            status = client.status()
            if status.started_at_ms != self._started_at_ms:
                self._samples.clear()
                self._started_at_ms = status.started_at_ms
            self._samples.append(sample_of(status))
            if _is_standby(status):
                return status, _no_lists()
            now_s = SystemClock().monotonic_s()
            if self._lists is None or now_s - self._lists[0] >= _SLOW_EVERY_S:
                self._lists = now_s, _lists_of(client)
        return status, self._lists[1]

    def draw(self) -> None:
        """Print the figures."""
        from dmq.admin.client import rates_of

        status, lists = self.read()
        due, now = lists.due, rates_of(self._samples)
        rows = _rows()
        topics, groups = lists.topics[:rows], lists.groups[:rows]
        plain = {
            "status": status,
            "rates": now,
            "due": {name: count for name, _, count in _spans(due)},
            "retrying": sum(each.waiting for each in lists.groups),
            "dead": sum(each.dead for each in lists.groups),
            "topics": topics,
            "groups": groups,
        }
        self._session.show(plain, lambda: _show(status, now, lists, topics, groups))


@app.command()
@with_session
def top(
    session: Session,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print the figures once, with the rates of one interval.")
    ] = False,
    interval: IntervalOption = None,
) -> None:
    """Show the daemon live: rates, due messages, lateness, topics, groups.

    The keys q and Ctrl-C end it. With -o json each refresh is one line. Topics, groups and due times are read every
    five seconds. Lateness covers the time since the start of the daemon.
    """
    seconds = interval_s(interval or INTERVAL_DEFAULT)
    found = LiveFigures(session)
    if once:
        found.read()
        wait(seconds)
        found.draw()
        return
    repeat(found.draw, seconds, "dmq top", as_json=session.as_json)


def _is_standby(status: wire.GetStatusResponse) -> bool:
    """Return True for a standby, which answers only for its status."""
    return status.replica.role == "standby"


def _no_lists() -> Lists:
    from dmq.admin import admin_v1 as wire

    return Lists(wire.GetDueHistogramResponse(), [], [])


def _lists_of(client: AdminClient) -> Lists:
    topics = [each for each in client.topics() if not each.name.startswith("%")]
    groups = client.groups(with_removed=True)
    return Lists(
        client.due_histogram(),
        sorted(topics, key=lambda each: (-each.pending, -each.stored, each.name)),
        sorted(groups, key=lambda each: (-each.unread_messages - each.waiting, -each.dead, each.name)),
    )


def _rows() -> int:
    if out.terminal_columns() is None:
        return _ROWS_PIPE
    return max(_ROWS_MIN, (shutil.get_terminal_size().lines - _LINES_OF_FACTS) // 2)


def _show(
    status: wire.GetStatusResponse,
    now: dict[str, float] | None,
    lists: Lists,
    topics: Sequence[wire.Topic],
    groups: Sequence[wire.Group],
) -> None:
    out.show_facts(_facts(status, now, lists))
    if topics:
        typer.echo()
        out.show_table(
            ("TOPIC", "STATE", "PENDING", "HELD", "STORED"),
            [(each.name, flow_word(each), *_counts(each.pending, each.held, each.stored)) for each in topics],
            numbers=("PENDING", "HELD", "STORED"),
        )
    if groups:
        typer.echo()
        out.show_table(
            ("GROUP", "STATE", "UNREAD", "OLDEST", "RETRYING", "DEAD", "LEASED"),
            [
                (
                    *(each.name, flow_word(each)),
                    f"{each.unread_messages:,}" if each.HasField("unread_messages") else "-",
                    *(shown_age(each, each.unread_messages), *_counts(each.waiting, each.dead, each.leased)),
                )
                for each in groups
            ],
            numbers=("UNREAD", "OLDEST", "RETRYING", "DEAD", "LEASED"),
            details=("LEASED",),
        )


def _facts(status: wire.GetStatusResponse, now: dict[str, float] | None, lists: Lists) -> list[tuple[str, str]]:
    timeline = status.timeline
    reason = f": {status.state_reason}" if status.state_reason else ""
    held = f", {timeline.held:,} held" if timeline.held else ""
    retrying, dead = (sum(getattr(each, name) for each in lists.groups) for name in ("waiting", "dead"))
    state = ("state", f"{out.enum_word(status, 'state')}{reason}, up {out.about(status.now_ms - status.started_at_ms)}")
    if _is_standby(status):
        return [state, ("replica", _replica(status))]
    return [
        state,
        ("paused", paused_line(timeline)),
        ("per second", ", ".join(f"{name} {_rate(now, name)}" for name in ("accepted", "delivered", "acked"))),
        ("pending", f"{timeline.pending:,}, {timeline.overdue:,} overdue{held}"),
        ("due", ", ".join(f"{label} {count:,}" for _, label, count in _spans(lists.due)[1:])),
        ("lateness", lateness_line(status.lateness)),
        ("failed", f"{out.counted(retrying, 'retry', 'retries')}, {out.counted(dead, 'dead letter')}"),
        ("disk", disk_line(status.disk)),
        ("replica", _replica(status)),
        ("audit trail", f"STOPPED: {status.outbox.export_error}" if status.outbox.export_error else ""),
    ]


def _spans(due: wire.GetDueHistogramResponse) -> list[tuple[str, str, int]]:
    """Return name, label and entries of each time span, retries included; a span does not include those before it."""
    minute, hour = due.minutes[0].count if due.minutes else 0, sum(each.count for each in due.minutes)
    day = sum(each.count for each in due.hours)
    return [
        ("overdue", "overdue", due.overdue),
        ("minute", "this minute", minute),
        ("hour", "within an hour", hour - minute),
        ("day", "within a day", day - hour),
        ("later", "later", due.later),
    ]


def _rate(now: dict[str, float] | None, name: str) -> str:
    if now is None:
        return "-"
    return f"{now[name]:.1f}" if 0 < now[name] < 10 else f"{now[name]:,.0f}"


def _replica(status: wire.GetStatusResponse) -> str:
    if not status.HasField("replica"):
        return ""
    replica = status.replica
    error = f", UNREACHABLE: {replica.error}" if replica.error else ""
    error += f", link {replica.link.replace('_', ' ')}" if replica.link else ""
    if replica.role == "standby":
        return f"standby, had the whole log {out.about(replica.lag_ms)} ago{error}"
    lag = f", behind for {out.about(replica.lag_ms)}" if replica.lag_batches else ""
    return f"{replica.mode}, {replica.state.replace('_', ' ')}{lag}{error}"


def _counts(*counts: int) -> tuple[str, ...]:
    return tuple(f"{count:,}" for count in counts)
