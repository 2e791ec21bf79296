"""Retries by a group's policy, dead letters and redrive, as official clients and operators see them.

One daemon, a process per language, the same for all. The scenarios run at once, before the first test; the
tests look at what came of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from support.clients.official.client import Language, OfficialClient, those_with
from support.clients.official.scenarios import Scenarios, dead_letters, dmq, is_at_rest, set_group, wait_for_group
from support.rigs.daemon.process import Daemon

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from retry.policy import Fixed, Table

pytestmark = pytest.mark.integration
_HOUR_MS = 3_600_000
_SENT = {"tag": "blue", "key": "order-7", "properties": {"colour": "blau"}}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _gaps_ms(deliveries: Sequence[dict[str, Any]]) -> list[int]:
    times_ms = [each["at_ms"] for each in deliveries]
    return [later - earlier for earlier, later in pairwise(times_ms)]


# -- scenarios --------------------------------------------------------------------------------------------------------


class Recovered(NamedTuple):
    """A message that its listener failed twice."""

    message_id: str
    topic: str
    deliveries: list[dict[str, Any]]
    dead: int


def _recover(process: OfficialClient) -> Recovered:
    topic = group = f"recovering-{process.language.name}"
    set_group(process.address, group, Table((500, 1000)), max_attempts=5)
    process.start("recovering-p", "producer", topic)
    process.start("recovering-c", "push", topic, group=group)
    message_id = process.send("recovering-p", topic, body="fail 2 times", **_SENT)
    process.wait_for_deliveries("recovering-c", 3)
    dead = wait_for_group(process.address, group, is_at_rest).dead
    return Recovered(message_id, topic, process.deliveries("recovering-c"), dead)


class Died(NamedTuple):
    """A message that its listener always failed, its dead letter, and the redrive of that."""

    message_id: str
    topic: str
    group: str
    before_ms: int
    deliveries: list[dict[str, Any]]
    listed: list[dict[str, Any]]
    shown: list[dict[str, Any]]
    consumed: list[dict[str, Any]]
    dry_run: dict[str, Any]
    dead_after_dry_run: list[str]
    redriven: dict[str, Any]
    deliveries_after: list[dict[str, Any]]
    dead_after: int
    letters_after: list[wire.DeadLetter]
    redriven_again: dict[str, Any]


def _die(process: OfficialClient) -> Died:
    address, name = process.address, "dying-c"
    topic, group = f"dying-{process.language.name}", f"dying-{process.language.name}-g"
    set_group(address, group, Fixed(500), max_attempts=3)
    process.start("dying-p", "producer", topic)
    process.start(name, "push", topic, group=group)
    before_ms = _now_ms()
    message_id = process.send("dying-p", topic, body="fail 99 times", **_SENT)
    deliveries = process.wait_for_deliveries(name, 3)
    wait_for_group(address, group, lambda found: found.dead > 0)
    listed = dmq(address, "dead", "ls", group)
    shown = dmq(address, "dead", "show", group, message_id)
    process.start("dying-d", "simple", f"%DLQ%{group}", group=f"{group}-undertaker")
    consumed = process.receive_until("dying-d", 1)
    process.mend(name)
    dry_run = dmq(address, "dead", "redrive", group, "--dry-run")
    dead_after_dry_run = [letter.message_id for letter in dead_letters(address, group)]
    redriven = dmq(address, "dead", "redrive", group, "--yes")
    process.wait_for_deliveries(name, 4)
    redriven_again = dmq(address, "dead", "redrive", group, "--yes")
    dead_after = wait_for_group(address, group, is_at_rest).dead
    letters_after = dead_letters(address, group, with_outcome=True)
    return Died(
        *(message_id, topic, group, before_ms, deliveries, listed, shown, consumed, dry_run, dead_after_dry_run),
        *(redriven, process.deliveries(name)[3:], dead_after, letters_after, redriven_again),
    )


class Left(NamedTuple):
    """A message that a simple consumer never acknowledged."""

    received: list[dict[str, Any]]
    changed_ms: list[int]
    dead: list[wire.DeadLetter]
    came_after: list[dict[str, Any]]


def _leave(process: OfficialClient) -> Left:
    topic = group = f"leaving-{process.language.name}"
    set_group(process.address, group, Fixed(30_000), max_attempts=3)
    process.start("leaving-p", "producer", topic)
    process.start("leaving-c", "simple", topic, group=group, wait_s=1)
    process.send("leaving-p", topic)
    received, changed_ms = [], []
    for invisible_s in (1, 2, 1):
        (delivery,) = process.receive_until("leaving-c", 1, acks=False, invisible_s=60)
        changed_ms.append(_now_ms())
        process.do("change", name="leaving-c", token=delivery["token"], invisible_s=invisible_s)
        received.append(delivery)
    wait_for_group(process.address, group, lambda found: found.dead > 0)
    dead = dead_letters(process.address, group)
    return Left(received, changed_ms, dead, process.do("receive", name="leaving-c"))


class Changed(NamedTuple):
    """A message whose group got another policy after the first failure."""

    due: set[tuple[int, int]]  # attempt and time of each waiting retry, as seen before and after the change
    deliveries: list[dict[str, Any]]
    dead: list[wire.DeadLetter]


def _change_policy(process: OfficialClient) -> Changed:
    address, topic = process.address, f"changing-{process.language.name}"
    set_group(address, topic, Fixed(2000), max_attempts=9)
    process.start("changing-p", "producer", topic)
    process.start("changing-c", "push", topic, group=topic)
    process.send("changing-p", topic, body="fail 99 times")
    process.wait_for_deliveries("changing-c", 1)
    wait_for_group(address, topic, lambda found: found.waiting > 0)
    with AdminClient(address, timeout_s=20) as client:
        seen = [*client.retries(topic).retries]
        set_group(address, topic, Fixed(3000), max_attempts=3)
        seen += client.retries(topic).retries  # on a stalled machine it may have been delivered meanwhile
    wait_for_group(address, topic, lambda found: found.dead > 0)
    deliveries = process.wait_for_deliveries("changing-c", 3)
    return Changed({(each.attempt, each.due_at_ms) for each in seen}, deliveries, dead_letters(address, topic))


class Operated(NamedTuple):
    """Two messages whose retry lay an hour ahead: one was run at once, the other ended."""

    run_id: str
    ended_id: str
    topic: str
    before_ms: int
    waiting: list[dict[str, Any]]
    run: dict[str, Any]
    moved_again: int
    deliveries: list[dict[str, Any]]
    still_waiting: list[str]
    ended: dict[str, Any]
    waiting_after: int
    dead: list[wire.DeadLetter]


def _operate(process: OfficialClient) -> Operated:
    address, name = process.address, "operated-c"
    topic, group = f"operated-{process.language.name}", f"operated-{process.language.name}-g"
    set_group(address, group, Fixed(_HOUR_MS), max_attempts=3)
    process.start("operated-p", "producer", topic)
    process.start(name, "push", topic, group=group)
    before_ms = _now_ms()
    run_id = process.send("operated-p", topic, body="fail 1 time", key="run")
    ended_id = process.send("operated-p", topic, body="fail 1 time", key="end")
    process.wait_for_deliveries(name, 2)
    wait_for_group(address, group, lambda found: found.waiting == 2)
    waiting = dmq(address, "retry", "ls", group)
    (entry,) = (each["entry"] for each in waiting if each["message_id"] == run_id)
    run = dmq(address, "retry", "run-now", group, "--entry", entry)
    deliveries = process.wait_for_deliveries(name, 3)
    with AdminClient(address, timeout_s=20) as client:
        moved_again = client.run_retries_now(group, [entry]).moved
        still_waiting = [each.message_id for each in client.retries(group).retries]
    ended = dmq(address, "retry", "to-dead", group, "--id", ended_id)
    waiting_after = wait_for_group(address, group, lambda found: found.dead > 0).waiting
    return Operated(
        *(run_id, ended_id, topic, before_ms, waiting, run, moved_again, deliveries),
        *(still_waiting, ended, waiting_after, dead_letters(address, group)),
    )


@pytest.fixture(scope="module", autouse=True)
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        with Scenarios(daemon.address, tmp_path_factory, (_recover, _die, _leave, _change_policy, _operate)) as running:
            yield running
        daemon.stop()


@pytest.fixture(params=those_with("push"), ids=lambda language: language.name)
def language(request: pytest.FixtureRequest) -> Language:
    """The client the test is about."""
    found: Language = request.param
    return found


# -- retries ----------------------------------------------------------------------------------------------------------


def test_a_failed_message_comes_back_until_it_succeeds(scenarios: Scenarios, language: Language) -> None:
    """Attempts 1 to 3 of a listener that fails twice, each after its own delay, and then no more."""
    found = scenarios.result(_recover, language)
    assert [each["attempt"] for each in found.deliveries] == [1, 2, 3]
    first_ms, second_ms = _gaps_ms(found.deliveries)
    assert first_ms >= 500
    assert second_ms >= 1000
    assert found.dead == 0


def test_a_retry_is_the_message_that_was_sent(scenarios: Scenarios, language: Language) -> None:
    """Every attempt has the id, the topic and all else of the first one."""
    found = scenarios.result(_recover, language)
    changing = ("token", "attempt", "at_ms")
    first, *others = ({name: v for name, v in each.items() if name not in changing} for each in found.deliveries)
    assert (first["message_id"], first["topic"], first["body"]) == (found.message_id, found.topic, "fail 2 times")
    assert (first["tag"], first["keys"], first["properties"]) == ("blue", ["order-7"], {"colour": "blau"})
    assert others == [first, first]


def test_a_change_of_the_policy_counts_from_the_next_failure(scenarios: Scenarios, language: Language) -> None:
    """A connected consumer's waiting retry keeps its time; later delays and the maximum are the new ones."""
    found = scenarios.result(_change_policy, language)
    assert [each["attempt"] for each in found.deliveries] == [1, 2, 3]
    assert len(found.due) == len({attempt for attempt, _ in found.due})
    before_ms, after_ms = _gaps_ms(found.deliveries)
    assert before_ms >= 2000
    assert after_ms >= 3000
    assert [(letter.attempts, letter.reason) for letter in found.dead] == [(3, wire.EXHAUSTED)]


