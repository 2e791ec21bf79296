"""Topics and groups as objects on the command line."""

from __future__ import annotations

import json

import pytest
from support.forges.messages.letters import a_message, die, fail
from support.rigs.broker.rig import receive
from support.rigs.commands.live_cell import NOW, LiveCell

from broker_adapter.contracts.errors import Overloaded
from dmq.admin.requests import validate


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A topic of three queues, with one message in hand, one unread, one waiting; two retries and a dead letter."""
    rig = live.rig

    async def fill() -> None:
        await fail(rig, "M1", "M2", group="billing")
        await die(rig, a_message("D1"), group="billing")
        await rig.broker.send([a_message("L1")])
        await receive(rig, group="billing")
        await rig.broker.send([a_message("U1"), a_message("W1", deliver_at_ms=NOW + 60_000)])

    live.do(fill())
    return live


def names(daemon: LiveCell, noun: str) -> list[str]:
    return [each["name"] for each in json.loads(daemon.run(noun, "ls", "-o", "json").stdout)]


def test_topics(daemon: LiveCell) -> None:
    """A table, or a list with stable keys."""
    assert daemon.run("topic", "ls").stdout.splitlines() == [
        "TOPIC           QUEUES  STORED  PENDING  TYPE   STATE   QUOTAS",
        "%DLQ%billing         1       1        0  mixed  active",
        "%RETRY%billing       1       0        2  mixed  active",
        "orders               3       5        1  mixed  active",
    ]
    found = json.loads(daemon.run("topic", "ls", "-o", "json").stdout)[-1]
    assert found["due"] == [{"until_ms": NOW + 100_000, "count": 1}]
    kept = {"ranges", "oldest_at_ms", "keep_time_ms", "keep_bytes", "keep_unread", "keep_own"}
    flow = {"paused_since_ms", "deliver_rate", "held", "pending_bytes", "quotas", "index_properties"}
    assert (
        set(found) == {"name", "queues", "stored", "pending", "due", "type", "created_at_ms", "readers"} | kept | flow
    )


def test_a_topic_is_shown_with_its_readers(daemon: LiveCell) -> None:
    """For people and for programs; a name nobody knows is exit code 3."""
    daemon.rig.clock.advance(1_000)
    lines = daemon.run("topic", "show", "orders").stdout.splitlines()
    assert lines[:9] == [
        "topic        orders",
        "type         mixed",
        "queues       3",
        "stored       5",
        "pending      1",
        "oldest       2023-11-14T22:13:20.000Z",
        "keep time    3d (default)",
        "keep bytes   no bound (default)",
        "keep unread  yes (default)",
    ]
    assert [line.split(maxsplit=2)[:2] for line in lines[9:12]] == [["queue", str(number)] for number in range(3)]
    assert lines[12:] == [
        "",
        "GROUP    UNREAD  OLDEST  IN FLIGHT  IN RETRY  DIED",
        "billing       2      1s          1         2     1",
    ]
    found = json.loads(daemon.run("topic", "show", "orders", "-o", "json").stdout)
    terms = {"unread": 2, "oldest_unread_age_ms": 1_000, "in_flight": 1, "in_retry": 2, "dead": 1}
    assert found["readers"] == [{"group": "billing", **terms}]
    assert daemon.run("topic", "show", "nobody").exit_code == 3


def test_a_topic_is_made_and_changed(live: LiveCell) -> None:
    """With what is given; nothing to change is a usage error, a topic that is there a refusal."""
    made = json.loads(live.run("topic", "create", "t", "--type", "FIFO", "--queues", "3", "-o", "json").stdout)
    assert (made["type"], made["queues"]) == ("FIFO", 3)
    assert live.run("topic", "create", "t").exit_code == 1
    assert "type         mixed" in live.run("topic", "set", "t", "--type", "mixed").stdout
    assert json.loads(live.run("topic", "set", "t", "--queues", "4", "-o", "json").stdout)["queues"] == 4
    assert live.run("topic", "set", "t").exit_code == 2
    assert live.run("topic", "create", "x", "--type", "lite").exit_code == 2


def test_how_long_a_topic_keeps_messages_is_set(live: LiveCell) -> None:
    """Each alone, to none, and back to the default; what cannot be read, or would keep nothing, is a usage error."""
    made = json.loads(
        live.run("topic", "create", "t", "--keep-time", "90m", "--keep-unread", "no", "-o", "json").stdout
    )
    assert (made["keep_time_ms"], made["keep_bytes"], made["keep_unread"]) == (5_400_000, 0, False)
    told = live.run("topic", "set", "t", "--keep-bytes", "10GiB", "--keep-time", "none").stdout
    assert "keep time    no bound\n" in told
    assert "keep bytes   10GiB\n" in told
    assert "keep unread  no\n" in told
    assert "keep bytes   no bound (default)" in live.run("topic", "set", "t", "--keep-bytes", "default").stdout
    for wrong in (("--keep-time", "soon"), ("--keep-time", "0s"), ("--keep-bytes", "0"), ("--keep-unread", "maybe")):
        assert live.run("topic", "set", "t", *wrong).exit_code == 2
    assert "keep time" in live.run("topic", "set", "t", "--keep-time", "999ms").stderr


def test_a_topic_that_holds_messages_is_removed_by_force(daemon: LiveCell) -> None:
    """The refusal is the daemon's, in one line; force asks first, and has minutes to be done."""
    refused = daemon.run("topic", "rm", "orders")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "dmq: bad request: the topic holds messages: 1 wait for their time, 2 are unread by group 'billing'; "
        "--force loses them\n"
    )
    asked = daemon.run("topic", "rm", "orders", "--force")
    lost = "topic orders would be removed: 5 messages in its queues, 2 unread by group billing, 1 pending"
    assert (asked.exit_code, asked.stderr) == (2, f"dmq: {lost}; there is no terminal for a confirmation; use --yes\n")
    assert daemon.run("topic", "rm", "orders", "--dry-run").stdout == f"{lost}; it needs --force\n"
    told = json.loads(daemon.run("topic", "rm", "orders", "--dry-run", "-o", "json").stdout)
    assert told == {
        "topic": "orders",
        "stored": 5,
        "pending": 1,
        "unread": {"billing": 2},
        "needs_force": True,
        "is_dry_run": True,
    }
    assert "orders" in names(daemon, "topic")
    assert json.loads(daemon.run("topic", "rm", "orders", "--force", "--yes", "-o", "json").stdout) == {
        "topic": "orders",
        "removed": True,
    }
    assert "orders" not in names(daemon, "topic")
    assert daemon.deadlines[-2] == ("RemoveTopic", 600.0)


