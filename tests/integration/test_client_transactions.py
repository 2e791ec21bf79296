"""Transactional producers of the official clients: one daemon, a process per language, the same tests for all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import TypeVar

import pytest
from support.client_bench import Bench
from support.daemon import Daemon
from support.official_client import (
    GO,
    JAVA,
    LANGUAGES,
    NODE,
    PYTHON,
    ClientError,
    Language,
    OfficialClient,
    can_run,
    having,
    those_with,
)
from support.scenarios import dead_letters
from support.wire_client import WireClient, a_message

from broker_adapter.topics import dead_letter_topic
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.embedded.checks import GIVEN_UP_GROUP

CHECKS_MAX = 5
_PACE = {"TIMEOUT": "1s", "CHECK_INTERVAL": "2s", "CHECKS_MAX": str(CHECKS_MAX)}
_names = count(1)
_Answer = TypeVar("_Answer")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    env = {**os.environ, **{f"DMQ_TRANSACTION_{key}": value for key, value in _PACE.items()}}
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", env=env) as daemon, ExitStack() as stack:
        yield Bench(daemon, stack, tmp_path_factory, "transactional", "listener")
        daemon.stop()


@pytest.fixture(params=LANGUAGES, ids=lambda language: language.name)
def process(request: pytest.FixtureRequest, bench: Bench) -> Iterator[OfficialClient]:
    """The process of one language's clients."""
    yield bench.process(request.param)
    bench.daemon.print_log()  # shown if the test failed


@pytest.fixture
def topic(bench: Bench, process: OfficialClient) -> str:
    """A new topic with a transactional producer ``p-<topic>`` and a listener ``c-<topic>``."""
    return bench.topic(process.language)


@pytest.fixture(scope="module", autouse=True)
def undecided(bench: Bench) -> dict[str, tuple[str, str]]:
    """By language: the topic and the id of a half message that nobody decides. It takes all checks to give it up."""
    found = {}
    for language in filter(can_run, those_with("checks")):
        topic = bench.topic(language)
        found[language.name] = topic, half(bench.process(language), topic, "undecided")
    return found


def half(process: OfficialClient, topic: str, body: str, **arguments: object) -> str:
    """Send a half message and return its id."""
    return process.send(f"p-{topic}", topic, body=body, is_half=True, **arguments)


def bodies(process: OfficialClient, topic: str, expected: int) -> list[str]:
    """Wait for what the consumer is to be given."""
    return [each["body"] for each in process.wait_for_deliveries(f"c-{topic}", expected)]


def patiently(do: Callable[..., _Answer], *arguments: object, **more: object) -> _Answer:
    """Do it again until it goes: after a restart a client has to find out that its connection is gone."""
    until_s = time.monotonic() + 30
    while True:
        try:
            return do(*arguments, **more)
        except ClientError:
            assert time.monotonic() < until_s


def assert_commit_refused(process: OfficialClient, message_id: str, why: str) -> None:
    """Commit what ended otherwise: the client raises, unless its version takes any answer for a success."""
    if "end status" in process.language.lacks:
        process.do("commit", message_id=message_id)
        return
    with pytest.raises(ClientError, match=why):
        process.do("commit", message_id=message_id)


def test_commit_and_rollback(process: OfficialClient, topic: str) -> None:
    """What is committed comes, with all it carries; what is rolled back never does, nor a half message by itself."""
    lacks = process.language.lacks
    properties = {} if "properties" in lacks else {"color": "blue"}
    good = half(process, topic, "wanted", tag="red", key="k-1", properties=properties)
    bad = half(process, topic, "unwanted")
    process.send(f"p-{topic}", topic, body="before")
    assert bodies(process, topic, 1) == ["before"]
    process.do("rollback", message_id=bad)
    process.do("commit", message_id=good)
    assert bodies(process, topic, 2) == ["before", "wanted"]
    seen = process.deliveries(f"c-{topic}")[1]
    assert (seen["message_id"], seen["tag"], seen["attempt"]) == (good, "red", 1)
    assert seen["keys"] == ([] if "keys" in lacks else ["k-1"])
    assert (seen["properties"], seen["is_corrupted"]) == (properties, "digest" in lacks)
    if "second end" not in lacks:
        process.do("commit", message_id=good)
        assert_commit_refused(process, bad, "was rolled back at")
    process.send(f"p-{topic}", topic, body="behind")
    assert bodies(process, topic, 3) == ["before", "wanted", "behind"]


