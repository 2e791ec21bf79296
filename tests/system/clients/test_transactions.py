"""Transactional producers of the official clients: one daemon, a process per language, the same tests for all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import TypeVar

import pytest
from support.clients.official.client import (
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
from support.clients.official.client_bench import Bench
from support.clients.official.scenarios import dead_letters
from support.clients.official.transaction_suite import *  # noqa: F403 - pytest finds the tests here
from support.clients.official.transaction_suite import KINDS, assert_commit_refused, bodies, half
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.transactions.transaction_checks import GIVEN_UP_GROUP

pytestmark = pytest.mark.integration
CHECKS_MAX = 5
_PACE = {"TIMEOUT": "1s", "CHECK_INTERVAL": "2s", "CHECKS_MAX": str(CHECKS_MAX)}
_names = count(1)
_Answer = TypeVar("_Answer")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    env = {**os.environ, **{f"DMQ_TRANSACTION_{key}": value for key, value in _PACE.items()}}
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", env=env) as daemon, ExitStack() as stack:
        made = Bench(daemon, stack, tmp_path_factory, *KINDS)
        yield made
        made.stop()


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


def patiently(do: Callable[..., _Answer], *arguments: object, **more: object) -> _Answer:
    """Do it again until it goes: after a restart a client has to find out that its connection is gone."""
    until_s = time.monotonic() + 30
    while True:
        try:
            return do(*arguments, **more)
        except ClientError:
            assert time.monotonic() < until_s


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
def test_an_undecided_half_message_is_a_dead_letter(
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
    patiently(half, process, topic, "undecided")  # finds the connection dead: Rust's commit can be tried only once
    patiently(process.do, "commit", message_id=mine)
    patiently(process.start, f"q-{topic}", "transactional", topic)
    deliveries = process.wait_for_deliveries(f"c-{topic}", 2)
    assert {each["message_id"] for each in deliveries} == {mine, other}
