"""Sending and finding single messages."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from support.clients.embedded.failing import change, give_up
from support.forges.messages.letters import a_message, set_policy
from support.rigs.broker.rig import ack, receive
from support.rigs.commands.live_cell import NOW, LiveCell, WatchedClient

from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin.client import DaemonUnavailable

BODY = b"caf\xc3\xa9 \x1b[31mred"


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon with a message that waits."""

    async def fill() -> None:
        await live.rig.broker.send([a_message("W", body=BODY, keys=("k1",), deliver_at_ms=NOW + 60_000)])

    live.do(fill())
    return live


def found(live: LiveCell, message_id: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(live.run("msg", "get", "orders", message_id, "--body", "-o", "json").stdout)


def test_get_shows_where_a_message_is(daemon: LiveCell) -> None:
    """Without its body, unless asked for; what could move the cursor is escaped."""
    result = daemon.run("msg", "get", "orders", "W")
    assert result.exit_code == 0
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["state"].strip() == "waiting"
    assert lines["deliver at"].strip() == "2023-11-14T22:14:20.000Z"
    assert lines["properties"].strip() == "color=red"
    assert "body" not in lines
    assert "body        café \\x1b[31mred" in daemon.run("msg", "get", "orders", "W", "--body").stdout


def test_get_for_programs(daemon: LiveCell) -> None:
    """Bodies in base64."""
    waiting = found(daemon, "W")
    assert (waiting["state"], waiting["content"]["keys"]) == ("WAITING", ["k1"])
    assert waiting["content"]["body"] == "Y2Fmw6kgG1szMW1yZWQ="
    assert json.loads(daemon.run("-ojson", "msg", "get", "orders", "W").stdout)["content"]["body"] is None


def test_get_shows_the_state_in_each_group(daemon: LiveCell) -> None:
    """In one word each, with the attempt and the time where there are such; to programs by the same words."""
    rig = daemon.rig

    async def consume() -> None:
        await rig.broker.send([a_message("Q")])
        for group in ("done", "failing", "slow", "undone"):
            await set_policy(rig, 3, 60_000, group=group)
            (delivery,) = await receive(rig, group=group, renew_for="client")
            if group == "done":
                await ack(rig, delivery, group=group)
            elif group == "failing":
                await change(rig, delivery, group=group)
            elif group == "undone":
                await give_up(rig, delivery, 3, group=group)

    daemon.do(consume())
    lines = daemon.run("msg", "get", "orders", "Q").stdout.splitlines()
    assert lines[0].split() == ["state", "queued"]
    assert [line.strip() for line in lines[1:5]] == [
        "groups      done: acknowledged",
        "failing: retrying, attempt 2 at 2023-11-14T22:14:20.000Z",
        "failing: failed at 2023-11-14T22:13:20.000Z by client: reason not reported by the client",
        "slow: leased, attempt 1, until 2023-11-14T22:13:50.000Z",
    ]
    assert lines[5].strip() == "undone: dead since 2023-11-14T22:13:20.000Z"
    assert {each["group"]: (each["state"], each["attempt"]) for each in found(daemon, "Q")["groups"]} == {
        "done": ("ACKNOWLEDGED", 0),
        "failing": ("RETRYING", 2),
        "slow": ("LEASED", 1),
        "undone": ("DEAD", 0),
    }


def test_get_of_a_recalled_message(daemon: LiveCell) -> None:
    """It is known as long as its id is, and since when."""
    assert daemon.run("msg", "recall", "orders", "W").exit_code == 0
    assert (
        daemon.run("msg", "get", "orders", "W").stdout.splitlines()[0]
        == "state       recalled 2023-11-14T22:13:20.000Z"
    )
    assert (found(daemon, "W")["state"], found(daemon, "W")["ended_at_ms"]) == ("RECALLED", NOW)


def test_send_prints_the_id_it_made(live: LiveCell) -> None:
    """A message as an official client makes it: id, body, birth; another id each time."""
    result = live.run("msg", "send", "orders", "hello", "--tag", "t", "--key", "a", "--key", "b", "--property", "x=1=2")
    message_id = result.stdout.strip()
    assert (result.stderr, len(message_id)) == ("", 34)
    content = found(live, message_id)["content"]
    assert (content["body"], content["properties"]) == ("aGVsbG8=", {"x": "1=2"})
    assert (content["tag"], content["keys"], content["message_group"]) == ("t", ["a", "b"], "")
    assert content["born_at_ms"] > NOW
    assert live.run("msg", "send", "orders", "hello").stdout.strip() != message_id


def test_send_for_programs(live: LiveCell) -> None:
    """The id given is the id used; a delayed message can be recalled by the handle."""
    result = live.run("msg", "send", "orders", "x", "--id", "mine", "--group", "g", "-o", "json")
    assert json.loads(result.stdout) == {"topic": "orders", "message_id": "mine", "recall_handle": None}
    assert found(live, "mine")["content"]["message_group"] == "g"
    sent = json.loads(live.run("msg", "send", "orders", "x", "--delay", "5m", "-o", "json").stdout)
    assert live.run("msg", "recall", sent["recall_handle"]).stdout == f"{sent['message_id']}\n"
    again = live.run("msg", "recall", sent["recall_handle"], "-o", "json")
    assert json.loads(again.stdout)["recalled_before"] is True


def test_a_body_can_come_from_stdin_and_be_any_bytes(live: LiveCell) -> None:
    """A dash reads it, as it is."""
    live.run("msg", "send", "orders", "-", "--id", "mine", stdin=b"\xff\x00\n")
    assert found(live, "mine")["content"]["body"] == "/wAK"


@pytest.mark.parametrize(
    ("option", "state", "due_in_ms"),
    [
        (("--delay", "5m"), "WAITING", 300_000),
        (("--at", "+5m"), "WAITING", 300_000),
        (("--level", "3"), "WAITING", 10_000),
        (("--at", "2023-11-14T22:14:20Z"), "WAITING", 60_000),
        (("--at", str(NOW + 60_000)), "WAITING", 60_000),
        (("--at", str(NOW - 60_000)), "QUEUED", -60_000),
    ],
)
def test_the_ways_to_be_late(live: LiveCell, option: tuple[str, str], state: str, due_in_ms: int) -> None:
    """Distances count by the daemon's clock."""
    assert live.run("msg", "send", "orders", "x", "--id", "mine", *option).exit_code == 0
    message = found(live, "mine")
    assert (message["state"], message["deliver_at_ms"]) == (state, NOW + due_in_ms)


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
def test_wrong_usage_sends_nothing(live: LiveCell, arguments: tuple[str, ...]) -> None:
    """Exit code 2, one line on stderr that says where to look."""
    result = live.run("msg", "send", "orders", "x", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("dmq: ")
    assert "see 'dmq msg send --help'" in result.stderr
    assert live.calls == []


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (public.ILLEGAL_TOPIC, 1),
        (public.TOPIC_NOT_FOUND, 3),
        (public.TOO_MANY_REQUESTS, 6),
        (public.INTERNAL_SERVER_ERROR, 1),
    ],
)
def test_a_refused_send_fails_with_the_daemons_words(live: LiveCell, code: public.Code, exit_code: int) -> None:
    """The protocol's code decides what a script should do."""
    answer = public.SendMessageResponse(status=public.Status(code=code, message="because of 7"))
    with patch.object(WatchedClient, "send", lambda self, message: answer):
        result = live.run("msg", "send", "orders", "x")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == f"dmq: refused: because of 7 ({int(code)})\n"


def test_a_send_in_doubt_explains_how_to_repeat_it(live: LiveCell) -> None:
    """With the same id, so that it is stored once."""

    def fail(name: str) -> None:
        raise DaemonUnavailable("no answer")

    live.before_call(fail)
    result = live.run("msg", "send", "orders", "x", "--id", "mine")
    assert result.exit_code == 6
    assert result.stderr == "dmq: no answer (if in doubt, repeat with --id mine)\n"
