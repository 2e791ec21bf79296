"""Choice of the queue for a message, as in RocketMQ's producers.

Without a key the choice is round-robin over all queues. A repeated send avoids the broker that failed before. Fault
avoidance also skips paused brokers, as long as there are others. With a key all messages of that key go to one queue,
and such a send is never repeated at another queue.

All functions accept the writable queues of one topic, at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import java_hash_code
from broker_adapter.queue_client.balance.faults import FaultTable, RoundRobin


def in_turn(queues: Sequence[MessageQueue], turn: RoundRobin, *, last_broker: str = "") -> MessageQueue:
    """Return the next queue that is not at ``last_broker``, or the next one if all are."""
    return _first(queues, turn, lambda broker: broker != last_broker) or queues[turn.next() % len(queues)]


def avoiding_faults(
    queues: Sequence[MessageQueue], faults: FaultTable, turn: RoundRobin, now_ms: int, *, last_broker: str = ""
) -> MessageQueue:
    """Choose a queue as RocketMQ 5.5 with fault avoidance.

    The next queue not at ``last_broker`` with an available broker; else one with a reachable broker; else any. A
    producer calls ``turn.restart`` before it repeats a send.
    """
    return (
        _first(queues, turn, lambda broker: broker != last_broker and faults.is_available(broker, now_ms))
        or _first(queues, turn, lambda broker: broker != last_broker and faults.is_reachable(broker))
        or queues[turn.next() % len(queues)]
    )


def avoiding_faults_4(
    queues: Sequence[MessageQueue], faults: FaultTable, turn: RoundRobin, now_ms: int, *, last_broker: str = ""
) -> MessageQueue:
    """Choose a queue as RocketMQ 4.x with fault avoidance, for compatibility.

    A queue with an available broker, for a repeated send at the *same* broker; else one of the better brokers; else
    any. A broker without a writable queue is removed from the table.
    """
    start = turn.next()
    for step in range(len(queues)):
        queue = queues[(start + step) % len(queues)]
        if last_broker in {"", queue.broker} and faults.is_available(queue.broker, now_ms):
            return queue
    broker = faults.pick_one_at_least(now_ms)
    if broker is not None:
        there = [queue for queue in queues if queue.broker == broker]
        if there:
            return there[turn.next() % len(there)]
        faults.remove(broker)
    return queues[turn.next() % len(queues)]


def by_hash(queues: Sequence[MessageQueue], key: str) -> MessageQueue:
    """Choose a queue by a key, as RocketMQ's ``SelectMessageQueueByHash`` does for a ``String``."""
    return queues[abs(java_hash_code(key)) % len(queues)]


def at_random(queues: Sequence[MessageQueue], random: Random) -> MessageQueue:
    """Choose a random queue, as RocketMQ's ``SelectMessageQueueByRandom`` does."""
    return queues[random.randrange(len(queues))]


def _first(queues: Sequence[MessageQueue], turn: RoundRobin, fits: Callable[[str], bool]) -> MessageQueue | None:
    for _ in queues:
        queue = queues[turn.next() % len(queues)]
        if fits(queue.broker):
            return queue
    return None