def test_a_simple_consumer_is_taken_at_its_word(scenarios: Scenarios, language: Language) -> None:
    """What it leaves comes back after the invisible duration it chose, whatever the policy, and dies after the last."""
    found = scenarios.result(_leave, language)
    assert [each["attempt"] for each in found.received] == [1, 2, 3]
    for changed_ms, invisible_ms, delivery in zip(found.changed_ms, (1000, 2000), found.received[1:], strict=False):
        assert invisible_ms <= delivery["at_ms"] - changed_ms
    assert found.came_after == []
    (letter,) = found.dead
    assert (letter.message_id, letter.attempts) == (found.received[0]["message_id"], 3)
    assert letter.reason == wire.EXHAUSTED
    assert letter.dead_at_ms - found.changed_ms[2] >= 1000


# -- dead letters -----------------------------------------------------------------------------------------------------


def test_attempts_end_at_the_maximum(scenarios: Scenarios, language: Language) -> None:
    """A listener that always fails is given the message exactly as often as the policy says."""
    found = scenarios.result(_die, language)
    assert [each["attempt"] for each in found.deliveries] == [1, 2, 3]
    assert {each["message_id"] for each in found.deliveries} == {found.message_id}


def test_operators_see_the_dead_letter(scenarios: Scenarios, language: Language) -> None:
    """Both ``dead ls`` and ``dead show`` tell where it came from, how often and when it failed, and what it is."""
    found = scenarios.result(_die, language)
    (listed,), (shown,) = found.listed, found.shown
    for letter in (listed, shown):
        assert (letter["message_id"], letter["origin_topic"]) == (found.message_id, found.topic)
        assert (letter["reason"], letter["attempts"], letter["outcome"]) == ("EXHAUSTED", 3, "")
        assert (letter["tag"], letter["keys"]) == ("blue", ["order-7"])
        assert found.before_ms <= letter["first_failed_at_ms"] <= letter["last_failed_at_ms"] <= letter["dead_at_ms"]
        assert letter["last_failed_at_ms"] - letter["first_failed_at_ms"] >= 2 * 500
    assert shown["content"]["properties"] == {"colour": "blau"}


