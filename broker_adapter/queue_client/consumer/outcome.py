"""What a handler may answer: nothing, if all is consumed; otherwise what did not work, and when to try again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from broker_adapter.contracts.classic import ReceivedMessage


class Later(NamedTuple):
    """The messages of the batch from number ``first`` on failed; those before are consumed.

    They come again from the group's retry topic. ``delay_level`` 0: the broker chooses, longer from failure to failure;
    -1: they are dead at once. In order, they are tried again where they lie, and nothing passes them.
    """

    first: int = 0
    delay_level: int = 0
    error: BaseException | str = ""  # why; reported to a broker that keeps failure reasons


class Suspend(NamedTuple):
    """Of ordered consumption: try the same batch again after ``ms``, and count no failure."""

    ms: int = 1_000  # RocketMQ 5.5 default (suspendCurrentQueueTimeMillis); 10 to 30,000


Outcome: TypeAlias = Later | Suspend | None

# Gets a batch of one topic. What it raises is logged, and means ``Later()``. A plain function runs in a thread.
Handler: TypeAlias = (
    Callable[[Sequence[ReceivedMessage]], Awaitable[Outcome]] | Callable[[Sequence[ReceivedMessage]], Outcome]
)
