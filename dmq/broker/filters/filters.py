"""Which messages a receive wants: by their tag, or by an SQL92 expression over their properties.

A receive brings its filter along. What it does not let through is finished for the group, so each message is looked at
once: by whichever receive of the group comes by it first. Consumers of one group with different filters take messages
from each other, as they do in RocketMQ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import Subscription as Wanted
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.runtime.slices import SLICE_S, Slices
from dmq.store.schema.record import QueuedMessage

TAGS, KEYS = "TAGS", "KEYS"  # RocketMQ's names, which users cannot give to properties of their own

Passes = Callable[[QueuedMessage], bool]


class Filters:
    """Filters at work, a slice at a time: what a client's expression takes is taken from nobody else. For the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices = Slices(clock)

    async def of(self, wanted: Wanted) -> Passes | None:
        """As ``filter_of``."""
        return await self._slices.do(partial(filter_of, wanted)) if wanted.sql else filter_of(wanted)

    async def verdicts(self, passes: Passes, messages: Sequence[QueuedMessage]) -> list[bool]:
        """Return which of the first messages pass: at least of one, and of as many as there is time for."""
        return await self._slices.do(partial(self._judge, passes, messages))

    def _judge(self, passes: Passes, messages: Sequence[QueuedMessage]) -> list[bool]:
        until_s = self._clock.monotonic_s() + SLICE_S
        found: list[bool] = []
        for message in messages:
            found.append(passes(message))
            if self._clock.monotonic_s() > until_s:
                break
        return found


def filter_of(wanted: Wanted) -> Passes | None:
    """Return what decides, ``None`` if everything is wanted; ``Refused(FILTER)`` for an expression that is wrong."""
    tags = wanted.tags
    if not wanted.sql:
        return (lambda message: message.tag in tags) if tags else None
    from dmq.broker.filters.sql import compile_sql  # its parser takes long to load, and few need it

    expression = compile_sql(wanted.sql)

    def passes(message: QueuedMessage) -> bool:
        if tags and message.tag not in tags:
            return False
        try:
            properties = properties_of(message)
        except DecodeError:
            return True  # damaged: it goes the way of all that nobody can read, which ends where somebody sees it
        return expression.passes(properties)

    return passes


def properties_of(message: QueuedMessage) -> dict[str, str]:
    """Return what expressions can name. ``DecodeError`` for a payload that is no message."""
    sent = wire.Message.FromString(message.payload)
    properties = dict(sent.user_properties)
    if message.tag:
        properties[TAGS] = message.tag
    keys = sent.system_properties.keys
    if keys:
        properties[KEYS] = " ".join(keys)
    return properties