def test_consumers_of_the_dead_letter_queue_see_the_facts(scenarios: Scenarios, language: Language) -> None:
    """Another group reads the dead letter on its first attempt, with what it was and how it ended."""
    found = scenarios.result(_die, language)
    (letter,), (listed,) = found.consumed, found.listed
    assert (letter["topic"], letter["attempt"]) == (f"%DLQ%{found.group}", 1)
    assert (letter["message_id"], letter["body"]) == (found.message_id, "fail 99 times")
    assert (letter["tag"], letter["keys"], letter["is_corrupted"]) == ("blue", ["order-7"], False)
    assert letter["properties"] == {
        "colour": "blau",
        "DLQ_ORIGIN_TOPIC": found.topic,
        "DLQ_ORIGIN_MESSAGE_ID": found.message_id,
        "DLQ_ATTEMPTS": "3",
        "DLQ_REASON": "exhausted",
        "DLQ_FIRST_FAILED_AT": str(listed["first_failed_at_ms"]),
        "DLQ_LAST_FAILED_AT": str(listed["last_failed_at_ms"]),
    }


def test_a_dry_run_of_a_redrive_changes_nothing(scenarios: Scenarios, language: Language) -> None:
    """It counts the dead letter and leaves it where it is; nothing comes but what the real redrive sends."""
    found = scenarios.result(_die, language)
    assert (found.dry_run["job_id"], found.dry_run["done"], found.dry_run["failed"]) == (0, 1, 0)
    assert found.dead_after_dry_run == [found.message_id]
    assert len(found.deliveries_after) == 1


