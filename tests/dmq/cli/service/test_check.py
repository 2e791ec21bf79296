"""Checks for Nagios: one line on stdout, performance data, and the exit codes of plugins."""

from __future__ import annotations

import json
import re

import pytest
from support.forges.wire.admin_status import NOW, STATUS
from support.rigs.commands.fake_admin_client import FakeClient, install, run_dmq

from dmq.admin import admin_v1 as wire
from dmq.admin.client import DaemonUnavailable, NotAllowed
from dmq.cli.service.check import MESSAGES, SIZE, TIME, CheckResult, CheckState, Figure, FigureLimits

LINE = re.compile(r"DMQ( [A-Z]+)? (OK|WARNING|CRITICAL|UNKNOWN) - [^|\n]+( \|( [\w]+=\d+(ms|B)?;\d*:?;\d*:?;0)+)?\n")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


def status(**changed: object) -> wire.GetStatusResponse:
    """Return the status with other parts; None leaves one out."""
    found = wire.GetStatusResponse()
    found.CopyFrom(STATUS)
    for name, value in changed.items():
        found.ClearField(name)
        if value is not None and isinstance(value, int):
            setattr(found, name, value)
        elif value is not None:
            getattr(found, name).CopyFrom(value)
    return found


def check(*arguments: str) -> tuple[int, str]:
    """Run a check, and return its exit code and its one line."""
    result = run_dmq("check", *arguments)
    assert result.stderr == ""
    assert LINE.fullmatch(result.stdout), result.stdout
    return result.exit_code, result.stdout.rstrip("\n")


GIB = 2**30


@pytest.mark.parametrize(
    ("name", "warn", "critical", "changed", "code"),
    [
        ("late", "5s", "1m", {"cluster": None}, 0),
        ("late", "5s", "1m", {"cluster": None, "timeline": wire.Timeline(next_due_at_ms=NOW - 5_000)}, 0),
        ("late", "5s", "1m", {"cluster": None, "timeline": wire.Timeline(next_due_at_ms=NOW - 5_001)}, 1),
        ("late", "5s", "1m", {"cluster": None, "timeline": wire.Timeline(next_due_at_ms=NOW - 60_001)}, 2),
        ("late", "1s", "4s", {}, 2),  # the cluster has been unavailable for 5 s
        ("late", "1s", "1m", {"state": wire.STARTING}, 2),
        ("disk", "1GiB", "512MiB", {}, 0),
        ("disk", "2GiB", "1GiB", {}, 1),
        ("disk", "4GiB", "2GiB", {}, 2),
        ("disk", "1GiB", "1MiB", {"disk": wire.Disk(free_bytes=2 * GIB, refuses_sends=True)}, 2),
        ("audit", "1m", "5m", {}, 0),
        ("audit", "30s", "5m", {}, 1),
        ("audit", "1m", "5m", {"outbox": wire.Outbox(trail="t", lost_rows=1)}, 2),
        ("audit", "1m", "5m", {"outbox": wire.Outbox(trail="t", export_error="no | room")}, 2),
        ("audit", "1m", "5m", {"outbox": wire.Outbox()}, 3),
        ("replica", "1s", "1m", {}, 2),  # unreachable
        ("replica", "1s", "1m", {"replica": wire.Replica(state="following", role="primary")}, 0),
        ("replica", "1s", "1m", {"replica": wire.Replica(state="following", lag_ms=1_001)}, 1),
        ("replica", "1s", "1m", {"replica": wire.Replica(state="rejoining")}, 1),
        ("replica", "1s", "1m", {"replica": wire.Replica(state="local_only")}, 2),
        ("replica", "1s", "1m", {"replica": wire.Replica(state="following", role="standby", lag_ms=61_000)}, 2),
        ("replica", "1s", "1m", {"replica": None}, 3),
    ],
)
def test_the_status_of_a_daemon(
    daemon: type[FakeClient], name: str, warn: str, critical: str, changed: dict[str, object], code: int
) -> None:
    """Each check at its bounds, which are still good, and in the states that are bad without a bound."""
    daemon.answers["GetStatus"] = status(**changed)
    assert check(name, "-w", warn, "-c", critical)[0] == code


def test_the_line_of_a_check(daemon: type[FakeClient]) -> None:
    """Text, a bar, then each figure with its unit and thresholds; those of a minimum are ranges."""
    line = check("disk", "--warn", "2GiB", "--critical", "1GiB")[1]
    assert line == (
        "DMQ DISK WARNING - 1GiB free, sends refused below 32MiB |"
        " free=1073741824B;2147483648:;1073741824:;0 low_water=33554432B;;;0"
    )
    line = check("audit", "--warn", "1m", "--critical", "5m")[1]
    assert line.endswith("| export_lag=42000ms;60000;300000;0 outbox=2048B;;;0 lost=0;;;0")


