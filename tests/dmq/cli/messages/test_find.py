"""A message by id or key, over all topics."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.forges.messages.letters import a_message, die, fail
from support.rigs.broker.rig import GROUP
from support.rigs.commands.live_cell import LiveCell

from dmq.cli.messages import find

KEY = "order-4711"


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """Messages with one key: dead, retried, queued and delayed, in two topics."""

    async def fill() -> None:
        await die(live.rig, a_message("D1", keys=(KEY,)), group=GROUP)
        await fail(live.rig, "R1", group="other", topic="refunds")
        await live.rig.broker.send([a_message("Q1", topic="refunds", keys=(KEY,))])

    live.do(fill())
    options = ("--key", KEY, "--own-key", "mine", "--delay", "1m", "--id", "W1")
    assert live.run("msg", "send", "refunds", "body", *options).exit_code == 0
    return live


def found(daemon: LiveCell, *arguments: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(daemon.run("find", *arguments, "-o", "json").stdout)


def test_an_id_and_an_own_key_are_looked_up_and_nothing_is_scanned(daemon: LiveCell) -> None:
    """In each topic, with what each group did; the calls are two for a topic at most."""
    daemon.deadlines.clear()
    states = [(each["state"], each["topic"], each["group"]) for each in found(daemon, "D1")["matches"]]
    assert states == [("queued", "orders", ""), ("dead", "orders", GROUP)]
    assert [(each["message_id"], each["state"]) for each in found(daemon, "mine")["matches"]] == [("W1", "waiting")]
    assert not {"ListMessages", "ListRetries", "ListDeadLetters"} & set(daemon.calls)
    assert ("retrying", "other") in [(each["state"], each["group"]) for each in found(daemon, "R1")["matches"]]


def test_a_message_key_is_searched_everywhere(daemon: LiveCell) -> None:
    """Queued and delayed messages, and dead letters; a table for people."""
    matches = found(daemon, KEY)["matches"]
    assert sorted((each["state"], each["topic"], each["message_id"]) for each in matches) == [
        ("dead", "orders", "D1"),
        ("queued", "orders", "D1"),
        ("queued", "refunds", "Q1"),
        ("waiting", "refunds", "W1"),
    ]
    result = daemon.run("find", KEY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].split() == ["STATE", "TOPIC", "GROUP", "MESSAGE", "ID", "WHEN", "KEYS"]


def test_a_retry_is_found_by_its_key(live: LiveCell) -> None:
    """Its original may be gone from its queue by then."""
    live.do(fail(live.rig, "R1", group=GROUP))
    keys = json.loads(live.run("retry", "ls", GROUP, "-o", "json").stdout)[0]["content"]["keys"]
    assert not keys
    assert found(live, "R1", "--scan")["matches"][-1]["state"] == "retrying"


def test_a_search_is_bounded_and_continues(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by calls and by matches; together the parts are the whole, and nothing twice."""
    whole = found(daemon, KEY)["matches"]
    for bound in (("--limit", "1"), ()):
        if not bound:
            monkeypatch.setattr(find, "_CALLS_MAX", 1)
        parts: list[Any] = []
        after: tuple[str, ...] = ()
        while True:
            answer = found(daemon, KEY, *bound, *after)
            parts += answer["matches"]
            if answer["next"] is None:
                break
            after = ("--after", answer["next"])
        assert parts == whole


def test_nothing_found(daemon: LiveCell) -> None:
    """Exit code 3; a wrong token is a usage error."""
    result = daemon.run("find", "nosuch")
    assert (result.exit_code, "not found in any topic" in result.stderr) == (3, True)
    assert daemon.run("find", "x", "--after", "nonsense").exit_code == 2


def test_an_indexed_property_is_looked_up(live: LiveCell) -> None:
    """In the topics that index it, page by page; no message key is searched unless --scan asks for it."""
    for topic in ("orders", "refunds", "bills"):
        assert live.run("topic", "create", topic).exit_code == 0
    for topic in ("orders", "refunds"):
        assert live.run("topic", "set", topic, "--index-property", "color").exit_code == 0
    shown = live.run("topic", "set", "orders", "--index-property", "size", "--no-index-property", "color").stdout
    assert "indexed" in shown
    assert live.run("topic", "set", "orders", "--index-property", "color").exit_code == 0

    async def fill() -> None:
        await die(live.rig, a_message("D1"), group=GROUP)
        await live.rig.broker.send([a_message("Q1", topic="refunds")])
        await live.rig.broker.send([a_message("B1", topic="bills")])

    live.do(fill())
    live.deadlines.clear()
    whole = found(live, "color=red")["matches"]
    assert sorted((each["state"], each["topic"], each["message_id"]) for each in whole) == [
        ("dead", "orders", "D1"),
        ("queued", "orders", "D1"),
        ("queued", "refunds", "Q1"),
    ]
    assert "ListMessages" not in live.calls
    parts: list[Any] = []
    following: str | None = ""
    while following is not None:
        answer = found(live, "color=red", "--limit", "1", *(("--after", following) if following else ()))
        parts += answer["matches"]
        following = answer["next"]
    assert parts == whole
    assert live.run("find", "color=blue").exit_code == 3
    assert live.run("topic", "set", "orders", "--no-index-property", "nosuch").exit_code != 0
