"""Waiting retries on the command line."""

from __future__ import annotations

import json

import pytest
from support.forges.messages.letters import entries as entries_of
from support.forges.messages.letters import fail, fail_again
from support.rigs.broker.rig import TOPIC
from support.rigs.commands.fake_admin_client import error_of
from support.rigs.commands.live_cell import NOW, LiveCell

from dmq.admin.client import CallFailed, DaemonUnavailable, NotAllowed
from dmq.broker.failures import waiting_retries as retries
from dmq.cli.bulk import progress

GROUP = "billing"


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """Three retries of a group: M2 of refunds, which is due, then M3 and M1 of orders, that one for the second time."""
    rig = live.rig

    async def fill() -> None:
        await fail(rig, "M1", group=GROUP)
        rig.clock.advance(5_000)
        await fail(rig, "M2", group=GROUP, topic="refunds")
        await rig.pass_ms(5_000)
        await fail_again(rig, group=GROUP)
        await fail(rig, "M3", group=GROUP)
        rig.clock.advance(5_000)

    live.do(fill())
    return live


def entries(daemon: LiveCell) -> list[str]:
    return daemon.do(entries_of(daemon.rig, group=GROUP))


def many(daemon: LiveCell, count: int) -> None:
    """Let so many more wait."""

    async def fill() -> None:
        for first in range(0, count, 32):
            await fail(daemon.rig, *(f"N{number}" for number in range(first, min(first + 32, count))), group=GROUP)

    daemon.do(fill())


def test_retries_are_listed_in_the_order_of_their_time(daemon: LiveCell) -> None:
    """When, of what, which attempt, and the name that the other commands take."""
    second, third, first = entries(daemon)
    assert [line.rstrip() for line in daemon.run("retry", "ls", GROUP).stdout.splitlines()] == [
        "DUE     TOPIC    MESSAGE ID  ATTEMPT  FIRST FAILED  ENTRY",
        f"now     refunds  M2                2  10s ago       {second}",
        f"in 5s   orders   M3                2  5s ago        {third}",
        f"in 25s  orders   M1                3  15s ago       {first}",
    ]
    found = json.loads(daemon.run("retry", "ls", GROUP, "-o", "json").stdout)
    assert [row["entry"] for row in found] == [second, third, first]
    assert (found[0]["content"]["properties"], found[0]["content"]["body"]) == ({"color": "red"}, None)


