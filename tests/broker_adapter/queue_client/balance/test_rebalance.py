"""From what a consumer holds to what it should hold."""

from __future__ import annotations

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.rebalance import QueueChanges, changes

A, B, C = (MessageQueue("orders", "a", number) for number in range(3))
NOW = 1_000_000


def test_foreign_queues_go_new_ones_come_and_the_rest_stay() -> None:
    """The three cases."""
    assert changes({A: NOW, B: NOW}, [C, B], NOW) == QueueChanges(dropped=(A,), added=(C,), kept=(B,))
    assert changes({}, [B, A], NOW) == QueueChanges(dropped=(), added=(A, B), kept=())
    assert changes({B: NOW, A: NOW}, [], NOW) == QueueChanges(dropped=(A, B), added=(), kept=())


def test_a_queue_without_a_pull_for_long_is_restarted() -> None:
    """Longer than 120 s: the default of RocketMQ 5.5 (rocketmq.client.pull.pullMaxIdleTime)."""
    held = {A: NOW - 120_000, B: NOW - 120_001, C: NOW - 120_001}
    assert changes(held, [A, B], NOW) == QueueChanges(dropped=(B, C), added=(B,), kept=(A,))
