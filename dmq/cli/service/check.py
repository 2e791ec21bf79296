"""``dmq check``: one figure of a daemon against two thresholds, as a plugin of Nagios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dmq.cli.nouns import CommandGroup, noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refusing
from dmq.cli.session.options import OptionGroup, Session, with_session
from dmq.config.units import format_size, parse_duration, parse_size
from dmq.errors import DmqError

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


class CheckState(IntEnum):
    """Exit codes of plugins, as Nagios defines them."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


class FigureUnit(NamedTuple):
    """Unit of a figure: its name in performance data, and the format of its thresholds."""

    name: str
    parse: Callable[[str], int]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a number is expected, as for the other threshold")
    return int(text)


MESSAGES = FigureUnit("", _count)
TIME = FigureUnit("ms", parse_duration)
SIZE = FigureUnit("B", parse_size)


class FigureLimits(NamedTuple):
    """Thresholds of a figure. A value beyond one is bad: above it, or below it if ``is_minimum``."""

    warn: int
    critical: int
    is_minimum: bool = False

    def state_of(self, value: int) -> CheckState:
        """Return the state for a value."""
        sign = -1 if self.is_minimum else 1
        if sign * value > sign * self.critical:
            return CheckState.CRITICAL
        return CheckState.WARNING if sign * value > sign * self.warn else CheckState.OK


class Figure(NamedTuple):
    """A measured value with its unit and thresholds, if it has any."""

    name: str
    value: int
    unit: FigureUnit
    limits: FigureLimits | None = None

    def performance(self) -> str:
        """Return the figure as performance data: ``name=value;warn;critical;minimum``."""
        end = ":" if self.limits is not None and self.limits.is_minimum else ""
        bounds = ("", "") if self.limits is None else (f"{self.limits.warn}{end}", f"{self.limits.critical}{end}")
        return f"{self.name}={self.value}{self.unit.name};{bounds[0]};{bounds[1]};0"

    def plain(self) -> dict[str, object]:
        """Return the figure for programs."""
        warn, critical = (None, None) if self.limits is None else self.limits[:2]
        return {"name": self.name, "value": self.value, "unit": self.unit.name, "warn": warn, "critical": critical}


class CheckResult(NamedTuple):
    """Result of a check: a text and the figures; ``state`` is the best one that the check can have."""

    text: str
    figures: Sequence[Figure] = ()
    state: CheckState = CheckState.OK

    def final(self) -> CheckState:
        """Return the worst state of the figures and of the check itself."""
        return max(
            self.state, *(each.limits.state_of(each.value) for each in self.figures if each.limits), CheckState.OK
        )


