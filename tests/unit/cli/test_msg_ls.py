"""Listing messages, without a daemon."""

from __future__ import annotations

import json

import pytest
from support.admin_source import MESSAGE_ID
from support.admin_status import NOW
from support.fake_admin_client import FakeClient, install
from support.fake_admin_client import run_dmq as run

from dmq.admin.messages import READY, WAITING, Wanted


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon with a message that waits, and three in a queue that cannot be read."""
    return install(monkeypatch)


def test_a_list_goes_over_pages(daemon: type[FakeClient]) -> None:
    """As many as it takes; each message where it is, and where the next list goes on if there may be more."""
    daemon.source.rows_per_call = 1
    result = run("msg", "ls", "orders")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["STATE", "DUE", "STORED", "MESSAGE", "ID", "QUEUE", "OFFSET", "TAG", "KEYS", "BYTES"]
    assert (lines[1].split()[0], lines[1].split()[3:]) == ("waiting", [MESSAGE_ID, "new", "k1", "k2", "14"])
    assert [line.split()[0] for line in lines[2:]] == ["ready"] * 3
    assert lines[2].endswith("cannot be read")
    assert result.stderr == ""
    assert len(daemon.source.wanted) == 4
    assert run("msg", "ls", "orders", "-n", "2").stderr == "dmq: there may be more: --after 2\n"
    found = json.loads(run("msg", "ls", "orders", "-n", "2", "--after", "1", "-o", "json").stdout)
    assert ([each["message_id"] for each in found["messages"]], found["next"]) == (["Q0-0", "Q0-1"], "3")
    assert json.loads(run("msg", "ls", "orders", "-o", "json").stdout)["next"] is None


def test_what_is_wanted_reaches_the_daemon(daemon: type[FakeClient]) -> None:
    """Every option, in its place."""
    times = ("--due-after", str(NOW), "--due-before", str(NOW + 1))
    assert run("msg", "ls", "orders", *times, "--key", "k", "--tag", "t", "--newest").exit_code == 0
    assert daemon.source.wanted == [Wanted(0, NOW, NOW + 1, "k", "t", newest_first=True)]
    for state, number in (("waiting", WAITING), ("ready", READY)):
        run("msg", "ls", "orders", "--state", state)
        assert daemon.source.wanted[-1] == Wanted(number)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nobody"], 3, "topic not found"),
        (["orders", "--state", "gone"], 2, "--state"),
        (["orders", "--limit", "0"], 2, "--limit"),
        (["orders", "--limit", "10001"], 2, "--limit"),
        (["orders", "--due-after", "soon"], 2, "--due-after"),
        (["orders", "--due-after", str(NOW), "--due-before", str(NOW)], 1, "ends before it begins"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    daemon: type[FakeClient], arguments: list[str], code: int, text: str
) -> None:
    """With the exit code that scripts go by."""
    result = run("msg", "ls", *arguments)
    assert (result.exit_code, result.stdout, text in result.stderr, result.stderr.count("\n")) == (code, "", True, 1)
