"""Listing messages."""

from __future__ import annotations

import json

import pytest
from support.forges.messages.letters import a_message
from support.rigs.commands.live_cell import NOW, LiveCell

from dmq.cli.messages import msg


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon with three messages in queues, of which one cannot be read, and one that waits."""

    async def fill() -> None:
        await live.rig.broker.send([a_message("A")])
        live.rig.clock.advance(1_000)
        await live.rig.broker.send([a_message("B", tag="t", keys=("k",))])
        live.rig.clock.advance(1_000)
        await live.rig.broker.send([a_message("C")._replace(payload=b"\xff\xff")])
        await live.rig.broker.send([a_message("W", tag="new", keys=("k1", "k2"), deliver_at_ms=NOW + 60_000)])

    live.do(fill())
    return live


def listed(daemon: LiveCell, *options: str) -> tuple[list[str], str | None]:
    found = json.loads(daemon.run("msg", "ls", "orders", *options, "-o", "json").stdout)
    return [each["message_id"] for each in found["messages"]], found["next"]


def test_a_list_goes_over_pages(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it takes; each message where it is, and where the next list goes on if there may be more."""
    monkeypatch.setattr(msg, "_PAGE", 1)
    result = daemon.run("msg", "ls", "orders")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["STATE", "DUE", "STORED", "MESSAGE", "ID", "QUEUE", "OFFSET", "TAG", "KEYS", "BYTES"]
    assert [line.split()[0] for line in lines[1:]] == ["queued"] * 3 + ["waiting"]
    assert lines[3].endswith("cannot be read")
    assert lines[4].split()[-5:] == ["W", "new", "k1", "k2", "4"]
    assert result.stderr == ""
    assert daemon.calls.count("ListMessages") >= 4
    assert listed(daemon) == (["A", "B", "C", "W"], None)


def test_a_list_continues_where_another_one_ended(daemon: LiveCell) -> None:
    """With what that one printed."""
    first, token = listed(daemon, "-n", "2")
    assert token is not None
    assert daemon.run("msg", "ls", "orders", "-n", "2").stderr == f"dmq: there may be more: --after {token}\n"
    assert (first, listed(daemon, "--after", token)) == (["A", "B"], (["C", "W"], None))


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--due-after", str(NOW + 1_000), "--due-before", str(NOW + 2_000)], ["B"]),
        (["--key", "k"], ["B"]),
        (["--tag", "new"], ["W"]),
        (["--newest"], ["W", "C", "B", "A"]),
        (["--state", "waiting"], ["W"]),
        (["--state", "queued"], ["A", "B", "C"]),
        (["--state", "QUEUED"], ["A", "B", "C"]),
    ],
)
def test_the_wanted_items_are_listed(daemon: LiveCell, options: list[str], ids: list[str]) -> None:
    """Every option narrows, or turns the order round."""
    assert listed(daemon, *options)[0] == ids


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nobody"], 3, "topic not found"),
        (["orders", "--state", "gone"], 2, "--state"),
        (["orders", "--limit", "0"], 2, "--limit"),
        (["orders", "--due-after", "soon"], 2, "--due-after"),
        (["orders", "--due-after", str(NOW), "--due-before", str(NOW)], 1, "ends before it begins"),
    ],
)
def test_invalid_input_is_reported_in_one_line(daemon: LiveCell, arguments: list[str], code: int, text: str) -> None:
    """With the exit code that scripts go by."""
    result = daemon.run("msg", "ls", *arguments)
    assert (result.exit_code, result.stdout, text in result.stderr, result.stderr.count("\n")) == (code, "", True, 1)
