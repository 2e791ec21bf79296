"""The order of message groups, as official clients see it when a message fails, dies or is delayed.

One daemon, a process per language, the same for all. The scenarios run at once, before the first test; the
tests look at what came of them. Two queues, so that message groups share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from support.clients.official.client import Language, OfficialClient, those_with
from support.clients.official.scenarios import (
    Scenarios,
    dead_letters,
    dmq,
    is_at_rest,
    push_in_groups,
    seen,
    set_group,
    wait_for_group,
)
from support.rigs.daemon.process import Daemon

from dmq.admin import admin_v1 as wire
from retry.policy import Fixed

pytestmark = pytest.mark.integration
DELAY_MS = 1_000
_OTHERS = ("b", "c", "d", "e")
_AHEAD_MS = (2_000, 6_000, 18_000)  # until the first delivery time: the sends are over by then, or tried again
# Delivery times after the first one, in the order of the sends; None is not delayed.
_SCRAMBLED_MS = (900, 300, 600, 300, 0, 900, None, 0)


def _times_ms(deliveries: Sequence[dict[str, Any]], body: str) -> list[int]:
    return [each["at_ms"] for each in deliveries if each["body"] == body]


# -- scenarios --------------------------------------------------------------------------------------------------------


class Consumed(NamedTuple):
    """What a push consumer was given, and what was dead when all was over."""

    deliveries: list[dict[str, Any]]
    dead: list[wire.DeadLetter]


def _consume(process: OfficialClient, name: str, bodies: Sequence[str], *, handed_out: int) -> Consumed:
    """Send bodies such as ``a1`` to the message group of their letter, and let a push consumer have them.

    It ends when nothing is under way any more, which is not before ``handed_out`` deliveries.
    """
    topic = f"{name}-{process.language.name}"
    push_in_groups(process, name, bodies, handed_out=handed_out)
    wait_for_group(process.address, topic, is_at_rest)
    return Consumed(process.deliveries(f"{name}-c"), dead_letters(process.address, topic))


def _recover(process: OfficialClient, name: str, *, is_fifo: bool) -> Consumed:
    group = f"{name}-{process.language.name}"
    set_group(process.address, group, Fixed(DELAY_MS), max_attempts=5, is_fifo=is_fifo)
    others = [f"{letter}{number}" for number in (1, 2) for letter in _OTHERS]
    return _consume(process, name, ["fail 2 times a1", "a2", "a3", *others], handed_out=5 + len(others))


def _recover_fifo(process: OfficialClient) -> Consumed:
    return _recover(process, "fifo", is_fifo=True)


def _recover_not_fifo(process: OfficialClient) -> Consumed:
    return _recover(process, "not-fifo", is_fifo=False)


def _die(process: OfficialClient) -> Consumed:
    options = ("--fixed", "500ms", "--max-attempts", "3", "--fifo")
    dmq(process.address, "group", "set-policy", f"dying-{process.language.name}", *options)
    return _consume(process, "dying", ["fail 99 times a1", "a2", "fail 1 time a3", "a4"], handed_out=7)


class Delayed(NamedTuple):
    """Messages of one message group, delayed: how they were sent, how two consumers had them."""

    sent: list[tuple[int, str]]
    pushed: list[dict[str, Any]]
    received: list[dict[str, Any]]


def _delay(process: OfficialClient) -> Delayed:
    for ahead_ms in _AHEAD_MS:
        topic, sent = f"delayed-{ahead_ms}-{process.language.name}", []
        process.start(f"p-{topic}", "producer", topic)
        process.start(f"c-{topic}", "push", topic, group=f"{topic}-push")
        process.start(f"s-{topic}", "simple", topic, group=f"{topic}-simple")
        first_ms = time.time_ns() // 1_000_000 + ahead_ms
        for number, after_ms in enumerate(_SCRAMBLED_MS):
            at_ms = 0 if after_ms is None else first_ms + after_ms
            properties = {"TIMER_DELIVER_MS": f"{at_ms}"} if at_ms else {}
            process.send(f"p-{topic}", topic, body=f"{number}", message_group="a", properties=properties)
            sent.append((at_ms, f"{number}"))
        if time.time_ns() // 1_000_000 < first_ms:
            break  # else the machine stood still: once more in another topic, with more time
    else:
        raise AssertionError("the machine was too slow for this scenario")
    received = process.receive_until(f"s-{topic}", len(sent))
    return Delayed(sent, process.wait_for_deliveries(f"c-{topic}", len(sent)), received)


@pytest.fixture(scope="module", autouse=True)
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", "--queues-per-topic", "2") as daemon:
        with Scenarios(daemon.address, tmp_path_factory, (_recover_fifo, _recover_not_fifo, _die, _delay)) as running:
            yield running
        daemon.stop()


@pytest.fixture(params=those_with("push"), ids=lambda language: language.name)
def language(request: pytest.FixtureRequest) -> Language:
    """The client the test is about."""
    found: Language = request.param
    return found


@pytest.fixture(params=[_recover_fifo, _recover_not_fifo], ids=["fifo", "not-fifo"])
def recovered(request: pytest.FixtureRequest, scenarios: Scenarios, language: Language) -> Consumed:
    """A message group whose head failed twice, and others: of a FIFO group, and of one that is none."""
    scenario: Callable[[OfficialClient], Consumed] = request.param
    return scenarios.result(scenario, language)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_nothing_passes_a_message_that_failed(recovered: Consumed) -> None:
    """The later ones of its message group come after its third attempt, which succeeds; each of them once."""
    head = "fail 2 times a1"
    assert seen(recovered.deliveries, "a") == [(head, 1), (head, 2), (head, 3), ("a2", 1), ("a3", 1)]
    for earlier_ms, later_ms in pairwise(_times_ms(recovered.deliveries, head)):
        assert later_ms - earlier_ms >= DELAY_MS
    assert recovered.dead == []


def test_other_message_groups_go_on(recovered: Consumed) -> None:
    """They are done, in their order, before the head that failed has succeeded, also those in the same queue."""
    third_ms = _times_ms(recovered.deliveries, "fail 2 times a1")[2]
    for letter in _OTHERS:
        assert seen(recovered.deliveries, letter) == [(f"{letter}1", 1), (f"{letter}2", 1)]
        assert _times_ms(recovered.deliveries, f"{letter}2")[0] < third_ms


def test_a_dead_message_unblocks_the_next_one(scenarios: Scenarios, language: Language) -> None:
    """A head that always fails is handed out as often as the policy says, and not a fourth time; then come the others.

    Its client gives it up at the first failure, as it is told to.
    """
    found = scenarios.result(_die, language)
    head, third = "fail 99 times a1", "fail 1 time a3"
    assert seen(found.deliveries, "a") == [
        *((head, 1), (head, 2), (head, 3)),
        *(("a2", 1), (third, 1), (third, 2), ("a4", 1)),
    ]


def test_the_dead_head_is_a_dead_letter(scenarios: Scenarios, language: Language) -> None:
    """It is in the dead-letter queue with all its attempts, and still knows its message group."""
    found = scenarios.result(_die, language)
    (letter,) = found.dead
    assert letter.message_id == found.deliveries[0]["message_id"]
    assert (letter.reason, letter.attempts) == (wire.EXHAUSTED, 3)
    assert letter.content.message_group == "a"


# -- delays -----------------------------------------------------------------------------------------------------------


def test_delayed_messages_keep_the_order_of_their_times(scenarios: Scenarios, language: Language) -> None:
    """One message group comes in the order of delivery time, then of acceptance; none before its time."""
    found = scenarios.result(_delay, language)
    wanted = [body for _, body in sorted(found.sent)]
    due_ms = {body: at_ms for at_ms, body in found.sent}
    for deliveries in (found.pushed, found.received):
        assert [each["body"] for each in deliveries] == wanted
        assert {each["attempt"] for each in deliveries} == {1}
        assert all(each["at_ms"] - due_ms[each["body"]] >= 0 for each in deliveries)
        assert [each["deliver_at_ms"] for each in deliveries] == [due_ms[body] for body in wanted]
