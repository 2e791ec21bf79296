"""Waiting retries on the command line, without a daemon."""

from __future__ import annotations

import json

import pytest
from support.admin_source import retry
from support.admin_status import NOW
from support.fake_admin_client import FakeClient, error_of, install
from support.fake_admin_client import run_dmq as run

from dmq.admin.client import CallFailed, DaemonUnavailable
from dmq.cli import progress


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


def entries(daemon: type[FakeClient]) -> list[str]:
    return [row.entry for row in daemon.source.waiting]


def test_retries_are_listed_in_the_order_of_their_time(daemon: type[FakeClient]) -> None:
    """When, of what, which attempt, and the name that the other commands take."""
    assert run("retry", "ls", "billing").stdout.splitlines() == [
        "DUE IN  DUE AT                    TOPIC    MESSAGE ID  NEXT ATTEMPT  FIRST FAILED              ENTRY",
        "now     2023-11-14T22:13:19.995Z  orders   M11                    3  2023-11-14T22:12:40.000Z  7-11",
        "5s      2023-11-14T22:13:25.000Z  refunds  M12                    3  2023-11-14T22:12:40.000Z  7-12",
        "29m     2023-11-14T22:42:20.000Z  orders   M11                    3  2023-11-14T22:12:40.000Z  7-13",
    ]
    found = json.loads(run("retry", "ls", "billing", "-o", "json").stdout)
    assert [row["entry"] for row in found] == ["7-11", "7-12", "7-13"]
    assert (found[0]["content"]["keys"], found[0]["content"]["body"]) == (["k1", "k2"], None)


def test_a_list_goes_on_over_short_and_empty_pages(daemon: type[FakeClient]) -> None:
    """One call looks at a bounded number of rows; the end is where the daemon says so."""
    daemon.source.rows_per_call = 1
    found = json.loads(run("retry", "ls", "billing", "--topic", "refunds", "-o", "json").stdout)
    assert [row["entry"] for row in found] == ["7-12"]
    assert daemon.calls.count("ListRetries") == 3


def test_a_list_that_was_cut_says_so(daemon: type[FakeClient]) -> None:
    """On stderr, and not for programs."""
    result = run("retry", "ls", "billing", "--limit", "2")
    assert (len(result.stdout.splitlines()), result.stderr) == (3, "dmq: the first 2; --limit shows more\n")
    result = run("retry", "ls", "billing", "--limit", "2", "-o", "json")
    assert (len(json.loads(result.stdout)), result.stderr) == (2, "")
    assert run("retry", "ls", "billing", "--limit", "4").stderr == ""


def test_statistics_of_all_groups_that_wait(daemon: type[FakeClient]) -> None:
    """How many, when the next, and how many when; groups without retries are left out unless one is named."""
    lines = run("retry", "stats").stdout.splitlines()
    assert lines[:2] == ["GROUP    WAITING  NEXT DUE", "billing        3  2023-11-14T22:13:19.995Z (5ms ago)"]
    assert lines[2:4] == ["", "DUE                                          RETRIES"]
    assert [line.split("  ")[-1].strip() for line in lines[-2:]] == ["#" * 40, "#" * 20]
    found = json.loads(run("retry", "stats", "-o", "json").stdout)
    assert [(group["group"], group["waiting"], group["next_due_at_ms"]) for group in found] == [("billing", 3, NOW - 5)]
    assert [bucket["count"] for bucket in found[0]["due"]] == [2, 1]
    found = json.loads(run("retry", "stats", "shipping", "-o", "json").stdout)
    assert found == [{"group": "shipping", "waiting": 0, "next_due_at_ms": 0, "due": []}]
    assert run("retry", "stats", "shipping").stdout.splitlines()[1:] == ["shipping        0"]


def test_the_next_one_is_found_behind_empty_pages(daemon: type[FakeClient]) -> None:
    """Of a group that is named, too; one that nobody knows is not found."""
    daemon.source.rows_per_call = 1
    assert json.loads(run("retry", "stats", "billing", "-o", "json").stdout)[0]["next_due_at_ms"] == NOW - 5
    assert run("retry", "stats", "nobody").exit_code == 3


@pytest.mark.parametrize(("command", "where"), [("run-now", "visible now"), ("to-dead", "in the dead-letter queue")])
def test_retries_are_moved_by_name(daemon: type[FakeClient], command: str, where: str) -> None:
    """Entries go as they are; a message id means all its retries, wherever they are listed."""
    result = run("retry", command, "billing", "--entry", "7-12", "--entry", "7-99", "--entry", "7-12")
    assert result.stdout == f"1 retry {where}; 1 had been delivered, moved or ended before\n"
    assert "ListRetries" not in daemon.calls
    daemon.source.rows_per_call = 1
    result = run("retry", command, "billing", "--id", "M11", "--id", "gone", "-o", "json")
    assert json.loads(result.stdout) == {"group": "billing", "moved": 2, "gone": 1}
    moved = {"run-now": daemon.source.ran, "to-dead": daemon.source.ended}
    assert moved.pop(command) == [["7-12", "7-99"], ["7-11", "7-13"]]
    assert moved.popitem()[1] == []


