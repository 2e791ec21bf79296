"""Status, topics and what all commands share, without a daemon: what they ask, print and exit with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forges.wire.admin_status import STATUS
from support.rigs.commands.fake_admin_client import FakeClient, error_of, install
from support.rigs.commands.fake_admin_client import run_dmq as run

from dmq.admin import admin_v1 as wire
from dmq.admin.client import CallFailed, CallRefused, DaemonUnavailable, NotFound
from dmq.cli.nouns import NOUNS
from dmq.cli.service.status import replica_facts


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


def status_with(*processes: wire.Process) -> wire.GetStatusResponse:
    """Return the status with these processes."""
    status = wire.GetStatusResponse()
    status.CopyFrom(STATUS)
    del status.processes[:]
    status.processes.extend(processes)
    return status


def test_status_for_people(daemon: type[FakeClient]) -> None:
    """One fact per line."""
    result = run("status")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "state         serving",
        "daemon        rock-dmq 1.2.3, pid 77, cell cell-1",
        "up since      2023-11-14T21:11:15.000Z (1h 2m ago)",
        "processes     1: 1 connection, 20 open calls, cpu 1m 1s, 80MiB",
        "address       127.0.0.1:8081, metrics 127.0.0.1:9464",
        "data          somewhere/data, durability disk",
        "opened        in 42ms, recovered after a kill, 17 B of torn log cut",
        "pending       1,000,000; overdue 2; next 2023-11-14T22:13:25.000Z (in 5s)",
        "clock         steady",
        "lateness      p50 0.8ms, p99 3.25ms, max 1.2s",
        "cluster       AWAY since 2023-11-14T22:13:15.000Z (5s ago): 10.0.0.1:8081, 10.0.0.2:8081",
        "              10.0.0.1:8081 does not answer: refused",
        "to cluster    40 wait, 4 on their way; forwarded 1,000, refused 2, in doubt 3; kept 36 sends",
        "              topic orders is not taken, 40 wait: no answer",
        "its lateness  p50 2ms, p99 9ms, max 21ms",
        "inner topic   dmq_inner_topic, 7 taken, 1 unreadable; NOTHING TAKEN: away",
        "messages      accepted 10, delivered 9, acknowledged 8, leases expired 1",
        "commits       5 with 50 operations, 4KiB; p99 2.5ms, sync p50 0.9ms p99 2.25ms",
        "disk          1GiB free, sends refused below 32MiB",
        "backups       last 2023-11-14T20:13:20.000Z (2h ago), 1GiB, /backup/dmq-1",
        "              FAILED 2023-11-14T22:13:19.000Z (1s ago): no room",
        "              next 2023-11-14T22:23:20.000Z (in 10m); every 6h, 7 kept",
        "replica       async, s3://bucket/orders",
        "              UNREACHABLE: no answer",
        "              BEHIND by 3 batches, 4KiB wait, for 750ms",
        "              epoch 4, segment 1,234, written 2023-11-14T22:13:19.500Z (500ms ago)",
        "bases         newest 2023-11-14T21:13:20.000Z (1h ago), 1GiB; verified 2023-11-14T20:13:20.000Z (2h ago)",
        "              FAILED: no room",
        "audit outbox  12 events, 2KiB of 1GiB",
        "audit trail   somewhere/data/trail, exported up to 1,234, the oldest event after that is 42s old",
    ]


@pytest.mark.parametrize(
    ("replica", "text"),
    [
        (wire.Replica(role="primary"), None),
        (wire.Replica(role="primary", link="waiting"), "no standby offers one"),
        (
            wire.Replica(role="primary", link="in_sync", link_address="b:1", link_batches=1234),
            "in sync with b:1, 1,234",
        ),
        (wire.Replica(role="primary", link="down", link_address="b:1", link_error="refused"), "DOWN to b:1: refused"),
        (wire.Replica(role="primary", link="sealed"), "SEALED by a takeover"),
        (wire.Replica(role="standby", link="waiting"), "the primary is not connected"),
        (wire.Replica(role="standby", link="connected"), "the primary is connected"),
        (wire.Replica(role="standby", link="reserved", link_address="b:1"), "only b:1 may take over"),
    ],
)
def test_the_direct_link_has_its_line(replica: wire.Replica, text: str | None) -> None:
    """Each state of both roles; no line without a link."""
    found = dict(replica_facts(replica, 0)).get("link")
    assert found is None if text is None else text in str(found)


def test_status_of_several_processes(daemon: type[FakeClient]) -> None:
    """A line for each; one that is not there, or ended before, is loud. Programs get the same fields of one or many."""
    serving: dict[str, Any] = {"state": "serving", "connections": 2_000, "streams": 1, "cpu_s": 0.25}
    daemon.answers["GetStatus"] = status_with(
        wire.Process(name="store", pid=77, state="serving", connections=0, streams=0, cpu_s=9, memory_bytes=2**20),
        wire.Process(name="front-0", pid=78, memory_bytes=2**21, starts=1, **serving),
        again := wire.Process(
            name="front-1", pid=79, memory_bytes=2**21, starts=3, last_end="killed by SIGKILL", **serving
        ),
        wire.Process(name="front-2", state="ended", last_end="exit code 1"),
        wire.Process(name="front-3", pid=80, state="starting"),
    )
    lines = run("status").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("processes"))
    assert lines[at : at + 5] == [
        "processes     store, pid 77: 0 connections, 0 open calls, cpu 9s, 1MiB",
        "              front-0, pid 78: 2,000 connections, 1 open call, cpu 250ms, 2MiB",
        "              front-1, pid 79: 2,000 connections, 1 open call, cpu 250ms, 2MiB; STARTED 3 TIMES; ended last: "
        + again.last_end,
        "              front-2: ENDED; ended last: exit code 1",
        "              front-3, pid 80: STARTING",
    ]
    assert json.loads(run("status", "--json").stdout)["processes"][2] == {
        "name": "front-1",
        "pid": 79,
        "state": "serving",
        "connections": 2_000,
        "streams": 1,
        "cpu_s": 0.25,
        "memory_bytes": 2**21,
        "starts": 3,
        "last_end": "killed by SIGKILL",
    }


def test_a_transport_without_a_peer_name(daemon: type[FakeClient]) -> None:
    """Its connections are not shown, and null for programs."""
    daemon.answers["GetStatus"] = status_with(
        wire.Process(name="store", state="serving", pid=77, cpu_s=9, memory_bytes=2**20)
    )
    assert "processes     1: cpu 9s, 1MiB" in run("status").stdout.splitlines()
    assert json.loads(run("status", "--json").stdout)["processes"][0]["connections"] is None


def test_status_for_programs(daemon: type[FakeClient]) -> None:
    """The keys are the fields of the protocol; the option works before and after the command."""
    for arguments in (("status", "-o", "json"), ("-o", "json", "status")):
        found = json.loads(run(*arguments).stdout)
        assert found["state"] == "SERVING"
        kept = {"held": 0, "paused_topics": 0, "paused_groups": 0}
        assert found["timeline"] == {"pending": 1_000_000, "overdue": 2, "next_due_at_ms": 1_700_000_005_000} | kept
        assert found["recovery"]["was_clean"] is False


def test_a_daemon_that_does_not_serve_is_unavailable(daemon: type[FakeClient]) -> None:
    """Status still tells why, and ends with 6, so that a script can wait for it."""
    status = status_with()
    status.state, status.state_reason, status.disk.refuses_sends = wire.NOT_SERVING, "disk failed", True
    status.outbox.lost_rows, status.outbox.export_error = 3, "No space left on device"
    daemon.answers["GetStatus"] = status
    result = run("status")
    assert result.exit_code == 6
    assert "state         not_serving: disk failed" in result.stdout
    assert "SENDS REFUSED" in result.stdout
    assert "3 LOST before export" in result.stdout
    assert "audit trail   STOPPED: No space left on device; somewhere" in result.stdout


@pytest.mark.parametrize(
    ("failure", "exit_code"),
    [(DaemonUnavailable("a"), 6), (CallRefused("a"), 1), (NotFound("a"), 3), (CallFailed("a"), 1)],
)
def test_errors_of_the_daemon_have_exit_codes(daemon: type[FakeClient], failure: Exception, exit_code: int) -> None:
    """The same for every command, for people and for programs."""
    daemon.failure = failure
    commands = (
        *(("status",), ("topic", "ls"), ("msg", "get", "t", "x"), ("group", "ls"), ("group", "show", "g")),
        *(("retry", "ls", "g"), ("retry", "stats"), ("retry", "run-now", "g", "--entry", "1")),
        *(("dead", "groups"), ("dead", "ls", "g"), ("dead", "show", "g", "x"), ("dead", "export", "g")),
        *(("dead", "jobs"), ("dead", "stop", "1"), ("dead", "redrive", "g", "--dry-run")),
    )
    for command in commands:
        result = run(*command)
        assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", "dmq: a\n")
        assert error_of(run(*command, "-o", "json")) == {
            "kind": {6: "unavailable", 3: "not_found"}.get(exit_code, "failure"),
            "exit_code": exit_code,
            "message": "a",
        }


@pytest.mark.parametrize("command", ["audit ls", "audit explain x", "audit run --out o --no-snapshot"])
def test_a_trail_that_is_elsewhere(
    daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """What the daemon tells is looked for on this machine; what to give is said, and nothing near is taken for it."""
    monkeypatch.chdir(tmp_path)
    result = run(*command.split(), "--address", "far:1")
    assert (result.exit_code, result.stdout) == (3, "")
    told = "the daemon at far:1 writes its trail to somewhere/data/trail of its own machine, and it is not on this one"
    assert result.stderr == f"dmq: {told}: run the command there, or name a copy with --trail\n"
    (tmp_path / "somewhere" / "data" / "trail" / "cells").mkdir(parents=True)
    (tmp_path / "somewhere" / "data" / "trail" / "cells" / "another.json").touch()
    assert run(*command.split()).exit_code == 3
    daemon.failure = DaemonUnavailable("nobody answers")
    monkeypatch.setenv("DMQ_ADDRESS", "far:1")
    (tmp_path / "dmq-data" / "trail").mkdir(parents=True)
    result = run(*command.split())
    assert (result.exit_code, result.stdout) == (6, "")
    assert "Without a daemon, name the trail with --trail, --data or --config" in result.stderr


def test_json_has_a_short_form(daemon: type[FakeClient]) -> None:
    """Before and behind the command, and for errors; another format beside it is refused."""
    whole = run("status", "-o", "json").stdout
    for arguments in (("status", "--json"), ("--json", "status"), ("-o", "table", "status", "--json")):
        assert run(*arguments).stdout == whole
    assert error_of(run("status", "--timeout", "soon", "--json"))["kind"] == "usage"
    assert run("status", "--json", "-o", "table").exit_code == 2


def test_an_unexpected_error_is_one_line_and_debug_shows_the_rest(
    daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback for an operator, all of it for whoever asks."""
    daemon.failure = ZeroDivisionError("a\nb")
    result = run("status")
    assert result.exit_code == 1
    assert result.stderr == "dmq: unexpected ZeroDivisionError: a b (DMQ_DEBUG=1 shows where)\n"
    monkeypatch.setenv("DMQ_DEBUG", "1")
    assert isinstance(run("status").exception, ZeroDivisionError)


