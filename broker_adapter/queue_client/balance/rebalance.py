"""What a consumer drops and takes up when its share of a topic's queues changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from broker_adapter.contracts.message_queue import MessageQueue

IDLE_MS_MAX = 120_000  # RocketMQ 5.5 default (rocketmq.client.pull.pullMaxIdleTime)


class Changes(NamedTuple):
    """From what a consumer holds to what it should hold; each sorted.

    First everything ``dropped`` is given up, then ``added`` is begun anew from the offset that the broker has: a queue
    that was not pulled from for long is in both.
    """

    dropped: tuple[MessageQueue, ...]
    added: tuple[MessageQueue, ...]
    kept: tuple[MessageQueue, ...]


def changes(
    held: Mapping[MessageQueue, int], share: Collection[MessageQueue], now_ms: int, *, idle_ms_max: int = IDLE_MS_MAX
) -> Changes:
    """Compare the queues of a topic that a consumer holds, each with the time of its last pull, with its share now.

    A pull that flow control put off counts as one. A queue without any for longer than ``idle_ms_max`` has a broken
    loop of pulls: it is dropped, and added anew.
    """
    due = set(share)
    kept = {queue for queue, pulled_at_ms in held.items() if queue in due and now_ms - pulled_at_ms <= idle_ms_max}
    return Changes(tuple(sorted(held.keys() - kept)), tuple(sorted(due - kept)), tuple(sorted(kept)))