def test_an_empty_topic_needs_no_confirmation(live: LiveCell) -> None:
    """Its removal loses nothing."""
    live.run("topic", "create", "empty")
    assert live.run("topic", "rm", "empty").stdout == "removed  empty\n"


def test_a_reset_reports_the_skipped_messages(daemon: LiveCell) -> None:
    """Or what comes again; one that changes nothing is not asked about, one that cannot be is refused at once."""
    command = ("group", "reset", "billing", "orders", "--to")
    has = "2 of the 5 messages of topic orders are unread by group billing"
    assert daemon.run(*command, "end", "--dry-run").stdout == f"{has}; from end on, these would be skipped\n"
    told = json.loads(daemon.run(*command, "begin", "--dry-run", "-o", "json").stdout)
    assert told == {"group": "billing", "topic": "orders", "stored": 5, "unread": 2, "is_dry_run": True}
    assert f"dmq: {has}; from begin on, all of them would come; there is no" in daemon.run(*command, "begin").stderr
    assert daemon.run(*command, "end", "--yes").exit_code == 0
    assert daemon.run(*command, "end").exit_code == 0
    for options in ((), ("--dry-run",)):
        assert daemon.run("group", "reset", "nobody", "orders", "--to", "end", *options).exit_code == 3


def test_a_group_is_made_and_removed(daemon: LiveCell) -> None:
    """As a topic."""
    assert daemon.run("group", "create", "new").stdout == "group  new\n"
    assert daemon.run("group", "rm", "new").stdout == "removed  new\n"
    refused = daemon.run("group", "rm", "billing")
    assert (refused.exit_code, "2 retries wait" in refused.stderr) == (1, True)
    assert daemon.run("group", "rm", "billing", "--force", "--yes").exit_code == 0
    assert names(daemon, "group") == []