class Plugin(CommandGroup):
    """Group of the checks. Errors of usage are one line on stdout and exit code 3, as monitors expect."""

    def make_context(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401 - of typer's vendored classes
        """Parse the name of the check."""
        with _unknown_if_refused():
            return super().make_context(*args, **extra)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # vendored base
        """Raise a usage error if the name of the check is missing."""
        if not args and not ctx.resilient_parsing:
            raise typer.BadParameter(f"the name of a check is expected: {', '.join(self.commands)}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401 - vendored base
        """Run a check."""
        with _unknown_if_refused():
            return super().invoke(ctx)


@contextmanager
def _unknown_if_refused() -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:
        text = " ".join(error.format_message().removesuffix(".").split())
        typer.echo(f"DMQ UNKNOWN - {out.printable(text)}")
        raise typer.Exit(CheckState.UNKNOWN) from error


app = noun("check", Plugin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds(OptionGroup):
    """Options of the thresholds of a check."""

    warn: Annotated[str, typer.Option("--warn", "-w", metavar="LIMIT", help="Threshold of WARNING.")]
    critical: Annotated[str, typer.Option("--critical", "-c", metavar="LIMIT", help="Threshold of CRITICAL.")]

    def read(self, unit: FigureUnit, *, is_minimum: bool = False) -> FigureLimits:
        """Return the thresholds. Raise a usage error if one is invalid, or if CRITICAL comes before WARNING."""
        with refusing("--warn", self.warn):
            warn = unit.parse(self.warn)
        with refusing("--critical", self.critical):
            critical = unit.parse(self.critical)
            if (critical > warn) if is_minimum else (critical < warn):
                raise ValueError(f"at {'most' if is_minimum else 'least'} {self.warn} is expected, the value of --warn")
        return FigureLimits(warn, critical, is_minimum)


@app.command()
@with_session
def lag(
    session: Session,
    *,
    thresholds: Thresholds,
    group: Annotated[str, typer.Option("--group", "-g", metavar="GROUP", help="Only this consumer group.")] = "",
) -> None:
    """Check the consumer lag of the group that is furthest behind.

    A threshold is a number of unread messages, or an age of the oldest unread message, such as 5m.
    """
    unit = MESSAGES if thresholds.warn.isdigit() else TIME
    limits = thresholds.read(unit)

    def look() -> CheckResult:
        with session.connect() as client:
            groups = [client.group(group)] if group else client.groups()
        known = [each for each in groups if each.HasField("unread_messages")]
        if not known:
            return CheckResult(
                "no group has read a topic here" if not group else f"group {group} has read nothing here"
            )
        field = "unread_messages" if unit is MESSAGES else "oldest_unread_age_ms"
        worst = max(known, key=lambda each: int(getattr(each, field)))
        count, age_ms = worst.unread_messages, worst.oldest_unread_age_ms
        oldest = f", the oldest for {out.about(age_ms)}" if count else ""
        figures = [
            Figure("unread", count, MESSAGES, limits if unit is MESSAGES else None),
            Figure("oldest", age_ms, TIME, limits if unit is TIME else None),
        ]
        return CheckResult(f"group {worst.name}: {count:,} unread{oldest}", figures)

    _report(session, "lag", look)


@app.command()
@with_session
def late(session: Session, *, thresholds: Thresholds) -> None:
    """Check how late the most overdue message is now.

    Messages held by a pause or a rate limit of their topic do not count. If messages wait for an unavailable cluster,
    the duration of its outage counts.
    """
    limits = thresholds.read(TIME)

    def look() -> CheckResult:
        found = _status(session)
        timeline, cluster = found.timeline, found.cluster
        late_ms = max(0, found.now_ms - timeline.next_due_at_ms) if timeline.next_due_at_ms else 0
        if cluster.away_since_ms and cluster.waiting:
            late_ms = max(late_ms, found.now_ms - cluster.away_since_ms)
        figures = [
            Figure("late", late_ms, TIME, limits),
            Figure("overdue", timeline.overdue, MESSAGES),
            Figure("held", timeline.held, MESSAGES),
        ]
        held = f", {timeline.held:,} held" if timeline.held else ""
        text = f"the oldest due message is {out.about(late_ms)} late" if late_ms else "no message is late"
        return CheckResult(text + held, figures)

    _report(session, "late", look)


@app.command()
@with_session
def disk(session: Session, *, thresholds: Thresholds) -> None:
    """Check the free space on the disk of the store.

    Thresholds are sizes such as 20GiB, and less space is worse. The state is CRITICAL while sends are refused.
    """
    limits = thresholds.read(SIZE, is_minimum=True)

    def look() -> CheckResult:
        found = _status(session).disk
        text = f"{format_size(found.free_bytes)} free, sends refused below {format_size(found.low_water_bytes)}"
        figures = [Figure("free", found.free_bytes, SIZE, limits), Figure("low_water", found.low_water_bytes, SIZE)]
        if found.refuses_sends:
            return CheckResult(f"sends are refused: {text}", figures, CheckState.CRITICAL)
        return CheckResult(text, figures)

    _report(session, "disk", look)


@app.command()
@with_session
def audit(session: Session, *, thresholds: Thresholds) -> None:
    """Check the age of the oldest audit event that is not in the trail.

    The state is CRITICAL if the trail cannot be written, or if events were lost before their export.
    """
    limits = thresholds.read(TIME)

    def look() -> CheckResult:
        found = _status(session).outbox
        if not found.trail:
            return CheckResult("the audit trail is off", state=CheckState.UNKNOWN)
        figures = [
            Figure("export_lag", found.lag_ms, TIME, limits),
            Figure("outbox", found.held_bytes, SIZE),
            Figure("lost", found.lost_rows, MESSAGES),
        ]
        text = f"the oldest event outside of the trail is {out.about(found.lag_ms)} old"
        if found.lost_rows:
            text = f"{out.counted(found.lost_rows, 'event')} lost before export"
        if found.export_error:
            text = f"the trail cannot be written: {found.export_error}"
        return CheckResult(
            text, figures, CheckState.CRITICAL if found.export_error or found.lost_rows else CheckState.OK
        )

    _report(session, "audit", look)


@app.command()
@with_session
def replica(session: Session, *, thresholds: Thresholds) -> None:
    """Check the age of the oldest change that the second copy lacks.

    The state is WARNING while the copy is rebuilt, and CRITICAL while it misses changes or is unreachable. For a
    standby, the age is the time since it last had the whole log.
    """
    limits = thresholds.read(TIME)

    def look() -> CheckResult:
        status = _status(session, serving=False)
        if not status.HasField("replica"):
            return CheckResult("the store has no second copy", state=CheckState.UNKNOWN)
        found = status.replica
        figures = [
            Figure("lag", found.lag_ms, TIME, limits),
            Figure("batches", found.lag_batches, MESSAGES),
            Figure("waiting", found.lag_bytes, SIZE),
        ]
        text = f"{found.role}, {found.state.replace('_', ' ')}, behind for {out.about(found.lag_ms)}"
        if found.error:
            return CheckResult(f"unreachable: {found.error}", figures, CheckState.CRITICAL)
        states = {"local_only": CheckState.CRITICAL, "rejoining": CheckState.WARNING}
        return CheckResult(text, figures, states.get(found.state, CheckState.OK))

    _report(session, "replica", look)


def _status(session: Session, *, serving: bool = True) -> wire.GetStatusResponse:
    """Return the status of the daemon. A daemon that does not serve counts as down."""
    with session.connect() as client:
        found = client.status()
    if serving and out.enum_word(found, "state") != "serving":
        reason = f": {found.state_reason}" if found.state_reason else ""
        raise CommandFailed(f"the daemon is {out.enum_word(found, 'state')}{reason}", ExitCode.UNAVAILABLE)
    return found


def _report(session: Session, name: str, look: Callable[[], CheckResult]) -> None:
    """Print the line of a check and end with its exit code."""
    try:
        result = look()
    except (CommandFailed, DmqError) as error:
        is_down = isinstance(error, CommandFailed) and error.exit_code is ExitCode.UNAVAILABLE
        result = CheckResult(str(error), state=CheckState.CRITICAL if is_down else CheckState.UNKNOWN)
    state = result.final()
    data = "".join(f" {each.performance()}" for each in result.figures)
    text = " ".join(result.text.replace("|", "/").split())  # a bar begins the performance data
    line = f"DMQ {name.upper()} {state.name} - {text}" + (f" |{data}" if data else "")
    plain = {"check": name, "state": state.name, "text": text, "figures": [each.plain() for each in result.figures]}
    session.show(plain, line)
    raise typer.Exit(state)
