"""Sending and finding single messages, without a daemon."""

from __future__ import annotations

import json

import pytest
from support.admin_source import MESSAGE_ID
from support.fake_admin_client import FakeClient, error_of, install
from support.fake_admin_client import run_dmq as run

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin.client import DaemonUnavailable


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


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
