"""Message filters of receives: by tag, or by an SQL92 expression over message properties.

Each receive has its own filter. A rejected message is finished for the group, so each message is evaluated once, by the
first receive of the group that reads it. Consumers of one group with different filters lose messages to each other, as
in RocketMQ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.runtime.slices import SLICE_S, Slices
from dmq.store.schema.messages.record import QueuedMessage

if TYPE_CHECKING:
    from dmq.broker.filters.sql import SqlFilter

TAGS, KEYS = "TAGS", "KEYS"  # RocketMQ's names, reserved for these properties

Passes = Callable[[QueuedMessage], bool]


class Filters:
    """Evaluation of filters in time slices, so that an expensive expression does not delay other clients. Event loop
    only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices = Slices(clock)

    async def of(self, wanted: Subscription) -> Passes | None:
        """As ``filter_of``, with the compilation of SQL in a time slice."""
        return await self._slices.do(partial(filter_of, wanted)) if wanted.sql else filter_of(wanted)

    async def verdicts(self, passes: Passes, messages: Sequence[QueuedMessage]) -> list[bool]:
        """Return whether each of the first messages passes: at least one, and as many as fit into a time slice."""
        return await self._slices.do(partial(self._judge, passes, messages))

    def _judge(self, passes: Passes, messages: Sequence[QueuedMessage]) -> list[bool]:
        until_s = self._clock.monotonic_s() + SLICE_S
        found: list[bool] = []
        for message in messages:
            found.append(passes(message))
            if self._clock.monotonic_s() > until_s:
                break
        return found


def filter_of(wanted: Subscription) -> Passes | None:
    """Return the filter function, or None if all messages pass; raise ``Refused(FILTER)`` for an invalid expression."""
    tags = wanted.tags
    if not wanted.sql:
        return (lambda message: message.tag in tags) if tags else None
    expression = compile_sql(wanted.sql)

    def passes(message: QueuedMessage) -> bool:
        if tags and message.tag not in tags:
            return False
        try:
            properties = properties_of(message)
        except DecodeError:
            return True  # damaged: deliver it, so that its failure leads to a visible dead letter
        return expression.passes(properties)

    return passes


def compile_sql(text: str) -> SqlFilter:
    """As ``sql.compile_sql``, which is loaded at its first use: its parser loads slowly, and is rarely needed."""
    from dmq.broker.filters import sql

    return sql.compile_sql(text)


def properties_of(message: QueuedMessage) -> dict[str, str]:
    """Return the properties that expressions can name; raise ``DecodeError`` for an invalid payload."""
    sent = wire.Message.FromString(message.payload)
    properties = dict(sent.user_properties)
    if message.tag:
        properties[TAGS] = message.tag
    keys = sent.system_properties.keys
    if keys:
        properties[KEYS] = " ".join(keys)
    return properties
