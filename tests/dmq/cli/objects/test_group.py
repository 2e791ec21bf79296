"""Consumer groups on the command line."""

from __future__ import annotations

import json
import re

import pytest
from support.clients.embedded.admin_answers import ask, group_of
from support.forges.messages.letters import a_message, die, fail
from support.rigs.broker.rig import receive
from support.rigs.commands.live_cell import LiveCell

from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import policy_of, wire_policy
from retry.policy import Exponential, Fixed, RetryPolicy, Table

SET_POLICY = RetryPolicy(
    backoff=Exponential(5000, 7_200_000), max_attempts=4, jitter=0.25, max_age_ms=3 * 24 * 60 * 60_000
)

LEVELS = (
    "1: 10s, 2: 30s, 3: 1m, 4: 2m, 5: 3m, 6: 4m, 7: 5m, 8: 6m, 9: 7m, 10: 8m, 11: 9m, 12: 10m, 13: 20m, 14: 30m, "
    "15: 1h, 16: 2h"
)


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A group with messages in hand, in retry and dead, and one with settings of its own."""
    rig = live.rig

    async def fill() -> None:
        await ask(rig, wire.CreateGroupRequest(group="billing"))
        rig.clock.advance(90 * 60_000)
        await fail(rig, "M1", "M2", "M3", group="billing")
        await die(rig, *(a_message(f"D{number}") for number in range(3)), group="billing")
        await rig.broker.send([a_message(f"L{number}") for number in range(7)])
        await receive(rig, group="billing")
        given = wire_policy(SET_POLICY)
        await ask(rig, wire.SetGroupRequest(group="shipping", policy=given, is_fifo=True, retries="cluster"))

    live.do(fill())
    return live


def settings(daemon: LiveCell, group: str) -> wire.Group:
    return daemon.do(group_of(daemon.rig, group))


def policy(daemon: LiveCell, group: str) -> RetryPolicy:
    return policy_of(settings(daemon, group).policy)


def facts(text: str) -> dict[str, str]:
    return {each[0]: each[1] for line in text.splitlines() for each in [re.split(r"  +", line, maxsplit=1)]}


def test_groups(daemon: LiveCell) -> None:
    """A table, or a list with stable keys."""
    assert daemon.run("group", "ls").stdout.splitlines() == [
        "GROUP     STATE   UNREAD  OLDEST  RETRYING  DEAD  LEASED  POLICY   ORDER  RETRIES",
        "billing   active       7     0ms         3     3       7  default",
        "shipping  active       -                 0     0       0  set      fifo   cluster",
    ]
    found = json.loads(daemon.run("group", "ls", "-o", "json").stdout)
    assert [(group["name"], group["waiting"], group["dead"]) for group in found] == [
        ("billing", 3, 3),
        ("shipping", 0, 0),
    ]
    assert found[1]["policy"] == {
        "table": None,
        "exponential": {"initial_ms": 5000, "max_ms": 7_200_000, "multiplier": 2.0},
        "fixed": None,
        "max_attempts": 4,
        "jitter": 0.25,
        "max_age_ms": 259_200_000,
    }


def test_a_group_for_people(daemon: LiveCell) -> None:
    """What waits, what is dead, and what follows on each failure."""
    result = daemon.run("group", "show", "billing")
    assert (result.exit_code, result.stderr) == (0, "")
    told, _, lag = result.stdout.partition("\n\n")
    assert facts(told) == {
        "group": "billing",
        "created at": "2023-11-14T22:13:20.000Z (1h 30m ago)",
        "unread": "7, the oldest for 0ms",
        "retrying": "3",
        "dead letters": "3 without an outcome",
        "leased": "7",
        "policy": "17 attempts, the default",
        "delay after": LEVELS,
        "order": "not kept, by the type of its topics",
    }
    assert lag.splitlines() == [
        "TOPIC   UNREAD  OLDEST  IN FLIGHT  IN RETRY  DIED",
        "orders       7     0ms          7         3     3",
    ]
    found = facts(daemon.run("group", "show", "shipping").stdout)
    assert found["policy"] == "4 attempts, none later than 3d, set by an operator"
    assert found["delay after"] == "1: 5s, 2: 10s, 3: 20s and up to 0.25 of it more"
    assert found["order"] == "kept (fifo), set by an operator"


def test_a_group_for_programs(daemon: LiveCell) -> None:
    """The keys are the fields of the protocol."""
    found = json.loads(daemon.run("group", "show", "billing", "-o", "json").stdout)
    assert (found["is_fifo_set"], found["leased"], found["due"][0]["count"]) == (False, 7, 3)
    terms = {"unread": 7, "oldest_unread_age_ms": 0, "in_flight": 7, "in_retry": 3, "dead": 3}
    assert found["lags"] == [{"topic": "orders", **terms}]
    assert (found["unread_messages"], found["oldest_unread_age_ms"]) == (7, 0)
    found = json.loads(daemon.run("group", "show", "shipping", "-o", "json").stdout)
    assert (found["unread_messages"], found["oldest_unread_age_ms"], found["lags"]) == (None, None, [])


def test_a_policy_is_set_and_printed(daemon: LiveCell) -> None:
    """What counts now, attempt by attempt; equal neighbours are one."""
    result = daemon.run("group", "set-policy", "billing", "--table", "1s 2s 2s 9s", "--max-attempts", "7", "--fifo")
    assert result.exit_code == 0
    assert facts(result.stdout) == {
        "group": "billing",
        "policy": "7 attempts, set by an operator",
        "delay after": "1: 1s, 2-3: 2s, 4-6: 9s",
        "order": "kept (fifo), set by an operator",
    }
    assert policy(daemon, "billing") == RetryPolicy(backoff=Table((1000, 2000, 2000, 9000)), max_attempts=7)


def test_an_omitted_option_stays_as_it_is(daemon: LiveCell) -> None:
    """One option changes one thing, for a group that is there; others begin with the default."""
    daemon.run("group", "set-policy", "shipping", "--max-attempts", "9")
    changed = policy(daemon, "shipping")
    assert changed == RetryPolicy(
        backoff=SET_POLICY.backoff, max_attempts=9, jitter=0.25, max_age_ms=SET_POLICY.max_age_ms
    )
    assert settings(daemon, "shipping").is_fifo
    assert "cluster" in daemon.run("group", "set-policy", "shipping", "--retries", "here").stderr  # it is FIFO
    daemon.run("group", "set-policy", "shipping", "--no-fifo")
    assert "kept here" in daemon.run("group", "set-policy", "shipping", "--retries", "here").stdout
    assert policy(daemon, "shipping") == changed
    assert not settings(daemon, "shipping").is_fifo
    result = daemon.run("group", "set-policy", "new", "--fixed", "0", "-o", "json")
    assert json.loads(result.stdout)["policy"]["fixed"] == {"delay_ms": 0}
    assert policy(daemon, "new") == RetryPolicy(backoff=Fixed(0))


def test_the_default_comes_back(daemon: LiveCell) -> None:
    """The whole policy, and only the policy."""
    found = facts(daemon.run("group", "set-policy", "shipping", "--default").stdout)
    assert (found["policy"], found["delay after"]) == ("17 attempts, the default", LEVELS)
    assert settings(daemon, "shipping").is_fifo


@pytest.mark.parametrize(
    ("options", "delays"),
    [
        (["--max-attempts", "1", "--jitter", "0.5"], "none: the first failure is the last"),
        (["--fixed", "5s", "--max-attempts", "2"], "1: 5s"),
        (["--exponential", "1ms..1d", "--multiplier", "1.1", "--max-attempts", "1000"], "..., "),
    ],
)
def test_long_and_short_policies_are_summarised(daemon: LiveCell, options: list[str], delays: str) -> None:
    """None, one, and more than anybody reads."""
    found = facts(daemon.run("group", "set-policy", "billing", *options).stdout)
    assert delays in found["delay after"]
    assert (found["policy"] == "1 attempt, set by an operator") is ("1" in options)
    assert "more" not in found["delay after"]
    assert len(found["delay after"].split(", ")) <= 32
    if delays == "..., ":
        assert found["delay after"].endswith("-999: 1d")
        assert isinstance(policy(daemon, "billing").backoff, Exponential)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--default", "--fixed", "5s"],
        ["--fixed", "5s", "--table", "1s"],
        ["--jitter", "2"],
        ["--max-attempts", "0"],
    ],
)
def test_wrong_usage_changes_nothing(daemon: LiveCell, options: list[str]) -> None:
    """Exit code 2 and one line."""
    before = policy(daemon, "billing")
    result = daemon.run("group", "set-policy", "billing", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert (policy(daemon, "billing"), "SetGroup" in daemon.calls) == (before, False)


def test_a_groups_policy_can_be_previewed(daemon: LiveCell) -> None:
    """As it is, and with what other options would change; a group that nobody knows is told."""
    shown = json.loads(daemon.run("backoff", "show", "--group", "shipping", "-o", "json").stdout)
    assert (shown["policy"]["max_attempts"], len(shown["attempts"])) == (4, 4)
    assert [each["delay_ms"] for each in shown["attempts"]] == [5_000, 10_000, 20_000, None]
    asked = ("--group", "shipping", "--max-attempts", "2", "--jitter", "0", "-o", "json")
    run = json.loads(daemon.run("backoff", "simulate", *asked).stdout)
    assert [each["delay_ms"] for each in run["attempts"]] == [5_000, None]
    assert len(daemon.run("backoff", "show", "--group", "billing").stdout.splitlines()) == 1 + 17 + 1
    nobody = daemon.run("backoff", "show", "--group", "nobody")
    assert (nobody.exit_code, nobody.stderr.count("\n")) == (3, 1)


def test_a_changed_policy_reports_when_clients_apply_it(daemon: LiveCell) -> None:
    """On stderr, for a policy and for the default; nothing else of a group is kept by clients."""
    note = "dmq: sent to connected clients; Python clients keep the earlier delays for up to 5 minutes\n"
    assert daemon.run("group", "set-policy", "billing", "--fixed", "5s").stderr == note
    assert daemon.run("group", "set-policy", "billing", "--default").stderr == note
    assert daemon.run("group", "set-policy", "billing", "--retries", "cluster").stderr == ""
    assert daemon.run("group", "set-policy", "billing", "--fixed", "5s", "-o", "json").stderr == ""
