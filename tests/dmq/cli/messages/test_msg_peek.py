"""Counting and looking at messages where they lie."""

from __future__ import annotations

import base64
import json
from unittest.mock import patch

import pytest
from support.forges.messages.letters import a_message
from support.rigs.commands.live_cell import NOW, LiveCell

from dmq.cli.messages import msg

BODY = b"caf\xc3\xa9 \x1b[31mred"


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A daemon with three queues: three messages, none, and one that cannot be read; and one message that waits."""
    rig = live.rig

    async def fill() -> None:
        first = a_message("Q0-0", body=BODY, tag="new", keys=("k1", "k2"))
        for each in (first, a_message("Q0-1"), a_message("Q0-2")):
            with patch.object(rig.broker.placement, "choose", lambda topic, group: 0):
                await rig.broker.send([each])
        with patch.object(rig.broker.placement, "choose", lambda topic, group: 2):
            await rig.broker.send([a_message("Q2-0")._replace(payload=b"\xff\xff")])
        await rig.broker.send([a_message("W", deliver_at_ms=NOW + 60_000)])

    live.do(fill())
    return live


def test_count_gives_the_place_of_messages(daemon: LiveCell) -> None:
    """Each queue with its range, and what waits for its time beside it."""
    lines = daemon.run("msg", "count", "orders").stdout.splitlines()
    assert [line.split() for line in lines[:-1]] == [
        ["QUEUE", "BEGIN", "END", "MESSAGES"],
        *(["0", "0", "3", "3"], ["1", "0", "0", "0"], ["2", "0", "1", "1"]),
    ]
    assert lines[-1] == "4 in queues, 1 wait for their time"
    found = json.loads(daemon.run("msg", "count", "orders", "-o", "json").stdout)
    assert (found["topic"], found["messages"], found["pending"]) == ("orders", 4, 1)
    assert found["queues"][0] == {"queue_id": 0, "begin_offset": 0, "end_offset": 3}


def test_peek_goes_over_the_queues(daemon: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages, one queue after the other, up to the number asked for; what cannot be read is shown as that."""
    monkeypatch.setattr(msg, "_PAGE", 2)
    lines = daemon.run("msg", "peek", "orders").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["0", "0"], ["0", "1"], ["0", "2"], ["2", "0"]]
    assert lines[1].split()[3:] == ["Q0-0", "new", "k1", "k2", str(len(BODY))]
    assert lines[4].endswith("cannot be read")
    assert len(daemon.run("msg", "peek", "orders", "-n", "2").stdout.splitlines()) == 3
    assert "café \\x1b[31mred" in daemon.run("msg", "peek", "orders", "-n", "1", "--body").stdout


def test_peek_begins_at_the_given_place(daemon: LiveCell) -> None:
    """One queue, from an offset; an empty answer is one."""

    def peeked(*options: str) -> list[tuple[int, int]]:
        found = json.loads(daemon.run("msg", "peek", "orders", *options, "-o", "json").stdout)
        return [(each["queue_id"], each["queue_offset"]) for each in found]

    assert peeked("--queue", "0", "--offset", "1") == [(0, 1), (0, 2)]
    assert peeked("--queue", "1") == []
    (found,) = json.loads(daemon.run("msg", "peek", "orders", "--body", "-n", "1", "-o", "json").stdout)
    assert (found["message_id"], base64.b64decode(found["content"]["body"])) == ("Q0-0", BODY)
    assert json.loads(daemon.run("msg", "peek", "orders", "--queue", "2", "-o", "json").stdout)[0]["content"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["count", "nobody"], 3, "topic not found"),
        (["peek", "nobody"], 3, "topic not found"),
        (["peek", "orders", "--queue", "3"], 3, "has the queues 0 to 2, and no queue 3"),
        (["peek", "orders", "--queue", "0", "--offset", "4"], 1, "illegal offset"),
        (["peek", "orders", "--offset", "3"], 2, "an offset requires --queue"),
        (["peek", "orders", "--queue", "-1"], 2, "--queue"),
        (["peek", "orders", "-n", "0"], 2, "-n"),
    ],
)
def test_a_missing_file_is_reported_in_one_line(daemon: LiveCell, arguments: list[str], code: int, text: str) -> None:
    """With the exit code that scripts go by."""
    result = daemon.run("msg", *arguments)
    assert (result.exit_code, result.stdout, text in result.stderr, result.stderr.count("\n")) == (code, "", True, 1)
