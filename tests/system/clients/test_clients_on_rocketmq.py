"""The official clients in front of a daemon in front of a real cluster: they see what they see of the embedded broker.

Once for each language, at once, what an application does all day; a long run takes all that the clients are asked
elsewhere, and earlier versions of them. Where the cluster does it differently, ``DIFFERS`` says how, and fails once it
no longer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest
from support.clients.official import client_suite, recall_suite, transaction_suite
from support.clients.official.client import LANGUAGES, NEWEST, VERSIONS, Language, OfficialClient, can_run, require
from support.clients.official.client_bench import PREFIXES
from support.clients.official.client_suite import Orphaned, let_die, let_expire, let_fail, slow_names
from support.clients.official.scenarios import Scenarios, push_in_groups, seen
from support.clients.official.traffic import GROUPS, TOPIC, Outage, Restarts, at_work
from support.effort import EFFORT, at_length
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.cluster import cluster

pytestmark = pytest.mark.cluster
WITHIN_S = 60.0 + 60.0 * EFFORT  # for what happens by itself; nothing waits that long unless it is broken
CLIENTS = VERSIONS if EFFORT > 1 else LANGUAGES  # that go through what each does by default, and through outages
PUSHING = [language for language in CLIENTS if "push" not in language.lacks]
IN_ORDER = [language for language in NEWEST if "push" not in language.lacks]  # each version retries in a way of its own
# All published versions at once would be thirty processes of three clients.
LASTING = [language for language in CLIENTS if "restart" not in language.lacks][:12]
SUITES = (client_suite, recall_suite, transaction_suite)  # the last, since a broker spins from its first one on
# What each client does by default: the type of the topic, and what a client may not offer that it is about.
DAILY: dict[Callable[..., None], tuple[str, set[str]]] = {
    client_suite.test_everything_a_message_carries_arrives: ("NORMAL", set()),
    client_suite.test_message_group_keeps_its_order: ("FIFO", set()),
    client_suite.test_nothing_comes_before_its_delivery_timestamp: ("NORMAL", set()),
    client_suite.test_change_of_invisible_duration: ("NORMAL", {"change", "handles"}),
    client_suite.test_push_consumer_is_given_every_message: ("NORMAL", {"push"}),
    recall_suite.test_a_recalled_message_does_not_come: ("NORMAL", {"recall"}),
}
_UNTOLD = "a delayed message comes to the cluster as an undelayed one, so that its consumers are told no time"
# What the cluster does differently, by the name of the test.
DIFFERS = {
    "test_a_delivery_timestamp_is_returned": _UNTOLD,
    "test_a_time_that_has_passed_means_now": _UNTOLD,
    "test_each_delay_level": _UNTOLD,
    "test_absolute_time_by_property": _UNTOLD,
    "test_an_end_is_final": "a proxy forgets a transaction with its end, and fails when it is ended again",
    "test_a_delay_begins_at_the_commit": "RocketMQ takes no half messages that are delayed",
}
# RocketMQ knows no ids: each half message that this one sends again would be another one to be asked about.
NOT_ASKED = {"test_the_answer_to_a_check_is_final"}
# What a client does by itself where it is to retry a message of a FIFO group in its memory, which is the cluster's way.
OWN_ORDER = {
    "python": "it counts every try in its memory as the first",
    "go": "it hands out the next message while one that failed waits in its memory",
}
FIFO = "in-order"
HEAD = "fail 2 times a1"
_BEHIND = ("a2", "b1", "b2")
_GROUPS_OF_A_TOPIC = ("g", "tags", "other", "push", "short")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
    """A test of a suite as a scenario, with its arguments; by the languages it is about."""

    test: Callable[..., None]
    arguments: Mapping[str, Any]
    number: int
    languages: Sequence[Language]
    topic_type: str

    @property
    def name(self) -> str:
        """What it is called, as part of the name of a topic."""
        return f"{self.test.__name__.removeprefix('test_')}-{self.number}"

    def topic(self, language: Language) -> str:
        """Its topic."""
        return f"{self.name}-{language.name}"

    def run(self, process: OfficialClient) -> None:
        """Let it take place, with the clients that a topic of its suite has."""
        if process.language not in self.languages:
            return
        topic, language = self.topic(process.language), process.language
        for kind in next(suite.KINDS for suite in SUITES if suite.__name__ == self.test.__module__):
            name = f"{PREFIXES[kind]}-{topic}"
            process.start(name, language.listener if kind == "listener" else kind, topic, group=f"g-{topic}")
        self.test(process, topic, **self.arguments)


def _cases_of(test: Callable[..., None]) -> Iterator[Case]:
    """Return a test once for each of the arguments that its marks give it."""
    topic_type, lacks = DAILY.get(test, ("MIXED", set[str]()))
    languages: Sequence[Language] = LANGUAGES
    arguments: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        names, values = mark.args
        given = [getattr(each, "values", (each,)) for each in values]
        if names == "process":
            languages = [language for (language,) in given]
        elif isinstance(names, str):
            arguments = [{**each, names: value} for each in arguments for (value,) in given]
        else:
            arguments = [
                {**each, **dict(zip(names, several, strict=True))} for each in arguments for (several,) in given
            ]
    if test in DAILY:
        languages = [language for language in CLIENTS if language.lacks.isdisjoint(lacks)]
    for number, each in enumerate(arguments):
        yield Case(test=test, arguments=each, number=number, languages=languages, topic_type=topic_type)


def _cases() -> Iterator[Case]:
    for suite in SUITES:
        for name, test in vars(suite).items():
            is_one = name.startswith("test_") and name not in NOT_ASKED and "slow" not in signature(test).parameters
            if is_one and (EFFORT > 1 or test in DAILY):
                yield from _cases_of(test)


CASES = tuple(_cases())


# -- what runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _names() -> None:
    """Make all topics at once, since it takes seconds until they are routed, and all groups."""
    running = cluster().rocketmq
    types: dict[str, str] = {}
    groups = set(GROUPS)
    for language in filter(can_run, CLIENTS):
        of_groups, full = slow_names(language)
        groups |= set(of_groups.values())
        types |= dict.fromkeys([*of_groups, full, f"{TOPIC}-{language.name}"], "NORMAL")
        types[f"{FIFO}-{language.name}"] = "FIFO"
        running.make_group(f"{FIFO}-{language.name}", attempts=5, is_fifo=True)
    for case in CASES:
        for language in filter(can_run, case.languages):
            types[case.topic(language)] = case.topic_type
            for prefix in _GROUPS_OF_A_TOPIC:
                running.make_group(f"{prefix}-{case.topic(language)}", is_fifo=case.topic_type == "FIFO")
    for group in groups:
        running.make_group(group)
    running.make_topics(types)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    levels = " ".join(f"{level_ms}ms" for level_ms in client_suite.LEVELS_MS)
    options = ("--broker", "rocketmq", "--endpoints", ";".join(cluster().endpoints), "--delay-levels", levels)
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", *options) as daemon:
        yield daemon
        daemon.stop()


def _let_die(process: OfficialClient) -> Orphaned:
    return let_die(
        process, within_s=WITHIN_S
    )  # a poll of the one that died may end with what is sent, and give it back


def _fail_in_order(process: OfficialClient) -> list[dict[str, Any]]:
    push_in_groups(process, FIFO, (HEAD, *_BEHIND), handed_out=3 + len(_BEHIND))
    return process.deliveries(f"{FIFO}-c")


@pytest.fixture(scope="module")
def scenarios(front: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    long = [let_expire, _let_die] if EFFORT > 1 else []
    runs = [let_fail, _fail_in_order, *long, *(case.run for case in CASES)]
    with Scenarios(front.address, tmp_path_factory, runs, CLIENTS) as running:
        yield running


def _each_case() -> Iterator[object]:
    for case in CASES:
        why = DIFFERS.get(case.test.__name__)
        marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
        for language in case.languages:
            yield pytest.param(language, case, marks=marks, id=f"{language.name}-{case.name}")


@pytest.mark.parametrize(("language", "case"), list(_each_case()))
def test_in_front_of_a_cluster(scenarios: Scenarios, language: Language, case: Case) -> None:
    """What a client sees of the embedded broker it sees of the cluster."""
    scenarios.result(case.run, language, WITHIN_S)


@pytest.mark.parametrize("language", PUSHING, ids=lambda language: language.name)
def test_a_failed_message_comes_back(scenarios: Scenarios, language: Language) -> None:
    """By the cluster, and as the next attempt."""
    found = scenarios.result(let_fail, language, WITHIN_S)
    assert [each["attempt"] for each in found] == [1, 2]
    assert len({each["message_id"] for each in found}) == 1


@at_length
@pytest.mark.parametrize("language", CLIENTS, ids=lambda language: language.name)
def test_an_unfinished_message_comes_back(scenarios: Scenarios, language: Language) -> None:
    """After its invisible duration of 10 s, as attempt 2."""
    sent_ms, (first, second) = scenarios.result(let_expire, language, WITHIN_S)
    assert (second["message_id"], second["attempt"]) == (first["message_id"], 2)
    assert second["at_ms"] - sent_ms >= 10_000


@at_length
@pytest.mark.parametrize("language", CLIENTS, ids=lambda language: language.name)
def test_another_consumer_gets_the_messages_of_a_dead_one(scenarios: Scenarios, language: Language) -> None:
    """All that it had taken, as attempt 2."""
    found = scenarios.result(_let_die, language, WITHIN_S)
    assert sorted(each["message_id"] for each in found.taken) == sorted(found.sent)
    assert sorted(each["message_id"] for each in found.received) == sorted(found.sent)
    assert {each["attempt"] for each in found.received} == {2}


def _in_order(language: Language) -> object:
    why = OWN_ORDER.get(language.name)
    marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
    return pytest.param(language, marks=marks, id=language.name)


@pytest.mark.parametrize("language", [_in_order(language) for language in IN_ORDER])
def test_nothing_passes_a_message_that_failed(scenarios: Scenarios, language: Language) -> None:
    """A FIFO group of the cluster retries a message until it succeeds, before the next one of its message group."""
    found = scenarios.result(_fail_in_order, language, WITHIN_S)
    assert [body for body, _ in seen(found, "a")] == [HEAD] * 3 + ["a2"]
    assert [body for body, _ in seen(found, "b")] == ["b1", "b2"]


# -- outages -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarts(front: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    running = cluster().rocketmq

    def kill() -> None:
        for node in running.nodes:
            running.kill(node)

    def start() -> None:
        for node in running.nodes:
            running.start(node)

    with at_work(LASTING, front.address, tmp_path_factory, patience_s=WITHIN_S) as restarts:
        outages = [Outage("a kill of the daemon", front.kill, front.restart)]
        if EFFORT > 1:
            outages.append(Outage("a kill of the cluster", kill, start))
        restarts.run(*outages)
        yield restarts


@pytest.mark.parametrize("language", LASTING, ids=lambda language: language.name)
def test_clients_go_on_after_an_outage(language: Language, restarts: Restarts) -> None:
    """Of the daemon, and in a long run of the whole cluster: all of them work again, and nothing is lost."""
    require(language)
    if language.name in restarts.failed:
        raise restarts.failed[language.name]
