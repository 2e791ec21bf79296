"""Counting and looking at messages where they lie, without a daemon."""

from __future__ import annotations

import base64
import json

import pytest
from support.admin_source import MESSAGE
from support.fake_admin_client import FakeClient, install
from support.fake_admin_client import run_dmq as run


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon with three queues that begin at offset 2: three messages, none, and one that cannot be read."""
    return install(monkeypatch)


def test_count_says_what_lies_where(daemon: type[FakeClient]) -> None:
    """Each queue with its range, and what waits for its time beside it."""
    lines = run("msg", "count", "orders").stdout.splitlines()
    assert [line.split() for line in lines[:-1]] == [
        ["QUEUE", "BEGIN", "END", "MESSAGES"],
        *(["0", "2", "5", "3"], ["1", "2", "2", "0"], ["2", "2", "3", "1"]),
    ]
    assert lines[-1] == "4 in queues, 1,000,000 wait for their time"
    found = json.loads(run("msg", "count", "orders", "-o", "json").stdout)
    assert (found["topic"], found["messages"], found["pending"]) == ("orders", 4, 1_000_000)
    assert found["queues"][0] == {"queue_id": 0, "begin_offset": 2, "end_offset": 5}


def test_peek_goes_over_the_queues(daemon: type[FakeClient]) -> None:
    """In pages, one queue after the other, up to the number asked for; what cannot be read is shown as that."""
    daemon.source.rows_per_call = 2
    lines = run("msg", "peek", "orders").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["0", "2"], ["0", "3"], ["0", "4"], ["2", "2"]]
    assert lines[1].split()[3:] == ["Q0-2", "new", "k1", "k2", str(len(MESSAGE.body))]
    assert lines[4].endswith("cannot be read")
    assert len(run("msg", "peek", "orders", "-n", "2").stdout.splitlines()) == 3
    assert "café \\x1b[31mred" in run("msg", "peek", "orders", "-n", "1", "--body").stdout


def test_peek_begins_where_it_is_told(daemon: type[FakeClient]) -> None:
    """One queue, from an offset; an empty answer is one."""

    def peeked(*options: str) -> list[tuple[int, int]]:
        found = json.loads(run("msg", "peek", "orders", *options, "-o", "json").stdout)
        return [(each["queue_id"], each["queue_offset"]) for each in found]

    assert peeked("--queue", "0", "--offset", "3") == [(0, 3), (0, 4)]
    assert peeked("--queue", "1") == []
    (found,) = json.loads(run("msg", "peek", "orders", "--body", "-n", "1", "-o", "json").stdout)
    assert (found["message_id"], base64.b64decode(found["content"]["body"])) == ("Q0-2", MESSAGE.body)
    assert json.loads(run("msg", "peek", "orders", "--queue", "2", "-o", "json").stdout)[0]["content"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["count", "nobody"], 3, "topic not found"),
        (["peek", "nobody"], 3, "topic not found"),
        (["peek", "orders", "--queue", "3"], 3, "has the queues 0 to 2, and no queue 3"),
        (["peek", "orders", "--queue", "0", "--offset", "1"], 1, "illegal offset"),
        (["peek", "orders", "--offset", "3"], 2, "give --queue too"),
        (["peek", "orders", "--queue", "-1"], 2, "--queue"),
        (["peek", "orders", "-n", "0"], 2, "-n"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    daemon: type[FakeClient], arguments: list[str], code: int, text: str
) -> None:
    """With the exit code that scripts go by."""
    result = run("msg", *arguments)
    assert (result.exit_code, result.stdout, text in result.stderr, result.stderr.count("\n")) == (code, "", True, 1)