def test_lag_is_that_of_the_worst_group(daemon: type[FakeClient]) -> None:
    """By messages or by age, as the thresholds are; one group can be named."""
    groups = [
        wire.Group(name="few-but-old", unread_messages=3, oldest_unread_age_ms=600_000),
        wire.Group(name="many", unread_messages=5_000, oldest_unread_age_ms=1_000),
        wire.Group(name="unknown"),
    ]
    daemon.answers["ListGroups"] = wire.ListGroupsResponse(groups=groups)
    daemon.answers["GetGroup"] = wire.GetGroupResponse(group=groups[1])
    code, line = check("lag", "-w", "1000", "-c", "10000")
    assert (code, line) == (
        1,
        "DMQ LAG WARNING - group many: 5,000 unread, the oldest for 1s | unread=5000;1000;10000;0 oldest=1000ms;;;0",
    )
    code, line = check("lag", "-w", "1m", "-c", "5m")
    assert (code, "few-but-old" in line, "oldest=600000ms;60000;300000;0" in line) == (2, True, True)
    assert check("lag", "-w", "1m", "-c", "5m", "--group", "many")[0] == 0
    daemon.answers["ListGroups"] = wire.ListGroupsResponse(groups=groups[2:])
    assert check("lag", "-w", "1", "-c", "2")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "the name of a check is expected: lag, late, disk, audit, replica"),
        (("nosuch",), "No such command 'nosuch'"),
        (("late",), "Missing option '--warn'"),
        (("late", "-w", "1s"), "Missing option '--critical'"),
        (("late", "-w", "2m", "-c", "1m"), "'1m' is refused: at least 2m is expected"),
        (("disk", "-w", "1GiB", "-c", "2GiB"), "'2GiB' is refused: at most 1GiB is expected"),
        (("late", "-w", "1000", "-c", "1m"), "a duration needs a unit"),
        (("disk", "-w", "much", "-c", "1"), "a size is expected"),
        (("lag", "-w", "10", "-c", "5m"), "a number is expected, as for the other threshold"),
        (("late", "-w", "1s", "-c", "1m", "--timeout", "x"), "--timeout"),
        (("late", "-w", "1s", "-c", "1m", "--no-such"), "--no-such"),
    ],
)
def test_wrong_usage_is_unknown(daemon: type[FakeClient], arguments: tuple[str, ...], text: str) -> None:
    """Exit code 3 and one line on stdout, where monitors read it; the daemon is not asked."""
    code, line = check(*arguments)
    assert (code, line.startswith("DMQ UNKNOWN - "), text in line) == (3, True, True), line
    assert daemon.opened == []


def test_a_daemon_that_is_down_is_critical(daemon: type[FakeClient]) -> None:
    """As a service that does not run. A key without the right to look is unknown."""
    daemon.failure = DaemonUnavailable("no daemon answers at 127.0.0.1:8081")
    assert check("late", "-w", "1s", "-c", "1m") == (2, "DMQ LATE CRITICAL - no daemon answers at 127.0.0.1:8081")
    daemon.failure = NotAllowed("the key has no right to look")
    assert check("late", "-w", "1s", "-c", "1m")[0] == 3


def test_a_check_for_programs(daemon: type[FakeClient]) -> None:
    """The same state, text and figures, and the same exit code."""
    result = run_dmq("check", "disk", "-w", "2GiB", "-c", "1GiB", "-o", "json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["check"], found["state"]) == ("disk", "WARNING")
    assert found["figures"][0] == {
        "name": "free", "value": GIB, "unit": "B", "warn": 2 * GIB, "critical": GIB,
    }  # fmt: skip


def test_the_worst_figure_decides() -> None:
    """A value at its threshold is good, beyond it is bad; the check itself can be worse than its figures."""
    above, below = FigureLimits(10, 20), FigureLimits(20, 10, is_minimum=True)
    assert [above.state_of(each) for each in (10, 11, 20, 21)] == [0, 1, 1, 2]
    assert [below.state_of(each) for each in (20, 19, 10, 9)] == [0, 1, 1, 2]
    figures = [Figure("a", 11, MESSAGES, above), Figure("b", 9, SIZE, below), Figure("c", 99, TIME)]
    assert CheckResult("", figures).final() is CheckState.CRITICAL
    assert CheckResult("", figures[:1], CheckState.CRITICAL).final() is CheckState.CRITICAL
    assert CheckResult("").final() is CheckState.OK
