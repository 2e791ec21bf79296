"""Redrive and purge on the command line, without a daemon and without waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.admin_source import DAMAGED, LETTERS, FixedSource
from support.fake_admin_client import FakeClient, error_of, install
from support.fake_admin_client import run_dmq as run

from dmq.admin.client import CallFailed, DaemonUnavailable
from dmq.cli import dead, progress
from retry.dead_letter import DeadFilter, JobKind, JobState
from retry.policy import Reason

PURGE = ("dead", "purge", "billing", "--why", "too old")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it. Nobody waits between two looks at a job."""
    monkeypatch.setattr(dead, "pause", lambda seconds: None)
    return install(monkeypatch)


def outcomes(daemon: type[FakeClient]) -> list[str]:
    return [found.outcome for found in daemon.source.letters]


def fail_when(daemon: type[FakeClient], call: str, count: int, error: BaseException) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name == call and daemon.calls.count(call) == count:
            raise error

    return staticmethod(fail)


def test_a_redrive_is_watched_to_its_end(daemon: type[FakeClient]) -> None:
    """The last line counts; the job's number is told at once, for whoever wants to stop it."""
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stdout) == (0, "redriven 3, passed over 1, failed 0\n")
    assert result.stderr == "dmq: job 1: redrive of billing\n"
    assert outcomes(daemon) == ["redriven"] * 4
    assert daemon.calls == ["StartJob", "ListJobs", "ListJobs", "ListJobs", "ListJobs"]


def test_a_redrive_for_programs(daemon: type[FakeClient]) -> None:
    """The job as it ended, and nothing on stderr."""
    result = run("dead", "redrive", "billing", "--id", "D4", "-o", "json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["job_id"], found["kind"], found["state"], found["done"], found["passed"]) == (
        *(1, "REDRIVE", "DONE", 1, 3),
    )
    assert found["filter"]["message_ids"] == ["D4"]


def test_what_is_asked_for_reaches_the_job(daemon: type[FakeClient]) -> None:
    """Filter, target, rate and reason."""
    chosen = ("--reason", "exhausted", "--topic", "orders", "--key", "k4", "--id", "D4", "--since", "1700000000001")
    run("dead", "redrive", "billing", *chosen, "--to", "elsewhere", "--rate", "2.5")
    run(*PURGE, *chosen, "--until", "1800000000000")
    redrive, purge = daemon.source.all_jobs
    meant = DeadFilter(
        reasons=frozenset({Reason.EXHAUSTED}),
        topics=frozenset({"orders"}),
        keys=frozenset({"k4"}),
        message_ids=frozenset({"D4"}),
        since_ms=1_700_000_000_001,
    )
    assert (redrive.kind, redrive.filter, redrive.to_topic, redrive.rate_per_s) == (
        *(JobKind.REDRIVE, meant, "elsewhere", 2.5),
    )
    assert (purge.kind, purge.filter, purge.why) == (
        *(JobKind.PURGE, replace(meant, until_ms=1_800_000_000_000), "too old"),
    )