@pytest.mark.parametrize("named", [("--entry", "99"), ("--id", "gone")])
def test_a_retry_that_does_not_wait_is_not_found(daemon: type[FakeClient], named: tuple[str, str]) -> None:
    """Exit code 3 where all that were named are gone."""
    result = run("retry", "run-now", "billing", *named)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "dmq: no such retry waits in group billing\n"
    assert error_of(run("retry", "to-dead", "billing", *named, "-o", "json"))["kind"] == "not_found"


def test_many_are_moved_in_chunks(daemon: type[FakeClient]) -> None:
    """All are found before the first is moved: one that fails again at once is not met twice."""
    daemon.source.waiting = [retry(entry) for entry in range(2500)]
    result = run("retry", "run-now", "billing", "--all", "--yes")
    assert (result.stdout, result.stderr) == ("2,500 retries visible now\n", "")
    assert [len(chunk) for chunk in daemon.source.ran] == [1000, 1000, 500]
    assert daemon.calls == ["ListRetries"] * 3 + ["RunRetriesNow"] * 3


def test_long_work_says_where_it_is(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, for people only."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert run("retry", "ls", "billing").stderr == "dmq: retries of billing: 3 found\n"
    assert run("retry", "stats").stderr == "dmq: groups: billing\n"
    daemon.source.waiting = [retry(entry) for entry in range(1200)]
    assert run("retry", "run-now", "billing", "--all", "--yes").stderr.splitlines() == [
        "dmq: retries of billing: 1,000 read, 1,000 meant",
        "dmq: retries of billing: 1,200 read, 1,200 meant",
        "dmq: retries of billing: 1,000 of 1,200",
        "dmq: retries of billing: 1,200 of 1,200",
    ]
    for command in (("ls", "billing"), ("stats",), ("to-dead", "billing", "--all", "--yes")):
        assert run("retry", *command, "-o", "json").stderr == ""


def test_a_topic_means_its_retries_only(daemon: type[FakeClient]) -> None:
    """Of the topic the messages were sent to."""
    assert run("retry", "to-dead", "billing", "--topic", "orders", "--yes").exit_code == 0
    assert daemon.source.ended == [["7-11", "7-13"]]
    for yes in (("--yes",), ()):
        result = run("retry", "to-dead", "billing", "--topic", "orders", *yes)
        assert (result.exit_code, result.stdout) == (0, "0 retries in the dead-letter queue\n")


@pytest.mark.parametrize("chosen", [("--all",), ("--topic", "orders")])
def test_many_need_a_yes(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...]) -> None:
    """From the command line where nobody can be asked, from a person at a terminal; no is no."""
    count = 3 if chosen == ("--all",) else 2
    result = run("retry", "to-dead", "billing", *chosen)
    assert (result.exit_code, result.stdout, entries(daemon)) == (2, "", ["7-11", "7-12", "7-13"])
    named = "" if chosen == ("--all",) else " of topic orders"
    assert f"dmq: {count} retries{named} waiting in group billing would go" in result.stderr
    assert "use --yes" in result.stderr
    monkeypatch.setattr("dmq.cli.confirm.is_terminal", lambda: True)
    result = run("retry", "to-dead", "billing", *chosen, stdin=b"n\n")
    assert (result.exit_code, result.stdout, entries(daemon)) == (1, "", ["7-11", "7-12", "7-13"])
    assert "would go to its dead-letter queue. Go on? [y/N]" in result.stderr
    result = run("retry", "to-dead", "billing", *chosen, stdin=b"y\n")
    assert result.stdout == f"{count} retries in the dead-letter queue\n"


@pytest.mark.parametrize(("failure", "exit_code"), [(DaemonUnavailable("gone"), 6), (CallFailed("gone"), 1)])
def test_a_daemon_that_fails_half_way(daemon: type[FakeClient], failure: Exception, exit_code: int) -> None:
    """The command says how far it came."""
    daemon.source.waiting = [retry(entry) for entry in range(1500)]

    def fail_at_the_second(name: str) -> None:
        if daemon.calls.count("EndRetries") == 2:
            raise failure

    daemon.before_call = staticmethod(fail_at_the_second)
    result = run("retry", "to-dead", "billing", "--all", "--yes")
    assert (result.exit_code, result.stdout, len(daemon.source.waiting)) == (exit_code, "", 500)
    assert result.stderr == "dmq: gone; 1,000 of 1,500 were moved before\n"


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
def test_wrong_usage_moves_nothing(daemon: type[FakeClient], command: str, arguments: tuple[str, ...]) -> None:
    """One way to choose, and only one; nothing is asked of the daemon."""
    result = run("retry", command, "billing", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"see 'dmq retry {command} --help'" in result.stderr
    assert daemon.calls == []


@pytest.mark.parametrize("command", [("ls",), ("run-now", "--all"), ("to-dead", "--entry", "1")])
def test_an_unknown_group_is_not_found(daemon: type[FakeClient], command: tuple[str, ...]) -> None:
    """By every command."""
    result = run("retry", command[0], "nobody", *command[1:])
    assert (result.exit_code, result.stdout) == (3, "")
    assert "consumer group not found" in result.stderr