@pytest.mark.parametrize("mode", ["keep", "remove"])
def test_a_group_is_removed_knowingly(daemon: LiveCell, mode: str) -> None:
    """What lies in it is said before one is asked: by topic, on leases, waiting, dead; and what becomes of these."""
    command = ("group", "rm", "billing", "--force", "--dead-letters", mode)
    asked = daemon.run(*command)
    stay = "are given up" if mode == "remove" else "stay under its name"
    assert asked.exit_code == 2
    assert f"2 of topic orders unread, 1 of these handed out or hidden, 2 retries wait, 1 dead letters {stay}" in (
        asked.stderr
    )
    assert names(daemon, "group") == ["billing"]
    told = json.loads(daemon.run(*command, "--yes", "-o", "json").stdout)
    assert (told["dead_letters"], told["dead"]) == {"keep": ("kept", 1), "remove": ("removed", 0)}[mode]
    left = json.loads(daemon.run("dead", "groups", "-o", "json").stdout)
    assert left == ([{"group": "billing", "dead": 1, "removed": True}] if mode == "keep" else [])


def test_dead_letters_alone_are_asked_about(live: LiveCell) -> None:
    """A group that is done and left dead letters: nothing is refused, and nobody is surprised."""
    live.do(die(live.rig, a_message("D1"), a_message("D2"), group="idle"))
    assert "2 dead letters stay under its name; there is no terminal" in live.run("group", "rm", "idle").stderr
    assert live.run("group", "rm", "idle", "--yes").stdout == "removed       idle\ndead letters  2 kept\n"


@pytest.mark.parametrize(("to", "unread"), [("begin", 5), ("end", 0), (str(NOW + 1), 0), (str(NOW), 5)])
def test_a_group_is_reset(daemon: LiveCell, to: str, unread: int) -> None:
    """To the beginning, the end, or a time; it is asked first."""
    command = ("group", "reset", "billing", "orders", "--to", to)
    assert daemon.run(*command).exit_code == 2
    assert "ResetGroup" not in daemon.calls
    offsets = json.loads(daemon.run(*command, "--yes", "-o", "json").stdout)["offsets"]
    assert (len(offsets), sum(offsets)) == (3, 5 - unread)
    lines = daemon.run(*command, "--yes").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["QUEUE", "OFFSET"],
        *([str(queue), str(offset)] for queue, offset in enumerate(offsets)),
    ]
    found = json.loads(daemon.run("topic", "show", "orders", "-o", "json").stdout)
    assert [(each["group"], each["unread"]) for each in found["readers"]] == [("billing", unread)]


def test_the_destination_must_be_clear(daemon: LiveCell) -> None:
    """A distance and nonsense are usage errors."""
    for to in ("+5m", "yesterday"):
        assert daemon.run("group", "reset", "billing", "orders", "--to", to, "--yes").exit_code == 2


def test_a_topic_is_paused_and_slowed(daemon: LiveCell) -> None:
    """Shown with since when, and how many it holds, also of one message and in the status; resumed it says nothing."""
    told = daemon.run("topic", "pause", "orders").stdout
    assert "paused       since 2023-11-14T22:13:20.000Z" in told
    assert "held         0 of these" in told
    daemon.rig.clock.advance(60_000)
    daemon.do(daemon.rig.settle())
    found = json.loads(daemon.run("topic", "show", "orders", "-o", "json").stdout)
    assert (found["held"], found["pending"], found["paused_since_ms"]) == (1, 1, NOW)
    assert "held: its topic is paused or slowed" in daemon.run("msg", "get", "orders", "W1").stdout
    status = daemon.run("status").stdout
    assert "held 1" in status
    assert "1 topic" in status
    assert "deliver rate  7 a second at most" in daemon.run("topic", "set", "orders", "--deliver-rate", "7").stdout
    assert "paused" not in daemon.run("topic", "resume", "orders").stdout
    assert json.loads(daemon.run("topic", "set", "orders", "--deliver-rate", "0", "-o", "json").stdout).get(
        "deliver_rate"
    ) in {None, 0}
    assert daemon.run("topic", "pause", "nobody").exit_code == 3
    assert daemon.run("topic", "pause", "%DLQ%billing").exit_code == 1
    assert daemon.run("topic", "set", "orders", "--deliver-rate", "-1").exit_code == 2
    assert "limit 1 to 1000000" in daemon.run("topic", "set", "orders", "--deliver-rate", "1000001").stderr