def test_a_dry_run_counts_and_does_nothing(daemon: type[FakeClient]) -> None:
    """Nobody has to say yes to it; there is no job."""
    daemon.source.letters[0] = replace(LETTERS[0], payload=DAMAGED)
    result = run("dead", "redrive", "billing", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "2 would be redriven, 1 would be passed over, 1 would fail\n"
    assert run(*PURGE, "--dry-run").stdout.startswith("2 would be purged, ")
    assert json.loads(run(*PURGE, "--dry-run", "-o", "json").stdout)["job_id"] == 0
    assert (daemon.source.all_jobs, outcomes(daemon)) == ([], ["", "", "redriven", ""])


def test_a_dry_run_may_take_longer_than_the_deadline(daemon: type[FakeClient]) -> None:
    """It looks at every dead letter within one call; a longer deadline is kept, and so is that of other calls."""
    for timeout, expected_s in (("1s", 600.0), ("20m", 1200.0)):
        daemon.deadlines.clear()
        run("dead", "redrive", "billing", "--dry-run", "--timeout", timeout)
        assert daemon.deadlines == [("StartJob", expected_s)]
    daemon.deadlines.clear()
    run("dead", "redrive", "billing", "--key", "k", "--detach", "--timeout", "1s")
    assert daemon.deadlines == [("StartJob", 1.0)]


def test_a_detached_job_is_started_and_left(daemon: type[FakeClient]) -> None:
    """Its number is all that is told."""
    result = run(*PURGE, "--yes", "--detach")
    assert result.stdout == "job 1 runs; 'dmq dead jobs billing' shows it, 'dmq dead stop 1' ends it\n"
    assert daemon.source.all_jobs[0].state is JobState.RUNNING
    run("dead", "stop", "1")
    assert json.loads(run(*PURGE, "--yes", "--detach", "-o", "json").stdout)["state"] == "RUNNING"


@pytest.mark.parametrize("command", [("dead", "redrive", "billing"), PURGE])
def test_all_of_a_group_needs_a_yes(
    daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """From the command line where nobody can be asked, from a person at a terminal; a filter needs none."""
    done = "purged" if command == PURGE else "redriven"
    result = run(*command)
    assert (result.exit_code, result.stdout, daemon.source.all_jobs) == (2, "", [])
    assert result.stderr.startswith(f"dmq: all 3 dead letters of group billing would be {done}; there is no terminal")
    monkeypatch.setattr("dmq.cli.confirm.is_terminal", lambda: True)
    for answer in (b"n\n", b"\n", b""):
        result = run(*command, stdin=answer)
        assert (result.exit_code, result.stdout, daemon.source.all_jobs) == (1, "", [])
        assert "Go on? [y/N] dmq: aborted" in result.stderr
    result = run(*command, stdin=b"y\n")
    assert result.stdout == f"{done} 3, passed over 1, failed 0\n"
    monkeypatch.setattr("dmq.cli.confirm.is_terminal", lambda: False)
    assert run(*command, "--key", "k4").exit_code == 0


def test_a_group_that_is_gone_may_have_left_letters(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked about them is not told how many."""
    monkeypatch.setattr("dmq.cli.confirm.is_terminal", lambda: True)
    result = run("dead", "redrive", "nobody", stdin=b"n\n")
    assert result.stderr.startswith("dmq: all dead letters of group nobody would be redriven. Go on?")


def test_letters_that_cannot_be_read_are_a_failure(daemon: type[FakeClient]) -> None:
    """Counted, and in the exit code."""
    daemon.source.letters[0] = replace(LETTERS[0], payload=DAMAGED)
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stdout) == (1, "redriven 2, passed over 1, failed 1\n")
    assert result.stderr.endswith(
        "dmq: 1 failed and stay dead: they cannot be read, or their topic or group is gone and they need --to\n"
    )
    daemon.source = FixedSource(letters=[replace(LETTERS[0], payload=DAMAGED)])
    for command in (PURGE, ("dead", "redrive", "billing", "--to", "orders")):
        assert run(*command, "--yes").stderr.endswith("dmq: 1 failed and stay dead: they cannot be read\n")


def test_a_job_that_somebody_stops_is_a_failure(daemon: type[FakeClient]) -> None:
    """The counts are still told."""

    def stop_at_the_third(name: str) -> None:
        if daemon.calls.count("ListJobs") == 3:
            daemon.source.all_jobs[0] = replace(daemon.source.all_jobs[0], state=JobState.STOPPED)

    daemon.before_call = staticmethod(stop_at_the_third)
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stdout) == (1, "redriven 2, passed over 0, failed 0\n")
    assert result.stderr.endswith("dmq: job 1 was stopped before its end\n")


def test_an_interrupt_stops_watching_only(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130; the job goes on, and the command says how to end it."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dead, "pause", interrupted)
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("dmq: no longer watching, but job 1 goes on; 'dmq dead stop 1' ends it\n")
    assert daemon.source.all_jobs[0].state is JobState.RUNNING
    run("dead", "stop", "1")
    failed = error_of(run("dead", "redrive", "billing", "--yes", "-o", "json"))
    assert (failed["kind"], failed["exit_code"]) == ("interrupted", 130)


def test_a_daemon_that_goes_away_while_it_is_watched(daemon: type[FakeClient]) -> None:
    """Exit code 6; the job is not lost."""
    daemon.before_call = fail_when(daemon, "ListJobs", 2, DaemonUnavailable("gone"))
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stdout) == (6, "")
    assert result.stderr.endswith("dmq: gone; job 1 goes on when the daemon does, see 'dmq dead jobs billing'\n")
    run("dead", "stop", "1")
    daemon.before_call = fail_when(daemon, "ListJobs", 3, CallFailed("broken"))
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stderr) == (1, "dmq: job 2: redrive of billing\ndmq: broken\n")


def test_a_start_in_doubt_says_how_to_find_out(daemon: type[FakeClient]) -> None:
    """The job may run; a dry run is never in doubt."""
    daemon.before_call = fail_when(daemon, "StartJob", 1, DaemonUnavailable("gone"))
    result = run("dead", "redrive", "billing", "--yes")
    assert result.exit_code == 6
    assert result.stderr == "dmq: gone (if in doubt, 'dmq dead jobs billing' tells whether it was started)\n"
    daemon.before_call = fail_when(daemon, "StartJob", 2, DaemonUnavailable("gone"))
    assert run("dead", "redrive", "billing", "--dry-run").stderr == "dmq: gone\n"


def test_a_job_that_is_no_longer_listed(daemon: type[FakeClient]) -> None:
    """Nobody can say how it ended."""
    daemon.before_call = staticmethod(lambda name: daemon.source.all_jobs.clear() if name == "ListJobs" else None)
    result = run("dead", "redrive", "billing", "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "job 1 is no longer among the newest jobs" in result.stderr


def test_the_watch_tells_how_far_it_is(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line now and then where there is no terminal; looks get rarer, up to twice a second."""
    waits: list[float] = []
    monkeypatch.setattr(dead, "pause", waits.append)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    result = run("dead", "redrive", "billing", "--yes")
    assert result.stderr.splitlines() == [
        "dmq: job 1: redrive of billing",
        "dmq: job 1: redriven 0, passed over 0, failed 0",
        "dmq: job 1: redriven 1, passed over 0, failed 0",
        "dmq: job 1: redriven 2, passed over 0, failed 0",
        "dmq: job 1: redriven 2, passed over 1, failed 0",
    ]
    assert waits == [0.05, 0.1, 0.2, 0.4]
    waits.clear()
    daemon.source.letters = [replace(each, dead=replace(each.dead, offset=at)) for at, each in enumerate(LETTERS * 2)]
    run("dead", "redrive", "billing", "--yes")
    assert waits[4:] == [0.5] * 4


def test_an_empty_queue_is_done_at_once(daemon: type[FakeClient]) -> None:
    """Nothing to do is no failure, and nothing to watch or to stop."""
    daemon.source.letters = []
    for options in ((), ("--detach",)):
        result = run(*PURGE, "--yes", *options)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "purged 0, passed over 0, failed 0\n", "")


def test_a_refused_job_fails_with_the_daemons_words(daemon: type[FakeClient]) -> None:
    """Another one runs, a name is none, a group is unknown."""
    run("dead", "redrive", "billing", "--yes", "--detach")
    result = run(*PURGE, "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "another job of this group runs" in result.stderr
    assert run("dead", "redrive", "billing", "--key", "k", "--to", "a b").exit_code == 1
    assert run("dead", "redrive", "billing", "--key", "k", "--to", "t", "--all-groups").exit_code == 2
    assert run("dead", "redrive", "billing", "--key", "k", "--rate", "-1").exit_code == 1
    for filters in ((), ("--key", "k")):
        assert run("dead", "redrive", "nobody", "--yes", *filters).exit_code == 3


def test_jobs_are_listed(daemon: type[FakeClient]) -> None:
    """The newest first, of all groups or of one."""
    run("dead", "redrive", "billing", "--yes")
    run(*PURGE, "--key", "k", "--detach")
    assert run("dead", "jobs").stdout.splitlines() == [
        "JOB  KIND     GROUP    STATE    LOOKED AT  DONE  PASSED OVER  FAILED  STARTED AT",
        "  2  purge    billing  running     1 of 5     0            1       0  2023-11-14T22:13:20.000Z",
        "  1  redrive  billing  done        5 of 5     3            1       0  2023-11-14T22:13:20.000Z",
    ]
    assert [job["job_id"] for job in json.loads(run("dead", "jobs", "billing", "-o", "json").stdout)] == [2, 1]
    assert json.loads(run("dead", "jobs", "shipping", "-o", "json").stdout) == []


def test_a_job_is_stopped(daemon: type[FakeClient]) -> None:
    """It says how far it came; one that has ended stays as it is, one that nobody knows is not found."""
    run("dead", "redrive", "billing", "--yes", "--detach")
    assert run("dead", "stop", "1").stdout == "job 1 is stopped: redriven 0, passed over 0, failed 0\n"
    run("dead", "redrive", "billing", "--yes")
    assert json.loads(run("dead", "stop", "2", "-o", "json").stdout)["state"] == "DONE"
    assert run("dead", "stop", "3").exit_code == 3
    assert run("dead", "stop", "0").exit_code == 2


@pytest.mark.parametrize(
    "options", [("--yes",), ("--why",), ("--why", "x", "--to", "t"), ("--why", "x", "--since", "x")]
)
def test_wrong_usage_starts_nothing(daemon: type[FakeClient], options: tuple[str, ...]) -> None:
    """A purge needs a reason, and has no target."""
    result = run("dead", "purge", "billing", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert daemon.source.all_jobs == []
