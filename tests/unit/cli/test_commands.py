"""The commands, in process and without a daemon: what they ask, what they print, what they exit with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Self, TypeVar

import pytest
from support.admin_source import MESSAGE_ID, STATUS, FixedSource
from typer.testing import CliRunner, Result

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.client import CallFailed, CallRefused, DaemonUnavailable
from dmq.admin.service import AdminService
from dmq.admin.source import CellState
from dmq.cli.app import app
from dmq.config import DaemonConfig
from dmq.errors import StoreLocked

OK = public.Status(code=public.OK)
_Response = TypeVar("_Response")


class FakeClient:
    """Answers from a fixed source, without a transport; remembers what it was asked."""

    source: ClassVar[FixedSource]
    sent: ClassVar[list[public.Message]]
    opened: ClassVar[list[tuple[str, float]]]
    send_status: ClassVar[public.Status]
    failure: ClassVar[Exception | None]

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.opened.append((address, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> wire.GetStatusResponse:
        return self._answer(AdminService(self.source).get_status(wire.GetStatusRequest()))

    def topics(self) -> wire.ListTopicsResponse:
        return self._answer(AdminService(self.source).list_topics(wire.ListTopicsRequest()))

    def message(self, topic: str, message_id: str, *, with_body: bool) -> wire.GetMessageResponse:
        request = wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body)
        return self._answer(AdminService(self.source).get_message(request))

    def send(self, message: public.Message) -> public.SendMessageResponse:
        if self.failure is not None:
            raise self.failure
        self.sent.append(message)
        entry = public.SendResultEntry(status=self.send_status, message_id=message.system_properties.message_id)
        return public.SendMessageResponse(status=self.send_status, entries=[entry])

    def _answer(self, call: Coroutine[object, object, _Response]) -> _Response:
        if self.failure is not None:
            call.close()
            raise self.failure
        return asyncio.run(call)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""

    FakeClient.source, FakeClient.send_status, FakeClient.failure = FixedSource(), OK, None
    FakeClient.sent, FakeClient.opened = [], []
    monkeypatch.setattr("dmq.admin.client.AdminClient", FakeClient)
    return FakeClient


def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, env=env)


def error_of(result: Result) -> dict[str, object]:
    found = json.loads(result.stderr)["error"]
    assert isinstance(found, dict)
    return found


# -- status and topics -------------------------------------------------------------------------------------------------


def test_status_for_people(daemon: type[FakeClient]) -> None:
    """One fact per line."""
    result = run("status")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "state         serving",
        "daemon        rock-dmq 1.2.3, pid 77, cell cell-1",
        "up since      2023-11-14T21:11:15.000Z (1h 2m ago)",
        "address       127.0.0.1:8081, metrics 127.0.0.1:9464",
        "data          somewhere/data, durability disk",
        "opened        in 42ms, recovered, 17 B of torn log cut",
        "pending       1,000,000; overdue 2; next 2023-11-14T22:13:25.000Z (in 5s)",
        "lateness      p50 0.8ms, p99 3.25ms, max 1.2s",
        "messages      accepted 10, delivered 9, acknowledged 8, leases expired 1",
        "commits       5 of 50 operations, 4KiB; p99 2.5ms, sync p50 0.9ms p99 2.25ms",
        "disk          1GiB free, sends refused below 32MiB",
        "audit outbox  12 events, 2KiB of 1GiB",
    ]


def test_status_for_programs(daemon: type[FakeClient]) -> None:
    """The keys are the fields of the protocol; the option works before and after the command."""
    for arguments in (("status", "-o", "json"), ("-o", "json", "status")):
        found = json.loads(run(*arguments).stdout)
        assert found["state"] == "SERVING"
        assert found["timeline"] == {"pending": 1_000_000, "overdue": 2, "next_due_at_ms": 1_700_000_005_000}
        assert found["recovery"]["was_clean"] is False


def test_a_daemon_that_does_not_serve_is_unavailable(daemon: type[FakeClient]) -> None:
    """Status still tells why, and ends with 6, so that a script can wait for it."""
    daemon.source = FixedSource(
        cell=replace(
            STATUS,
            state=CellState.NOT_SERVING,
            state_reason="disk failed",
            disk=replace(STATUS.disk, refuses_sends=True),
            outbox=replace(STATUS.outbox, lost_rows=3),
        )
    )
    result = run("status")
    assert result.exit_code == 6
    assert "state         not_serving: disk failed" in result.stdout
    assert "SENDS REFUSED" in result.stdout
    assert "3 LOST before export" in result.stdout


def test_topics(daemon: type[FakeClient]) -> None:
    """A table, or a list with stable keys."""
    assert run("topic", "ls").stdout.splitlines() == [
        "TOPIC       QUEUES  STORED    PENDING",
        "orders           8       9  1,000,000",
        "%DLQ%group       1       1          0",
    ]
    found = json.loads(run("topic", "ls", "-o", "json").stdout)
    assert found[0]["due"] == [{"until_ms": 1_700_000_000_000, "count": 2}]
    assert set(found[1]) == {"name", "queues", "stored", "pending", "due"}


# -- messages ----------------------------------------------------------------------------------------------------------


def test_get_shows_where_a_message_is(daemon: type[FakeClient]) -> None:
    """Without its body, unless asked for; what could move the cursor is escaped."""
    result = run("msg", "get", "orders", MESSAGE_ID)
    assert result.exit_code == 0
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["state"].strip() == "waiting"
    assert lines["deliver at"].strip() == "2023-11-14T22:14:20.000Z"
    assert lines["properties"].strip() == "a=1 b=2"
    assert "body" not in lines
    assert "body           café \\x1b[31mred" in run("msg", "get", "orders", MESSAGE_ID, "--body").stdout


def test_get_for_programs(daemon: type[FakeClient]) -> None:
    """Bodies in base64."""
    found = json.loads(run("msg", "get", "orders", MESSAGE_ID, "--body", "-o", "json").stdout)
    assert (found["state"], found["content"]["keys"]) == ("WAITING", ["k1", "k2"])
    assert found["content"]["body"] == "Y2Fmw6kgG1szMW1yZWQ="
    assert json.loads(run("-ojson", "msg", "get", "orders", MESSAGE_ID).stdout)["content"]["body"] is None


def test_get_of_an_unknown_message_is_not_found(daemon: type[FakeClient]) -> None:
    """Exit code 3, one line; an object for programs."""
    result = run("msg", "get", "orders", "nobody")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert "nobody is not known in topic orders" in result.stderr
    assert error_of(run("msg", "get", "orders", "nobody", "-o", "json"))["kind"] == "not_found"


def test_send_prints_the_id_it_made(daemon: type[FakeClient]) -> None:
    """A message as an official client makes it: id, body, birth, type."""
    result = run("msg", "send", "orders", "hello", "--tag", "t", "--key", "a", "--key", "b", "--property", "x=1=2")
    (message,) = daemon.sent
    system = message.system_properties
    assert result.stdout == f"{system.message_id}\n"
    assert len(system.message_id) == 34
    assert (message.topic.name, message.body, dict(message.user_properties)) == ("orders", b"hello", {"x": "1=2"})
    assert (system.tag, list(system.keys), system.message_type) == ("t", ["a", "b"], public.NORMAL)
    assert system.born_timestamp.seconds > 1_700_000_000
    assert not system.HasField("message_group")
    run("msg", "send", "orders", "hello")
    assert daemon.sent[1].system_properties.message_id != system.message_id


def test_send_for_programs(daemon: type[FakeClient]) -> None:
    """The id given is the id used."""
    result = run("msg", "send", "orders", "x", "--id", "mine", "--group", "g", "-o", "json")
    assert json.loads(result.stdout) == {"topic": "orders", "message_id": "mine", "recall_handle": None}
    assert daemon.sent[0].system_properties.message_type == public.FIFO


def test_a_body_can_come_from_stdin_and_be_any_bytes(daemon: type[FakeClient]) -> None:
    """A dash reads it, as it is."""
    run("msg", "send", "orders", "-", stdin=b"\xff\x00\n")
    assert daemon.sent[0].body == b"\xff\x00\n"


@pytest.mark.parametrize(
    ("option", "properties", "seconds", "kind"),
    [
        (("--delay", "5m"), {"TIMER_DELAY_MS": "300000"}, 0, public.NORMAL),
        (("--at", "+5m"), {"TIMER_DELAY_MS": "300000"}, 0, public.NORMAL),
        (("--level", "3"), {"DELAY": "3"}, 0, public.NORMAL),
        (("--at", "2023-11-14T22:13:20Z"), {}, 1_700_000_000, public.DELAY),
        (("--at", "1700000000000"), {}, 1_700_000_000, public.DELAY),
    ],
)
def test_the_four_ways_to_be_late(
    daemon: type[FakeClient], option: tuple[str, str], properties: dict[str, str], seconds: int, kind: int
) -> None:
    """Distances are left to the daemon's clock, instants go as a delivery timestamp."""
    assert run("msg", "send", "orders", "x", *option).exit_code == 0
    (message,) = daemon.sent
    assert dict(message.user_properties) == properties
    assert message.system_properties.delivery_timestamp.seconds == seconds
    assert message.system_properties.message_type == kind


