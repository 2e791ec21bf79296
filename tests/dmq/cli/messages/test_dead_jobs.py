"""Redrive and purge on the command line; nobody waits between two looks at a job but for the job itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest.mock import patch

import pytest
from support.forges.messages.letters import a_message, die
from support.rigs.broker.rig import until
from support.rigs.commands.fake_admin_client import error_of
from support.rigs.commands.live_cell import LiveCell, WatchedClient

from dmq.admin.client import CallFailed, DaemonUnavailable
from dmq.broker.operations import jobs as job_engine
from dmq.cli.bulk import jobs as watched
from dmq.cli.bulk import progress
from retry.dead_letter import DeadFilter, Job, JobKind, JobState
from retry.policy import Reason

GROUP = "billing"
PURGE = ("dead", "purge", GROUP, "--why", "too old")
REDRIVE = ("dead", "redrive", GROUP)
SLOW = ("--rate", "0.001")  # one message at once, the next one when the clock moves
SLOW_MS = 1_000_000


@pytest.fixture
def daemon(live: LiveCell, monkeypatch: pytest.MonkeyPatch) -> LiveCell:
    """Three dead letters. Whoever watches a job looks again when it has done something, or ended."""
    monkeypatch.setattr(job_engine, "_PAUSE_S_MAX", 0.001)  # how soon a slow job sees that the clock moved
    monkeypatch.setattr(watched, "pause", lambda seconds: step(live))
    live.do(die(live.rig, *(a_message(f"D{number}", keys=(f"k{number}",)) for number in range(3)), group=GROUP))
    return live


def jobs(daemon: LiveCell) -> list[Job]:
    """All jobs, in the order of their start."""
    return sorted(daemon.rig.broker.dead_letters.jobs(), key=lambda job: job.job_id)


def step(daemon: LiveCell) -> None:
    """Let the newest job finish, or one that is slow do one message more than it had when this was called."""
    looks = daemon.calls.count("ListJobs")

    async def work() -> None:
        if looks:
            daemon.rig.clock.advance(SLOW_MS)
        await until(lambda: jobs(daemon)[-1].done > looks or jobs(daemon)[-1].state is not JobState.RUNNING)
        if not jobs(daemon)[-1].rate_per_s:
            await until(lambda: jobs(daemon)[-1].state is not JobState.RUNNING)

    daemon.do(work())


def left(daemon: LiveCell) -> list[str]:
    """The letters without an outcome."""
    return [letter["message_id"] for letter in json.loads(daemon.run("dead", "ls", GROUP, "-o", "json").stdout)]


def add_damaged(daemon: LiveCell) -> None:
    """Let a message die that cannot be read."""
    daemon.do(die(daemon.rig, a_message("X")._replace(payload=b"\xff\xff"), group=GROUP))


def fail_when(daemon: LiveCell, call: str, count: int, error: BaseException) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name == call and daemon.calls.count(call) == count:
            raise error

    return fail


def test_a_redrive_is_watched_to_its_end(daemon: LiveCell) -> None:
    """The last line counts; the job's number is told at once, for whoever wants to stop it."""
    result = daemon.run(*REDRIVE, "--yes")
    assert (result.exit_code, result.stdout) == (0, "redriven 3, skipped 0, failed 0\n")
    assert result.stderr == "dmq: job 1: redrive of billing\n"
    assert daemon.calls == ["StartJob", "ListJobs"]
    assert left(daemon) == []


def test_a_redrive_for_programs(daemon: LiveCell) -> None:
    """The job as it ended, and nothing on stderr."""
    result = daemon.run(*REDRIVE, "--id", "D0", "-o", "json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["job_id"], found["kind"], found["state"], found["done"], found["passed"]) == (
        *(1, "REDRIVE", "DONE", 1, 2),
    )
    assert found["filter"]["message_ids"] == ["D0"]
    assert left(daemon) == ["D1", "D2"]