def test_a_list_continues_over_empty_pages(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call looks at a bounded number of rows; the end is where the daemon says so."""
    for bound in ("ROWS_PER_CALL_MAX", "_ROWS_PER_SCAN"):
        monkeypatch.setattr(retries, bound, 1)
    daemon.do(fail(daemon.rig, "R1", group=GROUP, topic="refunds"))
    found = json.loads(daemon.run("retry", "ls", GROUP, "--topic", "refunds", "-o", "json").stdout)
    assert [row["message_id"] for row in found] == ["M2", "R1"]
    assert daemon.calls.count("ListRetries") >= 4


def test_a_truncated_list_is_marked(daemon: LiveCell) -> None:
    """On stderr, and not for programs."""
    result = daemon.run("retry", "ls", "billing", "--limit", "2")
    assert (len(result.stdout.splitlines()), result.stderr) == (3, "dmq: the first 2; --limit shows more\n")
    result = daemon.run("retry", "ls", "billing", "--limit", "2", "-o", "json")
    assert (len(json.loads(result.stdout)), result.stderr) == (2, "")
    assert daemon.run("retry", "ls", "billing", "--limit", "4").stderr == ""


def test_statistics_of_all_groups_that_wait(daemon: LiveCell) -> None:
    """How many, when the next, and how many when; groups without retries are left out unless one is named.

    A paused group gets none of them.
    """
    daemon.run("group", "create", "shipping")
    daemon.run("group", "pause", "billing")
    assert daemon.run("retry", "stats").stdout.splitlines() == [
        "GROUP    STATE   RETRYING  NEXT DUE",
        "billing  paused         3  now",
        "",
        "DUE            RETRIES",
        "within 25s           2  ########################################",
        "within 1m 25s        1  ####################",
    ]
    (found,) = json.loads(daemon.run("retry", "stats", "-o", "json").stdout)
    assert (found["group"], found["waiting"], found["next_due_at_ms"]) == (GROUP, 3, NOW + 15_000)
    assert [bucket["count"] for bucket in found["due"]] == [2, 1]
    found = json.loads(daemon.run("retry", "stats", "shipping", "-o", "json").stdout)
    assert found == [{"group": "shipping", "waiting": 0, "next_due_at_ms": 0, "due": []}]
    assert daemon.run("retry", "stats", "shipping").stdout.splitlines()[1:] == ["shipping  active         0"]
    assert daemon.run("retry", "stats", "nobody").exit_code == 3


@pytest.mark.parametrize(("command", "where"), [("run-now", "visible now"), ("to-dead", "in the dead-letter queue")])
def test_retries_are_moved_by_name(daemon: LiveCell, command: str, where: str) -> None:
    """Entries go as they are; a message id means all its retries, of whatever topic. What does not wait is named."""
    daemon.do(fail(daemon.rig, "M2", group=GROUP))
    of_refunds, third, of_orders, first = entries(daemon)
    result = daemon.run("retry", command, GROUP, "--entry", third, "--entry", f"{third}9", "--entry", third)
    assert result.stdout == f"1 retry {where}; 1 had been delivered, moved or ended before\n"
    told = f"dmq: not among the waiting retries of group billing: {third}9\n"
    assert (result.exit_code, result.stderr) == (7, told)
    assert "ListRetries" not in daemon.calls
    assert entries(daemon) == [of_refunds, of_orders, first]
    result = daemon.run("retry", command, GROUP, "--id", "M2", "--id", "gone", "-o", "json")
    assert json.loads(result.stdout) == {"group": GROUP, "moved": 2, "gone": 1, "missing": ["gone"]}
    assert (result.exit_code, error_of(result)["kind"]) == (7, "partial")
    assert entries(daemon) == [first]
    dead = json.loads(daemon.run("dead", "ls", GROUP, "-o", "json").stdout)
    assert [letter["message_id"] for letter in dead] == (["M3", "M2", "M2"] if command == "to-dead" else [])


@pytest.mark.parametrize("named", [("--entry", f"{NOW}-99"), ("--id", "gone")])
def test_a_retry_that_does_not_wait_is_not_found(daemon: LiveCell, named: tuple[str, str]) -> None:
    """Exit code 3 where all that were named are gone."""
    result = daemon.run("retry", "run-now", GROUP, *named)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == f"dmq: not among the waiting retries of group billing: {named[1]}\n"
    assert daemon.run("retry", "run-now", GROUP, *named, "--dry-run").exit_code == 3
    assert error_of(daemon.run("retry", "to-dead", GROUP, *named, "-o", "json"))["kind"] == "not_found"


def test_a_dry_run_counts_and_moves_nothing(daemon: LiveCell) -> None:
    """By name or by many, with what is missing; nobody has to say yes."""
    there = entries(daemon)
    for options, matching, missing in (
        (("--all",), 3, []),
        (("--topic", "orders"), 2, []),
        (("--entry", there[0], "--entry", "1-9"), 1, ["1-9"]),
        (("--id", "M2", "--id", "x"), 1, ["x"]),
    ):
        result = daemon.run("retry", "to-dead", GROUP, *options, "--dry-run", "-o", "json")
        told = {"group": GROUP, "matching": matching, "missing": missing, "is_dry_run": True}
        assert (json.loads(result.stdout), result.exit_code) == (told, 7 if missing else 0)
    said = daemon.run("retry", "to-dead", GROUP, "--all", "--dry-run").stdout
    assert said == "3 retries waiting in group billing would go to its dead-letter queue\n"
    assert entries(daemon) == there


def test_many_are_moved_in_chunks(daemon: LiveCell) -> None:
    """All are found before the first is moved: one that fails again at once is not met twice."""
    many(daemon, 2_097)
    result = daemon.run("retry", "run-now", GROUP, "--all", "--yes")
    assert (result.stdout, result.stderr) == ("2,100 retries visible now\n", "")
    assert daemon.calls == ["ListRetries"] * 3 + ["RunRetriesNow"] * 3
    assert entries(daemon) == []


def test_long_work_reports_its_progress(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, for people only."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert daemon.run("retry", "ls", GROUP).stderr == "dmq: retries of billing: 3 found\n"
    assert daemon.run("retry", "stats").stderr == "dmq: groups: billing\n"
    many(daemon, 1_197)
    assert daemon.run("retry", "run-now", GROUP, "--all", "--yes").stderr.splitlines() == [
        "dmq: retries of billing: 1,000 read, 1,000 selected",
        "dmq: retries of billing: 1,200 read, 1,200 selected",
        "dmq: retries of billing: 1,000 of 1,200",
        "dmq: retries of billing: 1,200 of 1,200",
    ]
    for command in (("ls", GROUP), ("stats",), ("to-dead", GROUP, "--all", "--yes")):
        assert daemon.run("retry", *command, "-o", "json").stderr == ""


def test_a_topic_means_its_retries_only(daemon: LiveCell) -> None:
    """Of the topic the messages were sent to."""
    of_refunds = entries(daemon)[0]
    assert daemon.run("retry", "to-dead", GROUP, "--topic", TOPIC, "--yes").exit_code == 0
    assert entries(daemon) == [of_refunds]
    for yes in (("--yes",), ()):
        result = daemon.run("retry", "to-dead", GROUP, "--topic", TOPIC, *yes)
        assert (result.exit_code, result.stdout) == (0, "0 retries in the dead-letter queue\n")


@pytest.mark.parametrize(("failure", "exit_code"), [(DaemonUnavailable("gone"), 6), (CallFailed("gone"), 1)])
def test_a_daemon_that_fails_half_way(daemon: LiveCell, failure: Exception, exit_code: int) -> None:
    """The command shows the result so far and the rest."""
    many(daemon, 1_497)

    def fail_at_the_second(name: str) -> None:
        if daemon.calls.count("EndRetries") == 2:
            raise failure

    daemon.before_call(fail_at_the_second)
    result = daemon.run("retry", "to-dead", "billing", "--all", "--yes")
    assert (result.exit_code, len(entries(daemon))) == (exit_code, 500)
    assert result.stdout == "1,000 retries in the dead-letter queue\n"
    assert result.stderr == "dmq: gone; 1,000 of 1,500 were processed; repeat the command for the others\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--all", "--topic", "orders"),
        ("--entry", "1", "--id", "x"),
        ("--topic", ""),
    ],
)
@pytest.mark.parametrize("command", ["run-now", "to-dead"])
def test_wrong_usage_moves_nothing(daemon: LiveCell, command: str, arguments: tuple[str, ...]) -> None:
    """One way to choose, and only one; nothing is asked of the daemon."""
    result = daemon.run("retry", command, "billing", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"see 'dmq retry {command} --help'" in result.stderr
    assert daemon.calls == []


def test_a_key_that_may_not_ask_for_the_status_gets_its_lists(daemon: LiveCell) -> None:
    """Times are then relative to the clock of this host."""

    def before(name: str) -> None:
        if name == "GetStatus":
            raise NotAllowed("lacks the role viewer")

    daemon.before_call(before)
    result = daemon.run("retry", "ls", GROUP)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 4)
    assert daemon.run("msg", "ls", "orders").exit_code == 0