@having("checks")
def test_a_producer_that_says_nothing_is_asked(bench: Bench, process: OfficialClient, topic: str) -> None:
    """Its checker decides: one is committed, the other one rolled back."""
    ids = {half(process, topic, body): body for body in ("commit later", "rollback later")}
    checks = process.wait_for_deliveries(f"p-{topic}", 2)
    assert {each["message_id"]: each["body"] for each in checks} == ids
    assert bodies(process, topic, 1) == ["commit later"]
    (bad,) = (message_id for message_id, body in ids.items() if body.startswith("rollback"))
    assert "was rolled back at" in how_it_ended(bench, topic, bad)
    if "second end" not in process.language.lacks:
        assert_commit_refused(process, bad, "was rolled back at")


def how_it_ended(bench: Bench, topic: str, message_id: str) -> str:
    """Send a half message again until that is refused because it ended; return the refusal.

    A checker's answer leaves its client after the check is reported here: to ask by a commit could come before it.
    """
    again = a_message(topic, message_id)
    again.system_properties.message_type = wire.TRANSACTION
    pause, until_s = threading.Event(), time.monotonic() + 20
    with WireClient(bench.daemon.address) as client:
        while (status := client.send(again).entries[0].status).code == wire.OK:
            assert time.monotonic() < until_s, f"{message_id} still waits"
            pause.wait(0.05)
    return str(status.message)


@having("properties")
def test_a_delay_begins_at_the_commit(process: OfficialClient, topic: str) -> None:
    """A relative one, in a property that any client can set."""
    message_id = half(process, topic, "later", properties={"TIMER_DELAY_MS": "1500"})
    process.send(f"p-{topic}", topic, body="at once")
    assert bodies(process, topic, 1) == ["at once"]
    committed_ms = time.time() * 1000
    process.do("commit", message_id=message_id)
    assert bodies(process, topic, 2) == ["at once", "later"]
    assert process.deliveries(f"c-{topic}")[1]["at_ms"] - committed_ms > 1_499


def test_a_message_group_is_refused(process: OfficialClient, topic: str) -> None:
    """By the client itself, or by the server."""
    with pytest.raises(ClientError):
        half(process, topic, "grouped", message_group="a")


@pytest.mark.parametrize(
    ("died", "lives"),
    [(PYTHON, NODE), (NODE, GO), (GO, JAVA), (JAVA, PYTHON)],
    ids=lambda language: language.name,
)
def test_another_producer_answers_for_one_that_died(bench: Bench, died: Language, lives: Language) -> None:
    """Whatever its language; until one is there nobody is asked, and no check is counted."""
    topic = f"tx{next(_names)}-orphans"
    first = bench.new_process(died)
    first.start(f"p-{topic}", "transactional", topic)
    message_id = half(first, topic, "commit for the other one")
    first.close()
    second = bench.process(lives)
    second.start(f"c-{topic}", lives.listener, topic, group=f"g-{topic}")
    second.start(f"p-{topic}", "transactional", topic)
    (check,) = second.wait_for_deliveries(f"p-{topic}", 1)
    assert check["message_id"] == message_id
    assert bodies(second, topic, 1) == ["commit for the other one"]


@having("checks")
def test_what_nobody_decides_is_a_dead_letter(
    bench: Bench, process: OfficialClient, undecided: dict[str, tuple[str, str]]
) -> None:
    """After the last check; it says where it came from and how often was asked."""
    topic, message_id = undecided[process.language.name]
    process.start(f"d-{topic}", process.language.listener, dead_letter_topic(GIVEN_UP_GROUP), group=f"d-{topic}")
    found: list[dict[str, object]] = []
    while not any(each["message_id"] == message_id for each in found):
        before = len(found)
        found = process.wait_for_deliveries(f"d-{topic}", before + 1)
        assert len(found) > before, "it is not there"
    assert len(process.deliveries(f"p-{topic}")) == CHECKS_MAX
    (letter,) = [each for each in dead_letters(bench.daemon.address, GIVEN_UP_GROUP) if each.message_id == message_id]
    assert (letter.origin_topic, letter.attempts) == (topic, CHECKS_MAX)
    assert_commit_refused(process, message_id, "was given up at")
    assert not process.deliveries(f"c-{topic}")


@having("restart", "checks")
def test_half_messages_outlive_the_daemon(bench: Bench, process: OfficialClient, topic: str) -> None:
    """Killed before they are decided: one is committed by who sent it, for the other one somebody new is asked.

    Who sent it may be asked as well, but Python opens its stream again only when it repeats its settings, in minutes.
    """
    mine, other = [patiently(half, process, topic, body) for body in ("mine", "commit after all")]
    bench.daemon.kill()
    bench.daemon.restart()
    patiently(process.do, "commit", message_id=mine)
    patiently(process.start, f"q-{topic}", "transactional", topic)
    deliveries = process.wait_for_deliveries(f"c-{topic}", 2)
    assert {each["message_id"] for each in deliveries} == {mine, other}