@pytest.mark.parametrize(
    "arguments",
    [
        ("--at", "soon"),
        ("--at", "1700000000"),
        ("--delay", "5 minutes"),
        ("--level", "0"),
        ("--level", "x"),
        ("--delay", "5m", "--level", "3"),
        ("--property", "x"),
        ("--property", "=x"),
        ("--nonsense",),
        ("--address", "nowhere"),
        ("--timeout", "long"),
        ("-o", "xml"),
    ],
)
def test_wrong_usage_sends_nothing(daemon: type[FakeClient], arguments: tuple[str, ...]) -> None:
    """Exit code 2, one line on stderr that says where to look."""
    result = run("msg", "send", "orders", "x", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("dmq: ")
    assert "see 'dmq msg send --help'" in result.stderr
    assert daemon.sent == []


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (public.ILLEGAL_TOPIC, 1),
        (public.TOPIC_NOT_FOUND, 3),
        (public.TOO_MANY_REQUESTS, 6),
        (public.INTERNAL_SERVER_ERROR, 1),
    ],
)
def test_a_refused_send_fails_with_the_daemons_words(
    daemon: type[FakeClient], code: public.Code, exit_code: int
) -> None:
    """The protocol's code decides what a script should do."""
    daemon.send_status = public.Status(code=code, message="because of 7")
    result = run("msg", "send", "orders", "x")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == f"dmq: refused: because of 7 ({int(code)})\n"