def test_the_environment_sets_the_timeout(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all calls without an option of their own; an invalid one is an error of usage that names the variable."""
    monkeypatch.setenv("DMQ_TIMEOUT", "90s")
    run("status")
    run("status", "--timeout", "1s")
    assert [timeout_s for _, timeout_s in daemon.opened] == [90.0, 1.0]
    monkeypatch.setenv("DMQ_TIMEOUT", "soon")
    refused = run("status")
    assert refused.exit_code == 2
    assert "DMQ_TIMEOUT" in refused.stderr


def test_where_the_daemon_is(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """The option after the command beats the one before it beats the variable beats the default."""
    run("status")
    monkeypatch.setenv("DMQ_ADDRESS", "variable:1")
    run("status")
    run("--address", "[::1]:2", "status")
    run("--address", "before:2", "--timeout", "500ms", "status", "--address", "after:3")
    assert daemon.opened == [("127.0.0.1:8081", 5.0), ("variable:1", 5.0), ("[::1]:2", 5.0), ("after:3", 0.5)]


@pytest.mark.parametrize("arguments", [(), ("msg",), ("topic",), ("group",), ("retry",), ("dead",), ("backoff",)])
def test_a_missing_command_shows_the_help(arguments: tuple[str, ...]) -> None:
    """On stderr, as a usage error."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


@pytest.mark.parametrize("name", NOUNS)
def test_the_help_of_a_command_matches_its_list(name: str) -> None:
    """The line in the list, which is shown without importing the command, is the first sentence of its own help."""
    (line,) = (line for line in run("--help").stdout.splitlines() if line.startswith(f"  {name} "))
    assert line.split(maxsplit=1)[1] == NOUNS[name]
    assert run(name, "--help").stdout.splitlines()[2].strip() == NOUNS[name]


def test_an_argument_that_is_no_utf_8_is_a_usage_error() -> None:
    """As a shell passes bytes on; the file system may know them, the protocol does not."""
    result = run("topic", "show", "a\udcff", "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr == "dmq: an argument is not UTF-8 text: 'a\\udcff'\n"


@pytest.mark.parametrize(("name", "value"), [("DMQ_ADDRESS", "a\udcff:1"), ("DMQ_SECRET_KEY", "hunter2\udcff")])
def test_a_variable_that_is_no_utf_8_is_named_and_not_shown(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a secret."""
    others = {"DMQ_ADDRESS": "127.0.0.1:1", "DMQ_ACCESS_KEY": "shop", "DMQ_SECRET_KEY": "hunter2"}
    for each, told in (others | {name: value}).items():
        monkeypatch.setenv(each, told)
    result = run("status")
    assert (result.exit_code, result.stderr) == (2, f"dmq: {name} is not a string in UTF-8\n")


def test_a_closed_output_gets_no_prompt() -> None:
    """As of ``dmq ... >&-``: the command is carried out."""
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m dmq backoff show --json >&-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_that_is_misspelt() -> None:
    """What it may have been is said; nothing else is known of it."""
    result = run("statsu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "dmq: No such command 'statsu'. Did you mean 'status'?; see 'dmq --help'\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--timeout soon status", "'--timeout': 'soon' is refused: a duration is expected"),
        ("status -a nowhere", "'--address': 'nowhere' is refused: host:port is expected"),
        ("msg send t b --at \x1b", "'--at': '\\x1b' is refused: RFC 3339 with a time zone"),
        ("msg send t b --delay soon", "'--delay': 'soon' is refused: a duration is expected"),
        ("msg send t b --property k", "'--property': 'k' is refused: KEY=VALUE is expected"),
        ("msg ls t --due-after soon", "'--due-after': 'soon' is refused: RFC 3339 with a time zone"),
        ("msg recall x", "'HANDLE': 'x' is refused: "),
        ("group reset g t --to +5m", "'--to': '+5m' is refused: begin, end, RFC 3339"),
        ("dead ls g --since +5m", "'--since': '+5m' is refused: -1h for an hour ago, RFC 3339"),
        ("topic set t --keep-time 0s", "'--keep-time': '0s' is refused: nothing would be kept"),
        ("spool show 12", "'UID': '12' is refused: a uid of 32 hex digits is expected"),
        ("acl new a/b", "'ACCESS_KEY': 'a/b' is refused: 1 to 128 visible ASCII characters"),
        ("audit run --out o --conf k", "'--conf': 'k' is refused: KEY=VALUE is expected"),
        ("audit run --out o --from +5m", "'--from': '+5m' is refused: RFC 3339"),
    ],
)
def test_refused_values_have_one_form(daemon: type[FakeClient], arguments: str, told: str) -> None:
    """Which option, what was given, what is allowed, where to look; on one line, and nothing moves the cursor."""
    result = run(*arguments.split(" "))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"dmq: Invalid value for {told}")
    assert "; see 'dmq" in result.stderr


def test_help_is_not_an_error() -> None:
    """Asked for, it goes to stdout; both spellings."""
    for arguments in (("--help",), ("-h",), ("msg", "send", "-h")):
        result = run(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Usage:" in result.stdout


def test_version() -> None:
    """The version of the distribution."""
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("dmq 0.")
