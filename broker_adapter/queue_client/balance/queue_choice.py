"""Which queue of a topic a message goes to, as RocketMQ's producers choose it.

In turn over all queues; a repeated send avoids the broker that failed before; with fault avoidance, brokers that are to
be left alone are passed over as well, as long as there are others. Or by the message: whoever gives a key has all
messages of that key in one queue, and such a send is never repeated elsewhere.

All functions take the queues of one topic that can be written, at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import java_hash_code
from broker_adapter.queue_client.balance.faults import FaultTable, RoundRobin


def in_turn(queues: Sequence[MessageQueue], turn: RoundRobin, *, last_broker: str = "") -> MessageQueue:
    """Choose the next queue that is not at ``last_broker``; the next one, if all are."""
    return _first(queues, turn, lambda broker: broker != last_broker) or queues[turn.next() % len(queues)]


def avoiding_faults(
    queues: Sequence[MessageQueue], faults: FaultTable, turn: RoundRobin, now_ms: int, *, last_broker: str = ""
) -> MessageQueue:
    """Choose as RocketMQ 5.5 does with fault avoidance.

    The next queue that is not at ``last_broker`` and whose broker is available; else one whose broker is reachable;
    else any. A producer that repeats a send has ``turn`` restart before.
    """
    return (
        _first(queues, turn, lambda broker: broker != last_broker and faults.is_available(broker, now_ms))
        or _first(queues, turn, lambda broker: broker != last_broker and faults.is_reachable(broker))
        or queues[turn.next() % len(queues)]
    )


def avoiding_faults_4(
    queues: Sequence[MessageQueue], faults: FaultTable, turn: RoundRobin, now_ms: int, *, last_broker: str = ""
) -> MessageQueue:
    """Choose as RocketMQ 4.x does with fault avoidance, for who is used to it.

    A queue whose broker is available, and for a repeated send is the *same* one again; else one of a broker that is
    not too bad; else any. A broker without a queue that can be written is forgotten.
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
    """Choose by a key, as RocketMQ's ``SelectMessageQueueByHash`` does for a ``String``."""
    return queues[abs(java_hash_code(key)) % len(queues)]


def at_random(queues: Sequence[MessageQueue], random: Random) -> MessageQueue:
    """Choose any, as RocketMQ's ``SelectMessageQueueByRandom`` does."""
    return queues[random.randrange(len(queues))]


def _first(queues: Sequence[MessageQueue], turn: RoundRobin, fits: Callable[[str], bool]) -> MessageQueue | None:
    for _ in queues:
        queue = queues[turn.next() % len(queues)]
        if fits(queue.broker):
            return queue
    return None