def test_the_request_reaches_the_job(daemon: LiveCell) -> None:
    """Filter, target, rate and reason."""
    daemon.run("topic", "create", "elsewhere")
    daemon.do(die(daemon.rig, *(a_message(f"D{number}", keys=("k4",)) for number in (4, 5)), group=GROUP))
    when = str(json.loads(daemon.run("dead", "show", GROUP, "D4", "-o", "json").stdout)[0]["last_failed_at_ms"])
    chosen = ("--reason", "forwarded", "--topic", "orders", "--key", "k4", "--id", "D4", "--since", when)
    assert daemon.run(*REDRIVE, *chosen, "--to", "elsewhere", "--rate", "2.5").exit_code == 0
    chosen = ("--reason", "forwarded", "--topic", "orders", "--key", "k4", "--id", "D5", "--since", when)
    assert daemon.run(*PURGE, *chosen, "--until", "1800000000000").exit_code == 0
    redrive, purge = jobs(daemon)
    meant = DeadFilter(
        reasons=frozenset({Reason.FORWARDED}),
        topics=frozenset({"orders"}),
        keys=frozenset({"k4"}),
        message_ids=frozenset({"D4"}),
        since_ms=int(when),
    )
    assert (redrive.kind, redrive.filter, redrive.to_topic, redrive.rate_per_s) == (
        *(JobKind.REDRIVE, meant, "elsewhere", 2.5),
    )
    assert (purge.kind, purge.filter.until_ms, purge.why) == (JobKind.PURGE, 1_800_000_000_000, "too old")


def test_letters_that_are_named_and_not_there(daemon: LiveCell) -> None:
    """Each is named: not found if it is all; else those that are there are done, and the exit code says: in part."""
    for command, done in ((REDRIVE, "redriven"), (PURGE, "purged")):
        for options in ((), ("--dry-run",)):
            result = daemon.run(*command, "--id", "nonono", "--id", "no", *options)
            assert (result.exit_code, result.stdout, jobs(daemon)) == (3, "", [])
            told = "not among the dead letters of group billing without an outcome: nonono, no"
            assert result.stderr == f"dmq: {told}\n"
        result = daemon.run(*command, "--id", "D0", "--id", "no", "--dry-run")
        assert (result.exit_code, result.stdout[:16].strip(), jobs(daemon)) == (
            7,
            f"1 would be {done}"[:16].strip(),
            [],
        )
        result = daemon.run(*command, "--id", "D0", "--key", "k1")
        assert (result.exit_code, "without an outcome that the other options mean: D0" in result.stderr) == (3, True)
    result = daemon.run(*REDRIVE, "--id", "D0", "--id", "no")
    assert (result.exit_code, result.stdout, left(daemon)) == (7, "redriven 1, skipped 2, failed 0\n", ["D1", "D2"])
    assert result.stderr.endswith("without an outcome: no\n")
    assert daemon.run(*PURGE, "--id", "D0").exit_code == 3


def test_a_redrive_makes_no_topic(daemon: LiveCell) -> None:
    """A misspelt name is refused before anything is changed, and how to make one is said."""
    for options in (("--yes",), ("--dry-run",), ("--id", "D0")):
        result = daemon.run(*REDRIVE, "--to", "brandnew", *options)
        assert (result.exit_code, result.stdout, "'dmq topic create'" in result.stderr) == (3, "", True)
    assert "brandnew" not in daemon.run("topic", "ls").stdout
    assert (jobs(daemon), len(left(daemon))) == ([], 3)