def test_a_send_in_doubt_says_how_to_repeat_it(daemon: type[FakeClient]) -> None:
    """With the same id, so that it is stored once."""
    daemon.failure = DaemonUnavailable("no answer")
    result = run("msg", "send", "orders", "x", "--id", "mine")
    assert result.exit_code == 6
    assert result.stderr == "dmq: no answer (if in doubt, repeat with --id mine)\n"


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "exit_code"), [(DaemonUnavailable("a"), 6), (CallRefused("a"), 1), (CallFailed("a"), 1)]
)
def test_errors_of_the_daemon_have_exit_codes(daemon: type[FakeClient], failure: Exception, exit_code: int) -> None:
    """The same for every command, for people and for programs."""
    daemon.failure = failure
    for command in (("status",), ("topic", "ls"), ("msg", "get", "t", "x")):
        result = run(*command)
        assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", "dmq: a\n")
        assert error_of(run(*command, "-o", "json")) == {
            "kind": "unavailable" if exit_code == 6 else "failure",
            "exit_code": exit_code,
            "message": "a",
        }


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


def test_where_the_daemon_is(daemon: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """The option after the command beats the one before it beats the variable beats the default."""
    run("status")
    monkeypatch.setenv("DMQ_ADDRESS", "variable:1")
    run("status")
    run("--address", "[::1]:2", "status")
    run("--address", "before:2", "--timeout", "500ms", "status", "--address", "after:3")
    assert daemon.opened == [("127.0.0.1:8081", 5.0), ("variable:1", 5.0), ("[::1]:2", 5.0), ("after:3", 0.5)]


@pytest.mark.parametrize("arguments", [(), ("msg",), ("topic",)])
def test_a_missing_command_shows_the_help(arguments: tuple[str, ...]) -> None:
    """On stderr, as a usage error."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


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


# -- serve and demo ----------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DaemonConfig]:
    """Stands in for the daemon; remembers its configurations and ends with 0."""
    monkeypatch.chdir(tmp_path)
    configurations: list[DaemonConfig] = []

    def serve(config: DaemonConfig) -> int:
        configurations.append(config)
        return 0

    daemon = ModuleType("dmq.daemon")
    monkeypatch.setattr(daemon, "run", serve, raising=False)
    monkeypatch.setitem(sys.modules, "dmq.daemon", daemon)
    return configurations


def test_serve_needs_no_flag(served: list[DaemonConfig]) -> None:
    """One command, no configuration."""
    assert run("serve").exit_code == 0
    assert served == [DaemonConfig()]
    assert not served[0].metrics_listen_is_explicit


def test_serve_passes_its_flags_on(served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag is a key of the configuration, and beats the environment."""
    monkeypatch.setenv("DMQ_BROKER_NAME", "variable")
    flags = {
        "data": "d",
        "listen": "[::1]:0",
        "metrics_listen": "off",
        "durability": "process",
        "delay_levels": "1s 2s",
        "delay_max": "1d",
        "queues_per_topic": "2",
        "group_start": "latest",
        "idempotency_window": "1m",
        "disk_low_water_bytes": "1MiB",
        "shutdown_grace": "1s",
        "broker_name": "flag",
        "log_level": "debug",
        "log_format": "json",
    }
    arguments = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]
    assert run("serve", *arguments).exit_code == 0
    assert served[0].shown() == DaemonConfig().shown() | flags | {"queues_per_topic": 2, "disk_low_water_bytes": 2**20}


