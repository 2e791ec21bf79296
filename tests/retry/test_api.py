"""What PyPI's ``retry`` offers, by its rules: each case was held against version 0.9.2 of it."""

from __future__ import annotations

import asyncio
import inspect
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

import retry as package
from retry import Exponential, Fixed, RetryPolicy, retry
from retry.api import logging_logger, retry_call


class Failing:
    """Fails so often, then returns what it is called with."""

    def __init__(self, failures: int, error: type[BaseException] = ValueError) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(self.calls)
        return args, kwargs

    async def later(self, *args: object, **kwargs: object) -> object:
        return self(*args, **kwargs)


@pytest.fixture(autouse=True)
def slept() -> Iterator[list[float]]:
    """What was slept instead, by the name that tests of applications replace: in this thread, others go on as ever."""
    seconds: list[float] = []
    sleep, here = time.sleep, threading.get_ident()

    def note(duration_s: float) -> None:
        if threading.get_ident() == here:
            seconds.append(duration_s)
        else:
            sleep(duration_s)

    with mock.patch("retry.api.time.sleep", note):
        yield seconds


@pytest.mark.parametrize(
    ("options", "pauses"),
    [
        ({}, [0, 0, 0, 0]),
        ({"delay": 1, "backoff": 2}, [1, 2, 4, 8]),
        ({"delay": 1, "backoff": 2, "max_delay": 4}, [1, 2, 4, 4]),
        ({"delay": 5, "max_delay": 2}, [5, 2, 2, 2]),  # the first wait is not bounded there either
        ({"delay": 1, "jitter": 1}, [1, 2, 3, 4]),
        ({"delay": 1, "backoff": 2, "jitter": 0.5}, [1, 2.5, 5.5, 11.5]),
        ({"delay": 2, "backoff": 0}, [2, 0, 0, 0]),
    ],
)
def test_the_waits_are_those_of_the_other_package(
    slept: list[float], options: dict[str, Any], pauses: list[float]
) -> None:
    function = Failing(4)
    assert retry(**options)(function)(1, key=2) == ((1,), {"key": 2})
    assert slept == pauses


def test_a_range_of_jitter_is_drawn_from(slept: list[float]) -> None:
    random.seed(7)
    with pytest.raises(ValueError, match="4"):
        retry_call(Failing(9), tries=4, delay=1, jitter=(1, 2))
    random.seed(7)
    first = 1 + random.uniform(1, 2)
    assert slept == [1, first, first + random.uniform(1, 2)]


@pytest.mark.parametrize(("tries", "calls"), [(1, 1), (2, 2), (5, 5), (7, 7)])
def test_tries_are_attempts(tries: float, calls: int) -> None:
    """The last error is raised."""
    function = Failing(7)
    with pytest.raises(ValueError, match=str(calls)):
        retry_call(function, tries=tries)
    assert function.calls == calls


@pytest.mark.parametrize(("tries", "calls"), [(8, 8), (-1, 8), (float("inf"), 8), (2.5, 8), (0, 0)])
def test_tries_may_be_without_end(tries: float, calls: int) -> None:
    """So is what never becomes 0; 0 itself calls nothing and returns None."""
    function = Failing(7)
    assert retry_call(function, fargs=[1], tries=tries) == (((1,), {}) if calls else None)
    assert function.calls == calls


def test_other_errors_are_raised_at_once(slept: list[float]) -> None:
    function = Failing(2, KeyError)
    with pytest.raises(KeyError):
        retry((ValueError, TypeError), 3, 1)(function)()
    assert (function.calls, slept) == (1, [])


def test_each_further_attempt_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """By the default logger, one's own, or nobody."""
    retry(delay=1, backoff=2)(Failing(2))()
    assert [record.getMessage() for record in caplog.records] == [
        "1, retrying in 1 seconds...",
        "2, retrying in 2 seconds...",
    ]
    assert {record.name for record in caplog.records} == {logging_logger.name} == {"retry.api"}
    own = mock.Mock()
    retry(logger=own)(Failing(1))()
    own.warning.assert_called_once()
    caplog.clear()
    retry(logger=None)(Failing(1))()
    assert not caplog.records


def test_nothing_is_printed_unless_the_application_logs() -> None:
    """As there: the standard library would otherwise write warnings of libraries to stderr."""
    code = "from retry import retry\nn = []\n@retry()\ndef f():\n    n.append(1)\n    if len(n) < 3: raise OSError\nf()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_wrapper_looks_like_its_function() -> None:
    @retry(tries=2)
    def sum_of(first: int, second: int = 1) -> int:
        """Add."""
        return first + second

    assert (sum_of(2), sum_of.__name__, sum_of.__doc__) == (3, "sum_of", "Add.")
    assert list(inspect.signature(sum_of).parameters) == ["first", "second"]


@pytest.mark.parametrize("call", [retry_call, lambda f, **rules: retry(**rules)(f)()], ids=["call", "decorator"])
@pytest.mark.parametrize(
    "shape", [lambda f: f.later, lambda f: partial(partial(f.later, 1), 2)], ids=["method", "partial"]
)
def test_a_coroutine_function_is_repeated_too(
    call: Callable[..., Any], shape: Callable[[Failing], Callable[..., Any]], slept: list[float]
) -> None:
    function = Failing(3)
    assert asyncio.run(call(shape(function), tries=5))
    assert (function.calls, slept) == (4, [])
    with pytest.raises(ValueError, match="2"):
        asyncio.run(call(shape(Failing(3)), tries=2))


def test_a_cancelled_waiter_ends() -> None:
    """Whatever errors are to be repeated."""
    function = Failing(3, asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(retry_call(function.later, exceptions=BaseException))
    assert function.calls == 1


def test_a_double_of_a_function_is_no_coroutine() -> None:
    """It says yes to whatever it is asked."""

    def double_of(value: int) -> int:
        return value

    double = mock.MagicMock(spec=double_of, return_value=3)
    assert retry_call(double, fargs=[1]) == 3


def test_a_policy_gives_the_time_of_the_next_attempt(slept: list[float]) -> None:
    policy = RetryPolicy(backoff=Exponential(initial_ms=200, max_ms=500), max_attempts=4)
    with pytest.raises(ValueError, match="4"):
        retry_call(Failing(9), policy=policy)
    assert slept == [0.2, 0.4, 0.5]
    with pytest.raises(ValueError, match="1"):
        retry_call(Failing(9), policy=RetryPolicy(backoff=Fixed(2000), max_age_ms=1000))
    with pytest.raises(TypeError, match="tries, delay cannot be combined with it"):
        retry(tries=3, delay=1, policy=policy)


def test_all_its_names_are_there() -> None:
    """After ``import retry`` alone, and nothing is loaded for that before it is used."""
    code = "import sys, retry; print('retry.api' in sys.modules); print(retry.api.retry_call(str), retry.retry)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\n <function retry ")
    assert "retry" in package.__all__