def test_a_dry_run_counts_and_does_nothing(daemon: LiveCell) -> None:
    """Nobody has to say yes to it; there is no job."""
    add_damaged(daemon)
    result = daemon.run(*REDRIVE, "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "3 would be redriven, 0 would be skipped, 1 would fail\n"
    assert daemon.run(*PURGE, "--dry-run").stdout.startswith("4 would be purged, ")
    assert json.loads(daemon.run(*PURGE, "--dry-run", "-o", "json").stdout)["job_id"] == 0
    assert (jobs(daemon), left(daemon)) == ([], ["D0", "D1", "D2", "X"])


def test_a_dry_run_may_take_longer_than_the_deadline(daemon: LiveCell) -> None:
    """It looks at every dead letter within one call; a longer deadline is kept, and so is that of other calls."""
    for timeout, expected_s in (("1s", 600.0), ("20m", 1200.0)):
        daemon.deadlines.clear()
        daemon.run(*REDRIVE, "--dry-run", "--timeout", timeout)
        assert daemon.deadlines == [("StartJob", expected_s)]
    daemon.deadlines.clear()
    daemon.run(*REDRIVE, "--key", "k", "--detach", "--yes", "--timeout", "1s")
    assert daemon.deadlines == [("StartJob", 1.0)]


def test_a_detached_job_is_started_and_left(daemon: LiveCell) -> None:
    """Its number is all that is told."""
    result = daemon.run(*REDRIVE, "--yes", "--detach", *SLOW)
    assert result.stdout == "job 1 runs; 'dmq dead jobs billing' shows it, 'dmq dead stop 1' ends it\n"
    assert jobs(daemon)[0].state is JobState.RUNNING
    daemon.run("dead", "stop", "1")
    assert json.loads(daemon.run(*PURGE, "--yes", "--detach", "-o", "json").stdout)["state"] == "RUNNING"


@pytest.mark.parametrize("command", [REDRIVE, PURGE])
def test_a_change_of_nothing_needs_no_confirmation(daemon: LiveCell, command: tuple[str, ...]) -> None:
    """It says so and ends; no job is started. What is named needs no question either."""
    done = "purged" if command == PURGE else "redriven"
    result = daemon.run(*command, "--key", "none")
    assert (result.exit_code, result.stderr, jobs(daemon)) == (0, "", [])
    assert result.stdout == f"0 would be {done}, 3 would be skipped, 0 would fail\n"
    assert daemon.run(*command, "--id", "D0").exit_code == 0


def test_a_group_that_is_gone_may_have_left_letters(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked about them is told how many all the same."""
    daemon.run("group", "rm", GROUP, "--force", "--yes")
    monkeypatch.setattr("dmq.cli.bulk.confirm.is_terminal", lambda: True)
    result = daemon.run(*PURGE, stdin=b"n\n")
    assert result.stderr.startswith("dmq: 3 dead letters of group billing would be purged. Continue?")


def test_letters_that_cannot_be_read_are_a_failure(daemon: LiveCell) -> None:
    """Counted, and in the exit code: 7 beside others that were done, 1 if none was."""
    add_damaged(daemon)
    result = daemon.run(*REDRIVE, "--yes")
    assert (result.exit_code, result.stdout) == (7, "redriven 3, skipped 0, failed 1\n")
    assert result.stderr.endswith(
        "dmq: 1 failed and stay dead: they cannot be read, or their topic or group is gone and they need --to\n"
    )
    result = daemon.run(*REDRIVE, "--to", "orders", "--yes")
    assert result.exit_code == 1
    assert result.stderr.endswith("dmq: 1 failed and stay dead: they cannot be read\n")


def test_a_stopped_job_is_a_failure(daemon: LiveCell) -> None:
    """The counts are still told."""

    def stop_at_the_second(name: str) -> None:
        if daemon.calls.count("ListJobs") == 2 and name == "ListJobs":
            daemon.do(daemon.rig.broker.dead_letters.stop(1))

    daemon.before_call(stop_at_the_second)
    result = daemon.run(*REDRIVE, "--yes", *SLOW)
    assert (result.exit_code, result.stdout) == (1, "redriven 2, skipped 0, failed 0\n")
    end = "dmq: job 1 was stopped before it finished; 'dmq dead resume 1' continues it\n"
    assert result.stderr.endswith(end)


def test_an_interrupt_stops_watching_only(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130; the job goes on, and the command says how to end it."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watched, "pause", interrupted)
    result = daemon.run(*REDRIVE, "--yes", *SLOW)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("dmq: job 1 continues in the daemon; 'dmq dead stop 1' stops it\n")
    assert jobs(daemon)[0].state is JobState.RUNNING
    daemon.run("dead", "stop", "1")
    failed = error_of(daemon.run(*REDRIVE, "--yes", *SLOW, "-o", "json"))
    assert (failed["kind"], failed["exit_code"]) == ("interrupted", 130)


def test_a_daemon_that_goes_away_while_it_is_watched(daemon: LiveCell) -> None:
    """Exit code 6; the job is not lost."""
    daemon.before_call(fail_when(daemon, "ListJobs", 1, DaemonUnavailable("gone")))
    result = daemon.run(*REDRIVE, "--yes", *SLOW)
    assert (result.exit_code, result.stdout) == (6, "")
    assert result.stderr.endswith("dmq: gone; job 1 continues with the daemon, see 'dmq dead jobs billing'\n")
    daemon.run("dead", "stop", "1")
    daemon.before_call(fail_when(daemon, "ListJobs", 2, CallFailed("broken")))
    result = daemon.run(*REDRIVE, "--yes", *SLOW)
    assert (result.exit_code, result.stderr) == (1, "dmq: job 2: redrive of billing\ndmq: broken\n")


def test_a_start_in_doubt_explains_how_to_find_out(daemon: LiveCell) -> None:
    """The job may run; a dry run is never in doubt."""
    daemon.before_call(fail_when(daemon, "StartJob", 1, DaemonUnavailable("gone")))
    result = daemon.run(*REDRIVE, "--yes")
    assert result.exit_code == 6
    assert result.stderr == "dmq: gone (if in doubt, 'dmq dead jobs billing' tells whether it was started)\n"
    daemon.before_call(fail_when(daemon, "StartJob", 2, DaemonUnavailable("gone")))
    assert daemon.run(*REDRIVE, "--dry-run").stderr == "dmq: gone\n"


def test_a_job_that_is_no_longer_listed(daemon: LiveCell) -> None:
    """Nobody can say how it ended."""
    with patch.object(WatchedClient, "jobs", lambda self, group: [], create=True):
        result = daemon.run(*REDRIVE, "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "job 1 is no longer among the newest jobs" in result.stderr


def test_the_watch_reports_its_progress(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line now and then where there is no terminal; looks get rarer."""
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        step(daemon)

    monkeypatch.setattr(watched, "pause", pause)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    result = daemon.run(*REDRIVE, "--yes", *SLOW)
    assert result.stderr.splitlines() == [
        "dmq: job 1: redrive of billing",
        "dmq: job 1: redriven 0, skipped 0, failed 0",
        "dmq: job 1: redriven 1, skipped 0, failed 0",
        "dmq: job 1: redriven 2, skipped 0, failed 0",
    ]
    assert waits == [0.05, 0.1, 0.2]


def test_an_empty_queue_is_done_at_once(live: LiveCell) -> None:
    """Nothing to do is no failure, and nothing to watch or to stop."""
    live.run("group", "create", GROUP)
    for options in ((), ("--detach",)):
        result = live.run(*PURGE, "--yes", *options)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "purged 0, skipped 0, failed 0\n", "")


def test_a_refused_job_fails_with_the_daemons_words(daemon: LiveCell) -> None:
    """Another one runs, a name is none, a group is unknown."""
    daemon.run(*REDRIVE, "--yes", "--detach", *SLOW)
    result = daemon.run(*PURGE, "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "another job of this group is running" in result.stderr
    assert daemon.run(*REDRIVE, "--key", "k", "--yes", "--to", "a b").exit_code == 1
    assert daemon.run(*REDRIVE, "--key", "k", "--to", "t", "--all-groups").exit_code == 2
    assert daemon.run(*REDRIVE, "--key", "k", "--yes", "--rate", "-1").exit_code == 1
    for filters in ((), ("--key", "k")):
        assert daemon.run("dead", "redrive", "nobody", "--yes", *filters).exit_code == 3
    assert daemon.run("dead", "redrive", "nobody").exit_code == 3


def test_jobs_are_listed(daemon: LiveCell) -> None:
    """The newest first, of all groups or of one."""
    daemon.run(*PURGE, "--id", "D1")
    daemon.deadlines.clear()
    daemon.run(*REDRIVE, "--yes", "--detach", *SLOW)
    step(daemon)
    assert daemon.run("dead", "jobs").stdout.splitlines() == [
        "JOB  KIND     GROUP    STATE    LOOKED AT  DONE  PASSED OVER  FAILED  STARTED",
        "  2  redrive  billing  running     2 of 3     1            1       0  now",
        "  1  purge    billing  done        3 of 3     1            2       0  now",
    ]
    assert [job["job_id"] for job in json.loads(daemon.run("dead", "jobs", GROUP, "-o", "json").stdout)] == [2, 1]
    assert json.loads(daemon.run("dead", "jobs", "shipping", "-o", "json").stdout) == []


def test_a_job_is_stopped(daemon: LiveCell) -> None:
    """It says how far it came; one that has ended stays as it is, one that nobody knows is not found."""
    daemon.run(*REDRIVE, "--yes", "--detach", *SLOW)
    step(daemon)
    assert daemon.run("dead", "stop", "1").stdout == "job 1 is stopped: redriven 1, skipped 0, failed 0\n"
    daemon.run(*REDRIVE, "--yes")
    assert json.loads(daemon.run("dead", "stop", "2", "-o", "json").stdout)["state"] == "DONE"
    assert daemon.run("dead", "stop", "3").exit_code == 3
    assert daemon.run("dead", "stop", "0").exit_code == 2


@pytest.mark.parametrize(
    "options", [("--yes",), ("--why",), ("--why", "x", "--to", "t"), ("--why", "x", "--since", "x")]
)
def test_wrong_usage_starts_nothing(daemon: LiveCell, options: tuple[str, ...]) -> None:
    """A purge needs a reason, and has no target."""
    result = daemon.run("dead", "purge", GROUP, *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert jobs(daemon) == []