def test_serve_reads_the_file_it_is_given(served: list[DaemonConfig]) -> None:
    """By flag or by variable."""
    with open("a.toml", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("queues_per_topic = 3\n")
    assert run("serve", "--config", "a.toml").exit_code == 0
    assert run("serve", env={"DMQ_CONFIG": "a.toml"}).exit_code == 0
    assert [config.queues_per_topic for config in served] == [3, 3]


def test_a_wrong_configuration_is_a_usage_error_with_a_line_per_fault(served: list[DaemonConfig]) -> None:
    """Nothing is started."""
    result = run("serve", "--listen", "x", "--durability", "maybe")
    assert (result.exit_code, result.stdout, served) == (2, "", [])
    assert len(result.stderr.splitlines()) == 2
    assert all(line.startswith("dmq: --") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StoreLocked("dmq-data is in use by process 7"), "dmq: dmq-data is in use by process 7\n"),
        (PermissionError(13, "Permission denied", "dmq-data"), "dmq: [Errno 13] Permission denied: 'dmq-data'\n"),
    ],
)
def test_a_daemon_that_cannot_start_is_one_line(
    served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """Exit code 1, no traceback."""

    def fail(_: DaemonConfig) -> int:
        raise error

    monkeypatch.setattr(sys.modules["dmq.daemon"], "run", fail)
    result = run("serve")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", text)


def test_the_exit_code_of_the_daemon_is_ours(served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that ends because its storage failed ends the command likewise."""
    monkeypatch.setattr(sys.modules["dmq.daemon"], "run", lambda _: 1)
    assert run("serve").exit_code == 1


def test_interrupting_ends_with_130(served: list[DaemonConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells have it."""

    def interrupt(_: DaemonConfig) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["dmq.daemon"], "run", interrupt)
    assert run("serve").exit_code == 130


def test_demo_passes_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code says whether anything was lost."""
    asked: list[dict[str, object]] = []

    def play(**flags: object) -> int:
        asked.append(flags)
        return 1

    demo = ModuleType("dmq.demo")
    monkeypatch.setattr(demo, "run", play, raising=False)
    monkeypatch.setitem(sys.modules, "dmq.demo", demo)
    assert run("demo", "--messages", "5", "--seconds", "2", "--no-kill").exit_code == 1
    assert asked == [{"messages": 5, "seconds": 2.0, "keep_data": False, "kill": False}]


def test_no_variable_of_ours_is_set() -> None:
    """These tests start from a clean environment."""
    assert not [name for name in os.environ if name.startswith("DMQ_")]
