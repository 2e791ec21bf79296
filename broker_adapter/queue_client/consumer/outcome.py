"""Results of a handler: None if all messages are consumed; otherwise the failed messages and the time of a retry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from broker_adapter.contracts.classic import ReceivedMessage


class Later(NamedTuple):
    """Result for failed messages: number ``first`` of the batch and all after it; those before are consumed.

    Retries come through the group's retry topic. ``delay_level`` 0: the broker chooses, increasing with each failure;
    -1: dead letter at once. In order, failed messages are retried in place and block their successors.
    """

    first: int = 0
    delay_level: int = 0
    error: BaseException | str = ""  # reason, reported to a broker that stores failure reasons


class Suspend(NamedTuple):
    """Result for ordered consumption: retry the same batch after ``ms`` without counting a failure."""

    ms: int = 1_000  # RocketMQ 5.5 default (suspendCurrentQueueTimeMillis); 10 to 30,000


Outcome: TypeAlias = Later | Suspend | None

# Receives a batch of one topic. An exception is logged and counts as ``Later()``. A plain function runs in a thread.
Handler: TypeAlias = (
    Callable[[Sequence[ReceivedMessage]], Awaitable[Outcome]] | Callable[[Sequence[ReceivedMessage]], Outcome]
)
