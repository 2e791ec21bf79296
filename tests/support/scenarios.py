"""Scenarios with official clients that mostly wait, and what an operator does meanwhile."""

# ruff: noqa: ANN401 - what a command answers is JSON

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest
from support.daemon import run_command
from support.official_client import LANGUAGES, Language, OfficialClient, can_run, require, those_with

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.admin.mapping import wire_policy
from retry.policy import Backoff, RetryPolicy

SCENARIO_S_MAX = 50.0
_LOOK_AGAIN_S = 0.05
_Found = TypeVar("_Found")


class Scenarios:
    """What took place with every client that has push consumers and can run here, all at once, so that waits overlap.

    A scenario is a function that is given the process of one language's clients. Leaving ends what still runs.
    """

    def __init__(
        self, address: str, tmp: pytest.TempPathFactory, scenarios: Sequence[Callable[[OfficialClient], Any]]
    ) -> None:
        self._address = address
        self._tmp = tmp
        self._scenarios = scenarios
        self._came_of: dict[tuple[str, Callable[[OfficialClient], Any]], Future[Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            languages = list(filter(can_run, those_with("push")))
            pool = ThreadPoolExecutor(max_workers=len(LANGUAGES) * len(self._scenarios))
            stack.callback(pool.shutdown)
            for language in languages:
                home = self._tmp.mktemp(language.name)
                process = stack.enter_context(OfficialClient(language, home, self._address))
                for scenario in self._scenarios:
                    self._came_of[language.name, scenario] = pool.submit(scenario, process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def result(
        self, scenario: Callable[[OfficialClient], _Found], language: Language, within_s: float = SCENARIO_S_MAX
    ) -> _Found:
        """Return what came of ``scenario``, one of those given; skip the test where ``language`` cannot run."""
        require(language)
        found: _Found = self._came_of[language.name, scenario].result(within_s)
        return found


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
