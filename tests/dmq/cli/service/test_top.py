"""One screen of a daemon: its figures and their order."""

from __future__ import annotations

import json

import pytest
from support.forges.wire.admin_status import NOW, STATUS
from support.rigs.commands.fake_admin_client import FakeClient, install, run_dmq

from dmq.admin import admin_v1 as wire
from dmq.cli.service.top import LiveFigures
from dmq.cli.session.options import Session

ONCE = ("top", "--once", "--interval", "100ms")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon with two topics and two groups; set its class attributes to change it."""
    daemon = install(monkeypatch)
    topics = [
        wire.Topic(name="refunds", pending=1, stored=9),
        wire.Topic(name="orders", pending=20, held=2, stored=3, paused_since_ms=NOW),
        wire.Topic(name="%DLQ%billing", stored=99),
    ]
    groups = [
        wire.Group(name="idle"),
        wire.Group(
            name="billing", unread_messages=7, oldest_unread_age_ms=65_000, waiting=3, dead=2, leased=1, deliver_rate=50
        ),
    ]
    minutes = [wire.DueBucket(until_ms=NOW + 60_000, count=2), wire.DueBucket(until_ms=NOW + 120_000, count=3)]
    hours = [wire.DueBucket(until_ms=NOW + 3_600_000, count=5), wire.DueBucket(until_ms=NOW + 7_200_000, count=4)]
    daemon.answers |= {
        "ListTopics": wire.ListTopicsResponse(topics=topics),
        "ListGroups": wire.ListGroupsResponse(groups=groups),
        "GetDueHistogram": wire.GetDueHistogramResponse(now_ms=NOW, overdue=1, minutes=minutes, hours=hours, later=6),
    }
    return daemon


def status(**changed: object) -> wire.GetStatusResponse:
    """Return the status with other parts."""
    found = wire.GetStatusResponse()
    found.CopyFrom(STATUS)
    found.MergeFrom(wire.GetStatusResponse(**changed))  # type: ignore[arg-type]  # its fields
    return found


def test_the_figures_of_a_daemon(daemon: type[FakeClient]) -> None:
    """State, rates, pending, due times, lateness, failures, disk and replica; the fullest topics and groups first."""
    result = run_dmq(*ONCE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "state       serving, up 1h 2m",
        "per second  accepted -, delivered -, acked -",  # the clock of this daemon stands still
        "pending     1,000,000, 2 overdue",
        "due         this minute 2, within an hour 3, within a day 4, later 6",
        "lateness    p50 0.8ms, p99 3.25ms, max 1.2s",
        "failed      3 retries, 2 dead letters",
        "disk        1GiB free, sends refused below 32MiB",
        "replica     async, following, behind for 750ms, UNREACHABLE: no answer",
        "",
        "TOPIC    STATE   PENDING  HELD  STORED",
        "orders   paused       20     2       3",
        "refunds  active        1     0       9",
        "",
        "GROUP    STATE   UNREAD  OLDEST  RETRYING  DEAD  LEASED",
        "billing  50/s         7   1m 5s         3     2       1",
        "idle     active       -                 0     0       0",
    ]


def test_states_that_need_a_person_are_loud(daemon: type[FakeClient]) -> None:
    """A pause, a refused send, a stopped trail, a daemon that does not serve."""
    found = status(state=wire.NOT_SERVING, state_reason="disk failed")
    found.timeline.paused_topics, found.timeline.paused_groups, found.timeline.held = 2, 1, 40
    found.disk.refuses_sends, found.outbox.export_error = True, "no room"
    daemon.answers["GetStatus"] = found
    printed = run_dmq(*ONCE).stdout
    for each in ("not_serving: disk failed", "2 topics, 1 group", "40 held", "SENDS REFUSED", "STOPPED: no room"):
        assert each in printed


def test_a_standby_has_its_state_and_its_copy_only(daemon: type[FakeClient]) -> None:
    """It answers no other call."""
    found = status(state=wire.NOT_SERVING, state_reason="standby of a:1")
    found.replica.role, found.replica.error = "standby", ""
    daemon.answers["GetStatus"] = found
    assert run_dmq(*ONCE).stdout.splitlines() == [
        "state    not_serving: standby of a:1, up 1h 2m",
        "replica  standby, had the whole log 750ms ago",
    ]


def test_figures_for_programs(daemon: type[FakeClient]) -> None:
    """The same figures, with the fields of the protocol."""
    found = json.loads(run_dmq(*ONCE, "-o", "json").stdout)
    assert found["status"]["state"] == "SERVING"
    assert found["due"] == {"overdue": 1, "minute": 2, "hour": 3, "day": 4, "later": 6}
    assert (found["retrying"], found["dead"], found["rates"]) == (3, 2, None)
    assert [each["name"] for each in found["topics"]] == ["orders", "refunds"]
    assert [each["name"] for each in found["groups"]] == ["billing", "idle"]


def test_rates_are_those_of_one_run(daemon: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    """Per second between the first and the last refresh; a restart begins again."""
    figures = LiveFigures(Session())
    for second, accepted in enumerate((0, 100, 3_000)):
        daemon.answers["GetStatus"] = status(now_ms=NOW + second * 1000, totals=wire.Totals(accepted=accepted))
        figures.draw()
    assert "accepted 1,495, delivered 0, acked 0" in capsys.readouterr().out
    daemon.answers["GetStatus"] = status(
        now_ms=NOW + 9_000, started_at_ms=NOW + 8_000, totals=wire.Totals(accepted=9_999)
    )
    figures.draw()
    assert "accepted -" in capsys.readouterr().out
