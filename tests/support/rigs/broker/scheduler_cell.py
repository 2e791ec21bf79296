"""A store in memory with one topic and its scheduler, for tests of turns and of the thread."""

from __future__ import annotations

import threading
from contextlib import suppress

from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import Clock, ManualClock
from dmq.broker.handles.entry_handle import EntryHandles
from dmq.broker.sending.placement import Placement
from dmq.broker.topics.registry import Names, Topic
from dmq.broker.transactions.transaction_checks import CheckOptions, Checks
from dmq.errors import StoreError
from dmq.scheduler.scheduler import Scheduler
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import QueuedMessage, decode_queued
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Op

PATIENCE_S = 10.0
LAG_MS = 1_000  # beyond it, what is overdue is a backlog


class Cell:
    """A store in memory with one topic, and its scheduler."""

    def __init__(self, engine: MemoryEngine | None = None, clock: Clock | None = None, *, queues: int = 1) -> None:
        self.engine = engine or MemoryEngine()
        self.clock = clock or ManualClock()
        self.store = Store(self.engine, self.clock, StoreOptions())
        self.names = Names(self.store)
        self.topic = self.topic_of("orders", queues)
        self.placement = Placement(self.names)
        checks = Checks(self.names, CheckOptions(), EntryHandles(self.store.identity))
        self.failures: list[StoreError] = []
        self.failed = threading.Event()
        self.late_ms: list[int] = []
        self.scheduled = 0
        self.delivered = threading.Event()
        self.scheduler = Scheduler(self.store, self.placement, checks, on_failure=self._fail, observe=self._observe)

    def topic_of(self, name: str, queues: int = 1) -> Topic:
        """A topic, made unless it is there."""
        if name not in self.names.topics:
            topic, ops = self.names.plan_topic(name, queues, 0)
            self.store.commit(ops)
            self.names.add_topic(topic)
        return self.names.topics[name]

    def _fail(self, error: StoreError) -> None:
        self.failures.append(error)
        self.failed.set()

    def _observe(self, late_ms: object, topic_ids: object) -> None:
        assert isinstance(late_ms, list)
        self.late_ms += late_ms
        self.delivered.set()

    def schedule(self, *deliver_at_ms: int, payload: bytes = b"") -> None:
        """Accept one message for each time, named by it, in one batch."""
        ops: list[Op] = []
        for at_ms in deliver_at_ms:
            envelope = Envelope("orders", f"{at_ms}#{self.scheduled}", payload, deliver_at_ms=at_ms)
            ops.append(self.placement.accept(self.topic, envelope, 0))
            self.scheduled += 1
        self.store.commit(ops)

    def log(self) -> list[QueuedMessage]:
        """What is in the queue, in its order."""
        rows = self.store.scan(
            Family.QUEUE, pack_queue_key(self.topic.topic_id, 0, 0), b"\xff" * 14, limit=1_000_000
        ).rows
        return [decode_queued(value) for _, value in rows]

    def times(self) -> list[int]:
        """Delivery times in the order of the queue."""
        return [each.deliver_at_ms for each in self.log()]

    def drain(self) -> int:
        """Take turns until one hands nothing over; say how many did."""
        turns = 0
        while self.scheduler.turn().handed_over:
            turns += 1
        return turns

    def reopened(self, engine: MemoryEngine) -> Cell:
        """The next run on what is left."""
        return Cell(engine, self.clock)

    def close(self) -> None:
        """End; a store that failed, or whose engine crashed, stays so."""
        self.scheduler.close()
        with suppress(StoreError):
            self.store.close()
