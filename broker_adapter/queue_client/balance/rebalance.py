"""Queues that a consumer releases and acquires when its share of a topic changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from broker_adapter.contracts.message_queue import MessageQueue

IDLE_MS_MAX = 120_000  # RocketMQ 5.5 default (rocketmq.client.pull.pullMaxIdleTime)


class QueueChanges(NamedTuple):
    """Difference between the current and the required queues of a consumer; each part sorted.

    The consumer first releases ``dropped``, then starts ``added`` at the broker's committed offset. A queue without a
    recent pull is in both.
    """

    dropped: tuple[MessageQueue, ...]
    added: tuple[MessageQueue, ...]
    kept: tuple[MessageQueue, ...]


def changes(
    held: Mapping[MessageQueue, int], share: Collection[MessageQueue], now_ms: int, *, idle_ms_max: int = IDLE_MS_MAX
) -> QueueChanges:
    """Return the difference between the held queues of a topic, with their last pull times, and the current share.

    A pull postponed by flow control counts. A queue without a pull for more than ``idle_ms_max`` has a broken pull
    loop: it is dropped and added again.
    """
    due = set(share)
    kept = {queue for queue, pulled_at_ms in held.items() if queue in due and now_ms - pulled_at_ms <= idle_ms_max}
    return QueueChanges(tuple(sorted(held.keys() - kept)), tuple(sorted(due - kept)), tuple(sorted(kept)))
