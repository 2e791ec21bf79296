"""Recurring messages on the command line."""

from __future__ import annotations

import json

from support.forges.messages.schedules import tick
from support.rigs.commands.fake_admin_client import error_of
from support.rigs.commands.live_cell import LiveCell

ADD = ("cron", "add", "tick", "orders", "hello", "--every", "5s")


def test_a_schedule_is_made_once(live: LiveCell) -> None:
    """And shown; the same again is told to be there, another content is refused and replaces only if that is said."""
    assert live.run(*ADD).stdout.splitlines() == [
        "schedule     tick",
        "topic        orders",
        "rule         every 5s",
        "catch up     one",
        "state        waiting",
        "occurrences  0",
        "next         2023-11-14T22:13:25.000Z",
    ]
    again = live.run(*ADD)
    assert (again.exit_code, again.stderr) == (
        0,
        "dmq: the schedule exists with the same content; nothing was changed\n",
    )
    other = live.run("cron", "add", "tick", "orders", "other", "--every", "5s")
    assert (other.exit_code, "another content; replace it (--replace)" in other.stderr) == (1, True)
    more = ("--replace", "-o", "json")
    replaced = json.loads(live.run("cron", "add", "tick", "orders", "other", "--every", "9s", *more).stdout)
    assert (replaced["is_new"], replaced["interval_ms"], replaced["state"]) == (True, 9_000, "waiting")


def test_every_expressible_value_is_kept(live: LiveCell) -> None:
    """And comes back, for people and as JSON."""
    rule = (
        "--cron",
        "30 2 * * mon-fri",
        "--zone",
        "Europe/Berlin",
        "--start",
        "2023-11-14T23:13:20Z",
        "--end",
        "2024-01-01T00:00:00Z",
    )
    more = ("--count", "7", "--jitter", "5m", "--catch-up", "skip")
    message = ("--tag", "t", "--key", "k1", "--key", "k2", "--group", "g", "--property", "a=b=c")
    made = live.run("cron", "add", "nightly", "orders", "hi", *rule, *more, *message)
    assert made.exit_code == 0, made.stderr
    lines = live.run("cron", "show", "nightly", "--body").stdout.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "schedule nightly",
        "topic orders",
        "rule 30 2 * * mon-fri Europe/Berlin",
        "start 2023-11-14T23:13:20.000Z",
        "end 2024-01-01T00:00:00.000Z",
        "count 7",
        "jitter 5m",
        "catch up skip",
        "state waiting",
        "occurrences 0",
        " ".join(lines[10].split()),  # within its jitter
        "then 2023-11-16T01:30:00.000Z",
        "then 2023-11-17T01:30:00.000Z",
        "then 2023-11-20T01:30:00.000Z",
        "tag t",
        "keys k1 k2",
        "message group g",
        "properties a=b=c",
        "body size 2 B",
        "body hi",
    ]
    plain = json.loads(live.run("cron", "show", "nightly", "-o", "json").stdout)
    assert (plain["content"]["properties"], plain["content"]["body"]) == ({"a": "b=c"}, None)
    assert 0 <= plain["next_at_ms"] - 1_700_011_800_000 <= 300_000


def test_they_are_listed_paused_resumed_and_removed(live: LiveCell) -> None:
    """Each answer is how it is now."""
    live.run(*ADD)
    live.run("cron", "add", "other", "refunds", "x", "--cron", "@daily")
    live.do(tick(live.rig, 2, 5_000))
    assert [line.rstrip() for line in live.run("cron", "ls").stdout.splitlines()] == [
        "NAME   TOPIC    RULE        STATE    OCCURRENCES  LAST  NEXT",
        "other  refunds  @daily UTC  waiting            0        in 1h 46m",
        "tick   orders   every 5s    waiting            2  now   in 5s",
    ]
    first = live.run("cron", "ls", "-n", "1")
    assert first.stderr == "dmq: there may be more: --after other\n"
    rest = json.loads(live.run("cron", "ls", "--after", "other", "-o", "json").stdout)
    assert ([each["name"] for each in rest["schedules"]], rest["next"]) == (["tick"], None)
    of_topic = json.loads(live.run("cron", "ls", "--topic", "refunds", "-o", "json").stdout)
    assert [each["name"] for each in of_topic["schedules"]] == ["other"]
    paused = json.loads(live.run("cron", "pause", "tick", "-o", "json").stdout)
    assert (paused["state"], paused["next_at_ms"], paused["occurrences"]) == ("paused", 0, 2)
    assert "next         2023-11-14T22:13:35.000Z" in live.run("cron", "resume", "tick").stdout
    refused = live.run("topic", "rm", "orders", "--force", "--yes")
    assert "schedules send to it: tick; remove them first with 'dmq cron rm'" in refused.stderr
    assert json.loads(live.run("cron", "rm", "tick", "-o", "json").stdout) == {
        "name": "tick",
        "removed": True,
        "occurrences": 2,
    }
    gone = live.run("cron", "show", "tick", "-o", "json")
    assert (gone.exit_code, error_of(gone)["kind"]) == (3, "not_found")


def test_invalid_input_is_named(live: LiveCell) -> None:
    """As a usage error where the command knows it, else by the daemon; nothing is made."""
    start = ("cron", "add", "bad", "orders", "hi")
    for options, code, text in (
        ((), 2, "give one of them"),
        (("--every", "1s", "--cron", "@daily"), 2, "give one of them"),
        (("--every", "0s"), 2, "more than 0 is expected"),
        (("--every", "1s", "--zone", "UTC"), 2, "a time zone requires --cron"),
        (("--every", "1s", "--property", "x"), 2, "KEY=VALUE is expected"),
        (("--every", "10ms"), 1, "limit 1000 to"),
        (("--cron", "61 * * * *"), 1, "invalid minute '61'; allowed: *, 0 to 59"),
        (("--cron", "* * * * *", "--zone", "X/Y"), 1, "is not known on this host"),
        (("--every", "1s", "--property", "DMQ_SCHEDULE=x"), 1, "this property is set by the schedule"),
    ):
        done = live.run(*start, *options)
        assert (done.exit_code, text in done.stderr) == (code, True), (options, done.stderr)
    assert json.loads(live.run("cron", "ls", "-o", "json").stdout)["schedules"] == []


def test_no_time_beyond_the_count_is_shown(live: LiveCell) -> None:
    """The next time and those after it are as many as are left."""
    live.run("cron", "add", "thrice", "orders", "x", "--every", "5s", "--count", "3")
    for sent in range(3):
        plain = json.loads(live.run("cron", "show", "thrice", "-o", "json").stdout)
        assert (plain["occurrences"], len(plain["following_at_ms"])) == (sent, 2 - sent)
        live.do(tick(live.rig, 1, 5_000))
    assert json.loads(live.run("cron", "show", "thrice", "-o", "json").stdout)["next_at_ms"] == 0