def test_a_redriven_message_starts_with_no_attempts(scenarios: Scenarios, language: Language) -> None:
    """It is back in its topic on attempt 1, under a new id that names its parent, and no dead letter any more."""
    found = scenarios.result(_die, language)
    assert (found.redriven["state"], found.redriven["done"], found.redriven["failed"]) == ("DONE", 1, 0)
    (again,) = found.deliveries_after
    assert (again["topic"], again["attempt"], again["body"]) == (found.topic, 1, "fail 99 times")
    assert again["message_id"] != found.message_id
    assert again["properties"] == {"colour": "blau", "DLQ_PARENT_MESSAGE_ID": found.message_id}
    assert (again["tag"], again["keys"]) == ("blue", ["order-7"])
    assert found.dead_after == 0
    (letter,) = found.letters_after
    assert (letter.outcome, letter.outcome_note) == (
        "redriven",
        f"{found.topic} {again['message_id']} for group {found.group}",
    )


def test_a_second_redrive_does_nothing(scenarios: Scenarios, language: Language) -> None:
    """What has an outcome has it once."""
    again = scenarios.result(_die, language).redriven_again
    assert (again["state"], again["done"], again["failed"]) == ("DONE", 0, 0)


# -- operators --------------------------------------------------------------------------------------------------------


def test_operators_see_pending_messages(scenarios: Scenarios, language: Language) -> None:
    """``retry ls`` tells of each waiting retry what it is, which attempt comes next and when."""
    found = scenarios.result(_operate, language)
    assert {each["message_id"] for each in found.waiting} == {found.run_id, found.ended_id}
    for each in found.waiting:
        assert (each["topic"], each["attempt"]) == (found.topic, 2)
        assert 0 <= each["due_at_ms"] - found.before_ms - _HOUR_MS < 60_000
        assert found.before_ms <= each["first_failed_at_ms"] == each["last_failed_at_ms"]
    assert {tuple(each["content"]["keys"]) for each in found.waiting} == {("run",), ("end",)}


def test_an_operator_can_run_a_retry_at_once(scenarios: Scenarios, language: Language) -> None:
    """``retry run-now`` gives the next attempt to the consumer now, once, and leaves the other retry alone."""
    found = scenarios.result(_operate, language)
    assert (found.run["moved"], found.run["gone"]) == (1, 0)
    assert found.moved_again == 0
    assert [each["attempt"] for each in found.deliveries] == [1, 1, 2]
    third = found.deliveries[2]
    assert (third["message_id"], third["topic"]) == (found.run_id, found.topic)
    assert found.still_waiting == [found.ended_id]


def test_an_operator_can_end_a_retry(scenarios: Scenarios, language: Language) -> None:
    """``retry to-dead`` makes it a dead letter that says so."""
    found = scenarios.result(_operate, language)
    assert (found.ended["moved"], found.ended["gone"]) == (1, 0)
    assert found.waiting_after == 0
    (letter,) = found.dead
    assert (letter.message_id, letter.origin_topic) == (found.ended_id, found.topic)
    assert (letter.reason, letter.attempts) == (wire.OPERATOR, 1)
