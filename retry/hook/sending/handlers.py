"""Handlers: functions that send one type of message, with their settings."""

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
from retry.hook.destinations import Destination
from retry.hook.sending.tally import HookTally
from retry.hook.verdicts import Classifier
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
    """Facts about an attempt for its handler. ``attempts`` counts the failed attempts before it: 0 at the first one."""

    uid: bytes  # the same in every attempt: receivers detect duplicates by it
    attempts: int
    is_uncertain: bool  # an earlier attempt may have succeeded
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
    tally: HookTally
    earlier_names: tuple[str, ...] = ()  # type names that earlier builds used for its entries

    @property
    def names(self) -> tuple[str, ...]:
        """All type names under which a sink may keep its entries."""
        return (self.type_name, *self.earlier_names)

    def names_in(self, sink: DelaySink) -> tuple[str, ...]:
        """Return the names with entries in ``sink``, now or in the past: earlier names first, the current name always
        last.
        """
        if not self.earlier_names:
            return (self.type_name,)
        known = set(sink.types)
        return (*(name for name in self.earlier_names if name in known), self.type_name)

    def call(self, payload: bytes, attempt: Attempt | None) -> Any:  # noqa: ANN401 - return type of the user's function
        """Call the function. The coroutine of an async function is returned unawaited. ``attempt`` is passed only if
        accepted.
        """
        if self.takes_attempt:
            return self.function(payload, attempt)
        return self.function(payload)

    def settings(self) -> dict[str, object]:
        """Return the effective settings of this type."""
        return {
            "destination": self.destination.name,
            "mode": "write_ahead" if self.is_write_ahead else "on_failure",
            "workers": self.workers,
            "is_async": self.is_async,
            "policy": to_plain(self.policy),
            **({"earlier_names": list(self.earlier_names)} if self.earlier_names else {}),
        }


def receipt_of(returned: Any) -> Any:  # noqa: ANN401 - return type of the user's function
    """Return the return value of a sync handler as its receipt.

    A future is waited for, because an error inside it would lose the message. A coroutine is a programming error.
    """
    if isinstance(returned, Future):
        return returned.result()
    if type(returned) is CoroutineType:
        returned.close()
        raise TypeError("the handler returned a coroutine, so nothing was sent: declare it `async def`")
    return returned


def check_type_name(type_name: str) -> str:
    """Return ``type_name`` if it is a valid type name; raise ``ValueError`` otherwise."""
    try:
        return check_topic(type_name)
    except Refused as refused:
        raise ValueError(f"{type_name!r:.80} cannot name a type of messages: {refused}") from refused


def takes_attempt(function: HandlerFunction) -> bool:
    """Return True if ``function`` expects ``(payload, attempt)``, False for ``(payload)``; raise ``TypeError`` for
    neither.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    places = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    needed = [one for one in places if one.default is one.empty]
    is_open = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    unfilled = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) > 2 or unfilled or not (places or is_open):
        raise TypeError(f"a handler accepts (payload) or (payload, attempt), not {inspect.signature(function)}")
    return len(needed) == 2 or (len(places) >= 2 and places[1].name == "attempt")


def is_async(function: HandlerFunction) -> bool:
    """Return True if calling ``function`` returns a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - the kind of function matters, not callability