def test_a_topic_is_given_quotas(daemon: LiveCell) -> None:
    """What is used of each is shown, by all that show a topic; what cannot be is a usage error, or refused."""
    told = daemon.run("topic", "set", "orders", "--max-pending", "1", "--max-pending-bytes", "1MiB").stdout
    assert "max pending        1 of 1" in told
    assert "max pending bytes  " in told

    async def send_one_more() -> None:
        await daemon.rig.broker.send([a_message("W2", deliver_at_ms=NOW + 60_000)])

    with pytest.raises(Overloaded, match="quota max_pending of topic orders"):
        daemon.do(send_one_more())
    assert "max_pending 1 of 1; max_pending_bytes " in daemon.run("topic", "ls").stdout
    assert "refused 1 by max_pending" in daemon.run("status").stdout
    assert "max_pending of orders: 1 of 1" in daemon.run("status").stdout
    told = daemon.run("topic", "set", "orders", "--max-pending", "off", "--max-pending-bytes", "default").stdout
    assert "max pending" not in told
    assert "send rate    0 of 7 a second" in daemon.run("topic", "set", "orders", "--send-rate", "7").stdout
    assert "send rate" not in daemon.run("topic", "set", "orders", "--send-rate", "0").stdout
    for option, value in (("--max-pending", "many"), ("--max-pending", "-1"), ("--max-pending-bytes", "1 cow")):
        assert daemon.run("topic", "set", "orders", option, value).exit_code == 2
    assert "limit 1 to 1000000" in daemon.run("topic", "set", "orders", "--send-rate", "1000001").stderr
    assert daemon.run("topic", "set", "%DLQ%billing", "--max-pending", "1").exit_code == 1


def test_a_group_is_given_a_rate(daemon: LiveCell) -> None:
    """Shown wherever the group is; 0 takes it away."""
    told = daemon.run("group", "set", "billing", "--deliver-rate", "5").stdout.splitlines()
    assert told == ["group         billing", "deliver rate  5 a second at most"]
    assert "5 a second at most" in daemon.run("group", "show", "billing").stdout
    assert "no limit" in daemon.run("group", "set", "billing", "--deliver-rate", "0").stdout
    assert daemon.run("group", "set", "nobody", "--deliver-rate", "5").exit_code == 3
    assert daemon.run("group", "set", "billing").exit_code == 2
    assert "limit 1 to 1000000" in daemon.run("group", "set", "billing", "--deliver-rate", "1000001").stderr


def test_a_group_is_paused(daemon: LiveCell) -> None:
    """Shown with since when; a group that is not there is exit code 3."""
    assert daemon.run("group", "pause", "billing").stdout.splitlines()[1] == "paused  since 2023-11-14T22:13:20.000Z"
    assert "paused" in daemon.run("group", "show", "billing").stdout
    assert json.loads(daemon.run("group", "resume", "billing", "-o", "json").stdout).get("paused_since_ms") in {None, 0}
    assert daemon.run("group", "pause", "nobody").exit_code == 3


def test_an_option_has_one_default(live: LiveCell) -> None:
    """What the daemon decides is said once, and no 0 stands for it."""
    for command in ("create", "set"):
        told = " ".join(live.run("topic", command, "--help").stdout.split())
        of_queues = told.partition("--queues")[2].partition(" --")[0]
        assert (of_queues.count("default"), "default: 0" in of_queues) == (1, False)


def test_lists_follow_pages(live: LiveCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic and each group is shown, although one answer has two of them at most."""
    monkeypatch.setattr(validate, "PAGE_MAX", 2)
    for number in range(5):
        live.run("topic", "create", f"t-{number}")
        live.run("group", "create", f"g-{number}")
    for noun, call in (("topic", "ListTopics"), ("group", "ListGroups")):
        assert names(live, noun) == [f"{noun[0]}-{number}" for number in range(5)]
        assert live.calls.count(call) == 3
