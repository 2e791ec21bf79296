"""Scenarios with official clients that mostly wait, and what an operator does meanwhile."""

# ruff: noqa: ANN401 - what a command answers is JSON

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest
from support.clients.official.client import Language, OfficialClient, can_run, require, those_with
from support.rigs.daemon.process import run_command

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.admin.requests.mapping import wire_policy
from retry.policy import Backoff, RetryPolicy

SCENARIO_S_MAX = 50.0
_AT_ONCE = 5  # languages: the newest of each; all published versions at once would be many virtual machines of Java
_SCENARIOS_AT_ONCE = 8
_LOOK_AGAIN_S = 0.05
_Found = TypeVar("_Found")


class Scenarios:
    """What took place with every client that has push consumers and can run here, so that their waits overlap.

    A scenario is a function that is given the process of one language's clients. All scenarios of a language run at
    once, or eight if there are more; those of several languages too. Leaving begins no more, and waits for those that
    run. ``languages`` are those with push consumers, unless it says otherwise.
    """

    def __init__(
        self,
        address: str,
        tmp: pytest.TempPathFactory,
        scenarios: Sequence[Callable[[OfficialClient], Any]],
        languages: Sequence[Language] | None = None,
    ) -> None:
        self._address = address
        self._scenarios = scenarios
        self._languages = list(filter(can_run, those_with("push") if languages is None else languages))
        self._homes = {language.name: tmp.mktemp(language.name) for language in self._languages}
        self._pool = ThreadPoolExecutor(max_workers=_AT_ONCE)
        self._came_of: dict[str, Future[dict[Callable[[OfficialClient], Any], Future[Any]]]] = {}

    def _run(self, language: Language) -> dict[Callable[[OfficialClient], Any], Future[Any]]:
        with (
            OfficialClient(language, self._homes[language.name], self._address) as process,
            ThreadPoolExecutor(max_workers=min(len(self._scenarios), _SCENARIOS_AT_ONCE)) as pool,
        ):
            return {scenario: pool.submit(scenario, process) for scenario in self._scenarios}

    def __enter__(self) -> Self:
        for language in self._languages:
            self._came_of[language.name] = self._pool.submit(self._run, language)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def result(
        self, scenario: Callable[[OfficialClient], _Found], language: Language, within_s: float = SCENARIO_S_MAX
    ) -> _Found:
        """Return what came of ``scenario``, one of those given; skip the test where ``language`` cannot run."""
        require(language)
        groups = -(-len(self._languages) // _AT_ONCE)  # each waits for those before it
        found: _Found = self._came_of[language.name].result(within_s * groups)[scenario].result()
        return found


def push_in_groups(process: OfficialClient, name: str, bodies: Sequence[str], *, handed_out: int) -> None:
    """Send bodies such as ``a1`` to the message group of their letter, and let a push consumer have them.

    Topic and group are ``<name>-<language>``, the clients ``<name>-p`` and ``<name>-c``. It ends with ``handed_out``
    deliveries.
    """
    topic = f"{name}-{process.language.name}"
    process.start(f"{name}-p", "producer", topic)
    for body in bodies:
        process.send(f"{name}-p", topic, body=body, message_group=body.split()[-1][0])
    process.start(f"{name}-c", "push", topic, group=topic)
    process.wait_for_deliveries(f"{name}-c", handed_out)


def seen(deliveries: Sequence[dict[str, Any]], message_group: str) -> list[tuple[str, int]]:
    """Return the bodies and attempts of one message group, as they came."""
    return [(each["body"], each["attempt"]) for each in deliveries if each["message_group"] == message_group]


def dmq(address: str, *arguments: str) -> Any:
    """Run a ``dmq`` command against the daemon at ``address``, assert that it goes well, and return its JSON.

    It takes half a second of a processor: where the command is not the point, an ``AdminClient`` is kinder.
    """
    done = run_command("--address", address, "--output", "json", *arguments)
    assert done.returncode == 0, f"dmq {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
    return json.loads(done.stdout)


def set_group(address: str, name: str, backoff: Backoff, *, max_attempts: int, is_fifo: bool | None = None) -> None:
    """Set the policy of a consumer group, and whether it is FIFO."""
    policy = wire_policy(RetryPolicy(backoff=backoff, max_attempts=max_attempts))
    with AdminClient(address, timeout_s=20) as client:
        client.set_group(name, policy=policy, is_fifo=is_fifo)


def dead_letters(address: str, group: str, *, with_outcome: bool = False) -> list[wire.DeadLetter]:
    """Return the dead letters of a group: those that nobody dealt with, or all."""
    with AdminClient(address, timeout_s=20) as client:
        return list(client.dead_letters(group, wire.DeadFilter(), with_outcome=with_outcome).letters)


def wait_for_group(
    address: str, name: str, is_so: Callable[[wire.Group], bool], *, within_s: float = 20.0
) -> wire.Group:
    """Ask for a consumer group until ``is_so``, and return it as it is then."""
    pause, until_s = threading.Event(), time.monotonic() + within_s
    with AdminClient(address, timeout_s=20) as client:
        while not is_so(group := client.group(name)):
            assert time.monotonic() < until_s, f"not within {within_s} s:\n{group}"
            pause.wait(_LOOK_AGAIN_S)
    return group


def is_at_rest(group: wire.Group) -> bool:
    """Say whether a group has nothing under way: no message handed out, no retry that waits."""
    return not group.leased and not group.waiting
