"""Consumer groups on the command line, without a daemon."""

from __future__ import annotations

import json

import pytest
from support.admin_source import SET_POLICY
from support.fake_admin_client import FakeClient, error_of, install
from support.fake_admin_client import run_dmq as run

from retry.policy import Exponential, Fixed, RetryPolicy, Table

LEVELS = (
    "1: 10s, 2: 30s, 3: 1m, 4: 2m, 5: 3m, 6: 4m, 7: 5m, 8: 6m, 9: 7m, 10: 8m, 11: 9m, 12: 10m, 13: 20m, 14: 30m, "
    "15: 1h, 16: 2h"
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """A daemon that answers; set its class attributes to change it."""
    return install(monkeypatch)


def facts(text: str) -> dict[str, str]:
    return {line[:13].strip(): line[13:].strip() for line in text.splitlines()}


def test_groups(daemon: type[FakeClient]) -> None:
    """A table, or a list with stable keys."""
    assert run("group", "ls").stdout.splitlines() == [
        "GROUP     WAITING  DEAD  LEASED  POLICY   ORDER",
        "billing         3     3       7  default",
        "shipping        0     0       0  set      fifo",
    ]
    found = json.loads(run("group", "ls", "-o", "json").stdout)
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


def test_a_group_for_people(daemon: type[FakeClient]) -> None:
    """What waits, what is dead, and what follows on each failure."""
    result = run("group", "show", "billing")
    assert (result.exit_code, result.stderr) == (0, "")
    assert facts(result.stdout) == {
        "group": "billing",
        "created at": "2023-11-14T20:43:20.000Z (1h 30m ago)",
        "waiting": "3",
        "dead": "3",
        "leased": "7",
        "policy": "17 attempts, the default",
        "delay after": LEVELS,
        "order": "not kept, as its topics are",
    }
    found = facts(run("group", "show", "shipping").stdout)
    assert found["policy"] == "4 attempts, none later than 3d, set by an operator"
    assert found["delay after"] == "1: 5s, 2: 10s, 3: 20s and up to 0.25 of it more"
    assert found["order"] == "kept (fifo), set by an operator"


def test_a_group_for_programs(daemon: type[FakeClient]) -> None:
    """The keys are the fields of the protocol."""
    found = json.loads(run("group", "show", "billing", "-o", "json").stdout)
    assert (found["is_fifo_set"], found["leased"], found["due"][1]["count"]) == (False, 7, 1)


def test_an_unknown_group_is_not_found(daemon: type[FakeClient]) -> None:
    """Exit code 3, one line; an object for programs."""
    result = run("group", "show", "nobody")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "dmq: consumer group not found: there is none of this name, got 'nobody'\n"
    assert error_of(run("group", "show", "nobody", "-o", "json"))["kind"] == "not_found"


def test_a_policy_is_set_and_printed(daemon: type[FakeClient]) -> None:
    """What counts now, attempt by attempt; equal neighbours are one."""
    result = run("group", "set-policy", "billing", "--table", "1s 2s 2s 9s", "--max-attempts", "7", "--fifo")
    assert result.exit_code == 0
    assert facts(result.stdout) == {
        "group": "billing",
        "policy": "7 attempts, set by an operator",
        "delay after": "1: 1s, 2-3: 2s, 4-6: 9s",
        "order": "kept (fifo), set by an operator",
    }
    group = daemon.source.known["billing"]
    assert group.policy == RetryPolicy(backoff=Table((1000, 2000, 2000, 9000)), max_attempts=7)


def test_what_is_not_given_stays_as_it_is(daemon: type[FakeClient]) -> None:
    """One option changes one thing, for a group that is there; others begin with the default."""
    run("group", "set-policy", "shipping", "--max-attempts", "9")
    changed = daemon.source.known["shipping"]
    assert changed.policy == RetryPolicy(
        backoff=SET_POLICY.backoff, max_attempts=9, jitter=0.25, max_age_ms=SET_POLICY.max_age_ms
    )
    assert changed.is_fifo
    run("group", "set-policy", "shipping", "--no-fifo")
    assert daemon.source.known["shipping"].policy == changed.policy
    assert not daemon.source.known["shipping"].is_fifo
    result = run("group", "set-policy", "new", "--fixed", "0", "-o", "json")
    assert json.loads(result.stdout)["policy"]["fixed"] == {"delay_ms": 0}
    assert daemon.source.known["new"].policy == RetryPolicy(backoff=Fixed(0))


def test_the_default_comes_back(daemon: type[FakeClient]) -> None:
    """The whole policy, and only the policy."""
    found = facts(run("group", "set-policy", "shipping", "--default").stdout)
    assert (found["policy"], found["delay after"]) == ("17 attempts, the default", LEVELS)
    assert daemon.source.known["shipping"].is_fifo


@pytest.mark.parametrize(
    ("options", "delays"),
    [
        (["--max-attempts", "1", "--jitter", "0.5"], "none: the first failure is the last"),
        (["--fixed", "5s", "--max-attempts", "2"], "1: 5s"),
        (["--exponential", "1ms..1d", "--multiplier", "1.1", "--max-attempts", "1000"], "..., "),
    ],
)
def test_long_and_short_policies_are_told_briefly(daemon: type[FakeClient], options: list[str], delays: str) -> None:
    """None, one, and more than anybody reads."""
    found = facts(run("group", "set-policy", "billing", *options).stdout)
    assert delays in found["delay after"]
    assert (found["policy"] == "1 attempt, set by an operator") is ("1" in options)
    assert "more" not in found["delay after"]
    assert len(found["delay after"].split(", ")) <= 32
    if delays == "..., ":
        assert found["delay after"].endswith("-999: 1d")
        assert isinstance(daemon.source.known["billing"].policy.backoff, Exponential)


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
def test_wrong_usage_changes_nothing(daemon: type[FakeClient], options: list[str]) -> None:
    """Exit code 2 and one line."""
    before = dict(daemon.source.known)
    result = run("group", "set-policy", "billing", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert daemon.source.known == before
