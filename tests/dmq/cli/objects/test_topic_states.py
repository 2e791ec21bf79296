"""Pauses, redrives and retry settings, where an operator looks for them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from support.forges.messages.letters import REDRIVE, TO_ALL, a_message, die, fail, finish, only
from support.rigs.broker.rig import GROUP
from support.rigs.commands.live_cell import LiveCell

from retry.dead_letter import Job


def cells(daemon: LiveCell, *command: str) -> list[list[str]]:
    return [line.split() for line in daemon.run(*command).stdout.splitlines()]


def facts(daemon: LiveCell, *command: str) -> dict[str, str]:
    """The facts of a command by name."""
    lines = daemon.run(*command).stdout.splitlines()
    return {each[0]: each[1] for line in lines if "  " in line for each in [re.split(r"  +", line, maxsplit=1)]}


def test_lists_show_pauses_and_rates(live: LiveCell) -> None:
    """A topic and a group are active, paused, or limited to a rate."""
    for each in ("orders", "refunds"):
        live.run("topic", "create", each)
        live.run("group", "create", f"of-{each}")
    live.run("topic", "pause", "orders")
    live.run("topic", "set", "refunds", "--deliver-rate", "10")
    live.run("group", "pause", "of-orders")
    live.run("group", "set", "of-refunds", "--deliver-rate", "5")
    live.run("topic", "create", "plain")
    heading, *rows = cells(live, "topic", "ls")
    assert (heading[5], [row[5] for row in rows]) == ("STATE", ["paused", "active", "10/s"])
    heading, *rows = cells(live, "group", "ls")
    assert (heading[1], [row[1] for row in rows]) == ("STATE", ["paused", "5/s"])


def test_a_ready_message_of_a_paused_group_is_held(live: LiveCell) -> None:
    """For people and for programs, until the group is resumed."""
    live.do(fail(live.rig, "M1", group="other"))
    live.do(fail(live.rig, "M2", group=GROUP))
    live.run("group", "pause", "other")
    assert "other: ready, held: the group is paused" in live.run("msg", "get", "orders", "M2").stdout
    states = {each["group"]: each["is_paused"] for each in found(live, "M2")["groups"]}
    assert states == {"other": True, GROUP: False}
    live.run("group", "resume", "other")
    assert "paused" not in live.run("msg", "get", "orders", "M2").stdout


def found(daemon: LiveCell, message_id: str) -> Any:  # noqa: ANN401 - JSON
    answer: Any = json.loads(daemon.run("msg", "get", "orders", message_id, "-o", "json").stdout)
    return answer


@pytest.mark.parametrize("job", [REDRIVE, TO_ALL, replace(REDRIVE, to_topic="orders")])
def test_a_redriven_message_and_its_dead_letter_name_each_other(live: LiveCell, job: Job) -> None:
    """Wherever it was sent to."""
    live.do(die(live.rig, a_message("OLD")))
    live.do(finish(live.rig, job))
    (group,) = found(live, "OLD")["groups"]
    assert (group["state"], group["outcome"]) == ("DEAD", "redriven")
    new_id = group["outcome_note"].split()[1]
    old = live.run("msg", "get", "orders", "OLD").stdout
    assert f"redriven as {new_id} to topic orders" in old
    assert facts(live, "msg", "get", "orders", new_id)["redriven from"] == "OLD"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), "kept here, by the configuration"),
        (("--retries", "cluster"), "the cluster's, set by an operator"),
        (("--fifo",), "the cluster's, as the group is fifo"),
    ],
)
def test_a_group_shows_where_its_retries_are_kept(
    live: LiveCell, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], shown: str
) -> None:
    """In front of a cluster also if the configuration alone says so; nothing is shown elsewhere."""
    live.run("group", "create", GROUP)
    assert "retries" not in facts(live, "group", "show", GROUP)
    monkeypatch.setattr(live.admin.groups, "_retries_default", "here")
    if options:
        live.run("group", "set-policy", GROUP, *options)
    assert facts(live, "group", "show", GROUP)["retries"] == shown


def test_a_group_counts_dead_letters_in_one_sense(live: LiveCell) -> None:
    """Those without an outcome are its dead letters; those of a topic are all that died."""
    live.do(die(live.rig, a_message("D1"), a_message("D2")))
    live.do(finish(live.rig, replace(REDRIVE, filter=only("D1"))))
    shown = live.run("group", "show", GROUP).stdout
    assert "dead letters  1 without an outcome" in shown
    assert "DIED" in shown
    assert "DEAD" not in shown
