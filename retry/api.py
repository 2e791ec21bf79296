"""The API of PyPI's package ``retry``: repeat a call that fails. It keeps users of that package working.

    from retry import retry
    from retry.api import retry_call

    @retry(ConnectionError, tries=5, delay=1, backoff=2, max_delay=30)
    def fetch(): ...

    @retry(ConnectionError, policy=RetryPolicy(backoff=Exponential(initial_ms=200, max_ms=30_000), max_attempts=5))
    async def fetch(): ...

Names, arguments, defaults and behaviour are those of ``retry`` 0.9; times are in seconds. There are two extensions.
Coroutine functions are repeated too (``retry`` 0.9 calls them once), and a ``RetryPolicy`` can schedule the attempts.
Pending calls exist only in this process and are lost with it. Use ``Redelivery`` for messages that must not be lost.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import iscoroutinefunction
from itertools import count
from types import FunctionType, MethodType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from broker_adapter.runtime.clock import SystemClock
from retry.policy import RetryAt, RetryPolicy, decide

__all__ = ["retry", "retry_call"]

P = ParamSpec("P")
T = TypeVar("T")
Exceptions = type[BaseException] | tuple[type[BaseException], ...]

logging_logger = logging.getLogger(__name__)
logging_logger.addHandler(logging.NullHandler())  # no output on stderr unless the application configures logging


class Warns(Protocol):
    """Logger that receives a warning for each failure that is followed by another attempt."""

    def warning(self, message: str, /, *arguments: object) -> object:
        """Log one line."""
        ...


@dataclass(frozen=True, slots=True)
class _Rules:
    exceptions: Exceptions = Exception
    tries: float = -1
    delay: float = 0
    max_delay: float | None = None
    backoff: float = 1
    jitter: float | tuple[float, float] = 0
    logger: Warns | None = logging_logger
    policy: RetryPolicy | None = None

    def __post_init__(self) -> None:
        if self.policy is None:
            return
        of_time = ("tries", "delay", "max_delay", "backoff", "jitter")
        given = [
            each.name for each in fields(self) if each.name in of_time and getattr(self, each.name) != each.default
        ]
        if given:
            raise TypeError(f"policy replaces other arguments: {', '.join(given)} cannot be combined with it")

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each further attempt; stop after the last allowed attempt."""
        if self.policy is not None:
            yield from _pauses_of(self.policy)
            return
        pause, left = self.delay, self.tries - 1
        while left:  # negative: no end
            yield pause
            pause = pause * self.backoff + self._extra()
            pause = pause if self.max_delay is None else min(pause, self.max_delay)
            left -= 1

    def _extra(self) -> float:
        return random.uniform(*self.jitter) if isinstance(self.jitter, tuple) else self.jitter

    def pause_after(self, error: BaseException, pauses: Iterator[float]) -> float | None:
        """Return the seconds to wait after a failure, and log them; return ``None`` after the last attempt."""
        pause = next(pauses, None)
        if pause is not None and self.logger is not None:
            self.logger.warning("%s, retrying in %s seconds...", error, pause)
        return pause


def _pauses_of(policy: RetryPolicy) -> Iterator[float]:
    clock, rng = SystemClock(), random.Random()
    begun_s = clock.monotonic_s()
    for attempt in count(1):
        now_ms = round((clock.monotonic_s() - begun_s) * 1000)
        after = decide(policy, attempt, now_ms, rng, since_ms=0)
        if not isinstance(after, RetryAt):
            return
        yield (after.at_ms - now_ms) / 1000


def retry(  # noqa: PLR0917 - argument order of the PyPI package
    exceptions: Exceptions = Exception,
    tries: float = -1,
    delay: float = 0,
    max_delay: float | None = None,
    backoff: float = 1,
    jitter: float | tuple[float, float] = 0,
    logger: Warns | None = logging_logger,
    *,
    policy: RetryPolicy | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that repeats a function while it raises one of ``exceptions``; the last error is raised.

    ``tries`` counts attempts: -1 means no limit, 0 means no call at all. The wait before the second attempt is
    ``delay`` seconds. Each further wait is the previous one times ``backoff`` plus ``jitter`` (drawn from a range if it
    is a pair), at most ``max_delay``. ``logger`` gets a warning before each wait, unless it is ``None``. ``policy``
    replaces all timing arguments.
    """
    rules = _Rules(exceptions, tries, delay, max_delay, backoff, jitter, logger, policy)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if not _is_async(function):
            return wraps(function)(lambda *args, **kwargs: _run(partial(function, *args, **kwargs), rules))

        @wraps(function)
        async def repeated(*args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401 - return type of the function
            return await _run_async(partial(function, *args, **kwargs), rules)

        return cast("Callable[P, T]", repeated)

    return decorate


def retry_call(  # noqa: PLR0917 - argument order of the PyPI package
    f: Callable[..., Any],
    fargs: Sequence[Any] | None = None,
    fkwargs: Mapping[str, Any] | None = None,
    exceptions: Exceptions = Exception,
    tries: float = -1,
    delay: float = 0,
    max_delay: float | None = None,
    backoff: float = 1,
    jitter: float | tuple[float, float] = 0,
    logger: Warns | None = logging_logger,
    *,
    policy: RetryPolicy | None = None,
) -> Any:  # noqa: ANN401 - return type of the function
    """Call ``f(*fargs, **fkwargs)`` with the rules of ``retry``, and return its result.

    If ``f`` is a coroutine function, the result is a coroutine to await.
    """
    rules = _Rules(exceptions, tries, delay, max_delay, backoff, jitter, logger, policy)
    return (_run_async if _is_async(f) else _run)(partial(f, *(fargs or ()), **(fkwargs or {})), rules)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    # Decide by type: a mock with a function's spec claims to be one, and all of its attributes are truthy.
    is_plain = type(function) in {FunctionType, MethodType}
    return iscoroutinefunction(function if is_plain else type(function).__call__)


def _run(call: Callable[[], Any], rules: _Rules) -> Any:  # noqa: ANN401 - return type of the function
    if not rules.tries:
        return None
    pauses = rules.pauses()
    while True:
        try:
            return call()
        except rules.exceptions as error:
            pause = rules.pause_after(error, pauses)
            if pause is None:
                raise
            time.sleep(pause)


async def _run_async(call: Callable[[], Any], rules: _Rules) -> Any:  # noqa: ANN401 - return type of the function
    import asyncio  # imported late: callers without coroutines do not pay for it

    if not rules.tries:
        return None
    pauses = rules.pauses()
    while True:
        try:
            return await call()
        except asyncio.CancelledError:  # a cancellation of the task is never retried
            raise
        except rules.exceptions as error:
            pause = rules.pause_after(error, pauses)
            if pause is None:
                raise
            await asyncio.sleep(pause)
