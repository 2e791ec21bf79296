"""Topics and groups as objects on the command line, without a daemon."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.admin_source import FixedSource
from support.admin_status import NOW
from support.fake_admin_client import FakeClient, install
from support.fake_admin_client import run_dmq as run

from dmq.admin import status as source


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


def test_a_topic_is_shown_with_its_readers(daemon: type[FakeClient]) -> None:
    """For people and for programs; a name nobody knows is exit code 3."""
    assert run("topic", "show", "orders").stdout.splitlines() == [
        "topic              orders",
        "type               mixed",
        "queues             8",
        "stored             9",
        "pending            1,000,000",
        "oldest             2023-11-14T22:13:19.000Z",
        "keep time          3d (default)",
        "keep bytes         1GiB",
        "keep unread        yes (default)",
        "queue 0            3 to 12",
        "unread by billing  1,234",
    ]
    assert json.loads(run("topic", "show", "orders", "-o", "json").stdout)["readers"] == [
        {"group": "billing", "unread": 1234}
    ]
    assert run("topic", "show", "nobody").exit_code == 3


def test_a_topic_is_made_and_changed(daemon: type[FakeClient]) -> None:
    """With what is given; nothing to change is a usage error, a topic that is there a refusal."""
    made = json.loads(run("topic", "create", "t", "--type", "FIFO", "--queues", "3", "-o", "json").stdout)
    assert (made["type"], made["queues"]) == ("FIFO", 3)
    assert run("topic", "create", "t").exit_code == 1
    assert "type         mixed" in run("topic", "set", "t", "--type", "mixed").stdout
    assert json.loads(run("topic", "set", "t", "--queues", "4", "-o", "json").stdout)["queues"] == 4
    assert run("topic", "set", "t").exit_code == 2
    assert run("topic", "create", "x", "--type", "lite").exit_code == 2


def test_how_long_a_topic_keeps_messages_is_set(daemon: type[FakeClient]) -> None:
    """Each alone, to none, and back to the default; what cannot be read, or would keep nothing, is a usage error."""
    made = json.loads(run("topic", "create", "t", "--keep-time", "90m", "--keep-unread", "no", "-o", "json").stdout)
    assert (made["keep_time_ms"], made["keep_bytes"], made["keep_unread"]) == (5_400_000, 0, False)
    told = run("topic", "set", "t", "--keep-bytes", "10GiB", "--keep-time", "none").stdout
    assert "keep time    no bound" in told
    assert "keep bytes   10GiB" in told
    assert "keep unread  no" in told
    assert run("topic", "set", "t", "--keep-bytes", "default").exit_code == 0
    for wrong in (("--keep-time", "soon"), ("--keep-time", "0s"), ("--keep-bytes", "0"), ("--keep-unread", "maybe")):
        assert run("topic", "set", "t", *wrong).exit_code == 2
    assert "keep time" in run("topic", "set", "t", "--keep-time", "999ms").stderr


def test_a_topic_that_holds_messages_is_removed_by_force(daemon: type[FakeClient]) -> None:
    """The refusal is the daemon's, in one line; force asks first, and has minutes to be done."""
    assert "9 are unread" in run("topic", "rm", "orders").stderr
    assert run("topic", "rm", "orders", "--force").exit_code == 2
    assert json.loads(run("topic", "rm", "orders", "--force", "--yes", "-o", "json").stdout) == {
        "topic": "orders",
        "removed": True,
    }
    assert "orders" not in daemon.source.known_topics
    assert daemon.deadlines[-1] == ("RemoveTopic", 600.0)


def test_a_group_is_made_and_removed(daemon: type[FakeClient]) -> None:
    """As a topic."""
    assert run("group", "create", "new").stdout == "group  new\n"
    assert run("group", "rm", "new").stdout == "removed  new\n"
    assert "3 retries wait" in run("group", "rm", "billing").stderr
    assert run("group", "rm", "billing", "--force", "--yes").exit_code == 0
    assert "billing" not in daemon.source.known
    assert daemon.source.removed == [("new", False), ("billing", False), ("billing", False)]


@pytest.mark.parametrize("mode", ["keep", "remove"])
def test_a_group_is_removed_knowingly(daemon: type[FakeClient], mode: str) -> None:
    """What lies in it is said before one is asked: by topic, on leases, waiting, dead; and what becomes of these."""
    command = ("group", "rm", "billing", "--force", "--dead-letters", mode)
    asked = run(*command)
    stay = "are given up" if mode == "remove" else "stay under its name"
    assert asked.exit_code == 2
    assert f"1,234 of topic orders unread, 7 of these handed out or hidden, 3 retries wait, 3 dead letters {stay}" in (
        asked.stderr
    )
    assert daemon.source.removed == []
    told = json.loads(run(*command, "--yes", "-o", "json").stdout)
    kept = {"keep": ("kept", 3), "remove": ("removed", 0)}[mode]
    assert (told["dead_letters"], told["dead"]) == kept
    assert daemon.source.removed == [("billing", mode == "remove")]


def test_dead_letters_alone_are_asked_about(daemon: type[FakeClient]) -> None:
    """A group that is done and left dead letters: nothing is refused, and nobody is surprised."""
    daemon.source.known["idle"] = replace(daemon.source.known["billing"], name="idle", dead=5, leased=0)
    with patch.object(type(daemon.source), "group", _with_dead):
        assert "5 dead letters stay under its name; there is no terminal" in run("group", "rm", "idle").stderr
        assert run("group", "rm", "idle", "--yes").stdout == "removed       idle\ndead letters  5 kept\n"


async def _with_dead(self: FixedSource, name: str, *, with_unread: bool = False) -> source.GroupStatus:
    return self.known[name]


@pytest.mark.parametrize(("to", "told"), [("begin", "begin"), ("end", "end"), (str(NOW), NOW)])
def test_a_group_is_reset(daemon: type[FakeClient], to: str, told: int | str) -> None:
    """To the beginning, the end, or a time; it is asked first."""
    command = ("group", "reset", "billing", "orders", "--to", to)
    assert run(*command).exit_code == 2
    assert daemon.source.resets == []
    assert json.loads(run(*command, "--yes", "-o", "json").stdout)["offsets"] == [5, 1000]
    assert run(*command, "--yes").stdout.splitlines()[-1].split() == ["1", "1,000"]
    assert daemon.source.resets == [("billing", "orders", told)] * 2


def test_where_to_must_be_said_clearly(daemon: type[FakeClient]) -> None:
    """A distance and nonsense are usage errors."""
    for to in ("+5m", "yesterday"):
        assert run("group", "reset", "billing", "orders", "--to", to, "--yes").exit_code == 2
