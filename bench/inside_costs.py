"""What each step of a durable send costs, in a process that does the steps one after the other, as the daemon does.

Each step is done for a whole batch before the next one begins, so that reading the clock costs nothing. What only the
daemon has (the wire, tasks, threads that wake each other) is not in it; ``bench.costs`` measures that from outside.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from bench.cell import broker_in, calm_collector, say
from bench.messages import BODY_BYTES, HOUR_MS, TOPIC, envelope_of, sent_message
from broker_adapter.contracts.message import Envelope, SendReceipt, pack_id
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import to_envelope
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.handles.entry_handle import EntryHandle, EntryHandles, HandleKind
from dmq.rocketmq_server.codec import validate
from dmq.rocketmq_server.codec.delay import DELAY_LEVELS_MS_DEFAULT, deliver_at_ms, timestamp_ms
from dmq.rocketmq_server.codec.mapping import send_response
from dmq.store.engines.engine import Engine
from dmq.store.engines.rocks import RocksEngine
from dmq.store.files.identity import draw
from dmq.store.files.steady_clock import ClockOptions, SteadyClock
from dmq.store.schema.accounting.outbox import OutboxState
from dmq.store.schema.cell.identity import StorePlace
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.assemble import Assembler, RecoveredFigures
from dmq.store.writer.marks import Marks
from dmq.store.writer.operations import Append, Schedule
from dmq.trail.events import gap_event

# In the order of the path. ``sync`` is the time one waits for the disk, the others are CPU time.
STEPS = ("parse", "validate", "envelope", "place", "assemble", "write", "sync", "reply")
_Value = TypeVar("_Value")
_SENDS_WARM = 4  # batches before the clock counts
_US_PER_NS = 1e-3


def assembler_of(engine: Engine, clock: SystemClock) -> tuple[Assembler, Marks]:
    """Return what makes batches, on an engine that is empty."""
    marks = Marks(0)
    recovered = RecoveredFigures(1, 0, 0, 2, 0, OutboxState(1, 1, 0))
    believed = SteadyClock(clock, ClockOptions(), None, is_new=True)
    made = Assembler(
        engine, marks, believed, recovered, idempotency_window_ms=900_000, outbox_bytes_max=2**30, gap_event=gap_event
    )
    return made, marks


async def costs(data: Path, count: int, *, in_flight: int) -> None:
    """Tell the price of each step per message, ``in_flight`` of them to a batch, and of the whole in a broker."""
    async with broker_in(data / "model") as broker:
        await broker.route(TOPIC)
        engine = RocksEngine(data / "rows")
        try:
            found = _Path(broker, engine).run(count, in_flight)
        finally:
            engine.close()
        found["broker"] = await _whole(broker, count, in_flight)
    say(**found)


class _Path:
    """The steps, batch by batch, each as the daemon does it."""

    def __init__(self, broker: EmbeddedBroker, engine: RocksEngine) -> None:
        self._clock = SystemClock()
        self._topic = broker.names.topics[TOPIC]
        self._placement = broker.placement
        self._engine = engine
        self._assembler, self._marks = assembler_of(engine, self._clock)
        self._took: dict[str, list[float]] = {step: [] for step in STEPS}

    def run(self, count: int, in_flight: int) -> dict[str, float]:
        """Send ``count`` messages; return the median of each step in us per message."""
        calm_collector()
        for bodies in _requests(count + _SENDS_WARM * in_flight, in_flight, self._clock.now_ms()):
            self._batch(bodies)
        return {step: median(took[_SENDS_WARM:]) for step, took in self._took.items()}

    def _batch(self, bodies: Sequence[bytes]) -> None:
        now_ms, size = self._clock.now_ms(), len(bodies)
        requests = self._timed("parse", size, lambda: [wire.SendMessageRequest.FromString(body) for body in bodies])
        messages = self._timed("validate", size, lambda: [_validated(request, now_ms) for request in requests])
        envelopes = self._timed(
            "envelope", size, lambda: [to_envelope(message, deliver_at_ms=due_ms) for message, due_ms in messages]
        )
        accept, topic = self._placement.accept, self._topic
        ops = self._timed("place", size, lambda: [[accept(topic, envelope, now_ms)] for envelope in envelopes])
        receipts = self._commit(ops)
        answers = zip(envelopes, receipts, strict=True)
        self._timed("reply", size, lambda: [_answer(envelope, stored) for envelope, stored in answers])

    def _commit(self, ops: Sequence[Sequence[Schedule | Append]]) -> list[Receipt]:
        size = len(ops)
        batch, receipts, _ = self._timed("assemble", size, lambda: self._assembler.assemble(ops))
        self._timed("write", size, lambda: self._engine.write(batch))
        self._timed("sync", size, self._engine.sync, clock=time.perf_counter_ns)
        self._assembler.outbox.synced()
        self._marks.release()
        return [receipt for told in receipts if isinstance(told, list) for receipt in told]

    def _timed(
        self, step: str, size: int, do: Callable[[], _Value], clock: Callable[[], int] = time.thread_time_ns
    ) -> _Value:
        started_ns = clock()
        done = do()
        self._took[step].append((clock() - started_ns) / size * _US_PER_NS)
        return done


def _requests(count: int, in_flight: int, now_ms: int) -> Iterator[list[bytes]]:
    """Yield batches of requests as they come off the wire, due about a day ahead."""
    prefix = os.urandom(8).hex().upper()
    first_s = (now_ms + 12 * HOUR_MS) // 1000
    for first in range(0, count, in_flight):
        yield [
            wire.SendMessageRequest(
                messages=[
                    sent_message(f"01{prefix}{number:016X}", os.urandom(BODY_BYTES), now_ms, first_s + number % 60)
                ]
            ).SerializeToString()
            for number in range(first, first + in_flight)
        ]


def _validated(request: wire.SendMessageRequest, now_ms: int) -> tuple[wire.Message, int | None]:
    validate.check_send(request.messages)
    (message,) = request.messages
    validate.check_message(message)
    timestamp = message.system_properties.delivery_timestamp
    due_ms = deliver_at_ms(
        timestamp_ms(timestamp.seconds, timestamp.nanos),
        message.user_properties,
        now_ms=now_ms,
        levels_ms=DELAY_LEVELS_MS_DEFAULT,
        delay_max_ms=None,
    )
    return message, due_ms


_HANDLES = EntryHandles(draw(StorePlace()))


def _answer(envelope: Envelope, stored: Receipt) -> bytes:
    handle = _HANDLES.encode(
        HandleKind.RECALL, EntryHandle(stored.sequence, envelope.topic, pack_id(envelope.message_id))
    )
    receipt = SendReceipt(envelope.message_id, stored.queue_id, stored.queue_offset, stored.repeated, handle)
    return send_response([receipt]).SerializeToString()


async def _whole(broker: EmbeddedBroker, count: int, in_flight: int) -> float:
    """Return the CPU time per message of sends through the broker, one message each, ``in_flight`` at a time."""
    now_ms, prefix = broker.store.clock.now_ms(), os.urandom(8).hex().upper()
    due_s = (now_ms + 12 * HOUR_MS) // 1000
    envelopes = iter([envelope_of(f"01{prefix}{number:016X}", now_ms, due_s) for number in range(count)])

    async def work() -> None:
        for envelope in envelopes:
            await broker.send([envelope])

    cpu_s = time.process_time()
    async with asyncio.TaskGroup() as working:
        for _ in range(in_flight):
            working.create_task(work())
    return (time.process_time() - cpu_s) / count * 1e6
