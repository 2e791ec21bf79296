"""``dmq ledger`` as people and programs read it."""

from __future__ import annotations

import json

import pytest
from support.forges.messages.half import prepare_one
from support.forges.messages.letters import a_message, die, fail
from support.rigs.broker.rig import receive
from support.rigs.commands.live_cell import NOW, LiveCell

from dmq.store.writer.operations import Tally
from dmq.trail.events import EventKind


@pytest.fixture
def daemon(live: LiveCell) -> LiveCell:
    """A topic with one message in hand, one unread, three waiting; two retries and a dead letter."""
    rig = live.rig

    async def fill() -> None:
        await fail(rig, "M1", "M2", group="billing")
        await die(rig, a_message("D1"), group="billing")
        await rig.broker.send([a_message("L1")])
        await receive(rig, group="billing")
        waiting = [a_message(f"W{number}", deliver_at_ms=NOW + 10**number) for number in (5, 7, 9)]
        await rig.broker.send([a_message("U1"), *waiting])

    live.do(fill())
    return live


def test_all_topics(daemon: LiveCell) -> None:
    """A line for each topic, another table for dead letters, and whether it balances."""
    lines = daemon.run("ledger").stdout.splitlines()
    assert lines == [
        "TOPIC   SCHEDULED  = FIRED  + CANCELLED  + PENDING  AT ONCE  EXPIRED",
        "orders          3        0            0          3        5        0",
        "",
        "DEAD-LETTER QUEUE  LETTERS  = REDRIVEN  + PURGED  + EXPIRED  + LEFT",
        "%DLQ%billing             1           0         0          0       1",
        "",
        "balances; counted since 2023-11-14T22:13:20.000Z",
    ]


def test_one_topic_with_its_groups(daemon: LiveCell) -> None:
    """The equation in words, when what is pending is due, and each group's part."""
    lines = daemon.run("ledger", "orders").stdout.splitlines()
    assert lines == [
        "topic      orders",
        "scheduled  3 = fired 0 + cancelled 0 + pending 3",
        "at once    5",
        "",
        "DUE             MESSAGES",
        "within an hour         1  ########################################",
        "within a day           1  ########################################",
        "later                  1  ########################################",
        "",
        "GROUP    FIRED  = ACKED  + FORWARDED  + DEAD  + FILTERED  + EXPIRED  + IN RETRY  + UNREAD  IN FLIGHT",
        "billing      5        0            0       1           0          0           2         2          1",
        "",
        "balances; counted since 2023-11-14T22:13:20.000Z",
    ]
    assert daemon.run("ledger", "nobody").exit_code == 3


def test_half_messages_and_groups_of_all_topics(live: LiveCell) -> None:
    """A table of half messages where there are any; --groups names the topic in front."""
    live.do(prepare_one(live.rig))
    assert "TOPIC   HALF MESSAGES  = COMMITTED  + ROLLED BACK  + GIVEN UP  + UNDECIDED" in live.run("ledger").stdout
    live.do(fail(live.rig, "M1", group="billing"))
    assert "TOPIC   GROUP    FIRED" in live.run("ledger", "--groups").stdout


def test_for_programs(daemon: LiveCell) -> None:
    """Every term by its name, and whether it balances."""
    found = json.loads(daemon.run("ledger", "--groups", "-o", "json").stdout)
    assert found["balances"] is True
    orders = found["topics"][-1]
    assert orders["due"] == {"overdue": 0, "minute": 0, "hour": 1, "day": 1, "week": 0, "later": 1}
    assert orders["groups"][0] == {
        "group": "billing",
        "fired": 5,
        "acked": 0,
        "forwarded": 0,
        "dead": 1,
        "filtered": 0,
        "expired": 0,
        "in_retry": 2,
        "unread": 2,
        "in_flight": 1,
    }


def test_an_imbalance_is_named(daemon: LiveCell) -> None:
    """By topic and term, with both figures, and an exit code of its own."""
    rig = daemon.rig
    topic_id = rig.broker.names.topics["orders"].topic_id
    rig.store.commit([Tally(topic_id, 0, EventKind.SCHEDULED, 1)])
    try:
        found = daemon.run("ledger")
        assert found.exit_code == 4
        assert found.stdout.splitlines()[-2:] == [
            "TOPIC   GROUP  TERM     COUNTED  FOUND",
            "orders         pending        4      3",
        ]
        assert found.stderr == "dmq: the ledger does not balance: 1 terms differ\n"
        assert json.loads(daemon.run("ledger", "-o", "json").stdout)["balances"] is False
    finally:
        rig.store.commit([Tally(topic_id, 0, EventKind.SCHEDULED, -1)])


def test_verifying_is_about_all_and_needs_a_disk(daemon: LiveCell) -> None:
    """It goes with neither topic nor groups; a store in memory has nothing to compare with."""
    assert daemon.run("ledger", "orders", "--verify").exit_code == 2
    found = daemon.run("ledger", "--verify")
    assert found.exit_code == 1
    assert "no store on disk" in found.stderr
