"""A consumer stops believing in a lock before the broker gives the queue to somebody else."""

from __future__ import annotations

from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.queue_locks import BELIEVED_MS, BROKER_LEASE_MS, RENEW_MS, QueueLocks

A, B = (MessageQueue("orders", "a", number) for number in range(2))


def test_a_lock_is_believed_for_30_s_from_the_question_on() -> None:
    """Source: RebalanceLockManager and ProcessQueue of RocketMQ 5.5.0; renewed in time, ended long before the lease."""
    assert (BROKER_LEASE_MS, BELIEVED_MS, RENEW_MS) == (60_000, 30_000, 20_000)
    locks = QueueLocks()
    assert not locks.may_consume(A, 0)
    locks.answered(locks.ask([A, B], 0), [A])
    assert locks.may_consume(A, 30_000)
    assert not locks.may_consume(A, 30_001)
    assert not locks.may_consume(B, 0)


def test_an_answer_renews_or_takes_a_lock() -> None:
    """What was not asked for stays; an answer that comes late takes no time away."""
    locks = QueueLocks()
    locks.answered(locks.ask([A, B], 0), [A, B])
    late = locks.ask([A], 10_000)
    locks.answered(locks.ask([A], 20_000), [A])
    locks.answered(late, [A])
    assert locks.may_consume(A, 50_000)
    assert not locks.may_consume(B, 50_000)
    locks.answered(locks.ask([A], 30_000), [])
    assert not locks.may_consume(A, 30_000)


def test_a_forged_handle_is_refused() -> None:
    """Nor is an answer to a question from before that; the next one is."""
    locks = QueueLocks()
    late = locks.ask([A, B], 0)
    locks.answered(late, [A, B])
    locks.forget(A)
    assert not locks.may_consume(A, 0)
    locks.answered(late, [A, B])
    assert not locks.may_consume(A, 0)
    assert locks.may_consume(B, 0)
    locks.answered(locks.ask([A], 0), [A])
    assert locks.may_consume(A, 0)
