"""Functions that send one type of message, and what is known of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import Any, Literal

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.topics import check_topic
from retry.hook.classify import Classifier
from retry.hook.destination import Destination
from retry.hook.metrics import Tally
from retry.policy import RetryPolicy, to_plain
from retry.sink import DelaySink

Mode = Literal["on_failure", "write_ahead"]
MODES: tuple[Mode, ...] = ("on_failure", "write_ahead")
WORKERS_MAX = 64

HandlerFunction = Callable[..., Any]


class UnknownType(LookupError):
    """No handler is registered for this type."""


class HandlerExists(ValueError):
    """The type has a handler already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a handler may want to know. ``attempts`` failed before this one, so the first has 0."""

    uid: bytes  # the same in every attempt: receivers know a repetition by it
    attempts: int
    is_uncertain: bool  # an earlier attempt may have got through
    created_at_ms: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """One registered function with its settings."""

    type_name: str
    function: HandlerFunction
    is_async: bool
    takes_attempt: bool
    policy: RetryPolicy
    destination: Destination
    classifier: Classifier | None
    workers: int
    is_write_ahead: bool
    tally: Tally
    earlier_names: tuple[str, ...] = ()  # under which builds before this one kept what is sent by it

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which a sink may keep what is sent by it."""
        return (self.type_name, *self.earlier_names)

    def names_in(self, sink: DelaySink) -> tuple[str, ...]:
        """Return those under which ``sink`` ever kept something, the earlier ones first, and its own."""
        if not self.earlier_names:
            return (self.type_name,)
        known = set(sink.types)
        return (*(name for name in self.earlier_names if name in known), self.type_name)

    def call(self, payload: bytes, attempt: Attempt | None) -> Any:  # noqa: ANN401 - return type of the user's function
        """Call the function; a coroutine of an async one is returned, not awaited. ``attempt`` only if it is taken."""
        if self.takes_attempt:
            return self.function(payload, attempt)
        return self.function(payload)

    def settings(self) -> dict[str, object]:
        """Return what is in force for this type."""
        return {
            "destination": self.destination.name,
            "mode": "write_ahead" if self.is_write_ahead else "on_failure",
            "workers": self.workers,
            "is_async": self.is_async,
            "policy": to_plain(self.policy),
            **({"earlier_names": list(self.earlier_names)} if self.earlier_names else {}),
        }


def receipt_of(returned: Any) -> Any:  # noqa: ANN401 - return type of the user's function
    """Return what a sync handler returned as its receipt.

    A future is waited for: an error inside it would be a lost message. A coroutine is an error of the program.
    """
    if isinstance(returned, Future):
        return returned.result()
    if type(returned) is CoroutineType:
        returned.close()
        raise TypeError("the handler returned a coroutine, so nothing was sent: declare it `async def`")
    return returned


def check_type_name(type_name: str) -> str:
    """Return ``type_name`` if a type can have it; ``ValueError`` otherwise."""
    try:
        return check_topic(type_name)
    except Refused as refused:
        raise ValueError(f"{type_name!r:.80} cannot name a type of messages: {refused}") from refused


def takes_attempt(function: HandlerFunction) -> bool:
    """Say whether ``function`` wants ``(payload, attempt)``; ``TypeError`` if it can be called neither way."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not tell
        return False
    places = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    needed = [one for one in places if one.default is one.empty]
    is_open = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    unfilled = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) > 2 or unfilled or not (places or is_open):
        raise TypeError(f"a handler takes (payload) or (payload, attempt), not {inspect.signature(function)}")
    return len(needed) == 2 or (len(places) >= 2 and places[1].name == "attempt")


def is_async(function: HandlerFunction) -> bool:
    """Say whether calling ``function`` gives a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - the kind of function matters, not callability
