"""A client of queues that is measured: reads orders as lines of JSON and answers each with one.

python -m bench.queue_client HOST:PORT     of the name server; ``queue_clients`` gives the orders

``QueueClient.java`` is the same with Apache's own client. A consumer says that it is ready before it answers, and so
do sends at a steady rate, which only this one has.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bench.cell import quantiles
from broker_adapter import Client, ConsumerOptions, Message, ProducerOptions, ReceivedMessage, Start, connect
from broker_adapter.contracts.errors import BrokerError
from broker_adapter.queue_client.consumer import Consumer
from broker_adapter.runtime.clock import SystemClock

SLOW_MS = 100.0
_ACQUAINTED = 32  # sends before a steady rate begins: every queue's broker is connected to
_CLOCK = SystemClock()

_Order = Mapping[str, Any]


def _tell(what: Mapping[str, object]) -> None:
    print(json.dumps(what), flush=True)


def _spread(values_ms: Sequence[float], **more: float) -> dict[str, float]:
    found = quantiles(values_ms)
    return {"p50_ms": found["p50"], "p99_ms": found["p99"], **more}


async def _send(client: Client, order: _Order) -> dict[str, float]:
    """So many sends at once, each followed by the next."""
    producer = await client.producer("bench-senders")
    body = os.urandom(order["body_bytes"])
    begin_s = _CLOCK.monotonic_s() + order["warm_up_s"]
    end_s = begin_s + order["seconds"]
    took_ms: list[float] = []

    async def work() -> None:
        while (at_s := _CLOCK.monotonic_s()) < end_s:
            await producer.send(Message(order["topic"], body))
            if at_s >= begin_s:
                took_ms.append((_CLOCK.monotonic_s() - at_s) * 1000)

    await asyncio.gather(*(work() for _ in range(order["in_flight"])))
    return _spread(took_ms, per_s=len(took_ms) / order["seconds"])


async def _consume(client: Client, order: _Order) -> dict[str, float]:
    """What lies in a topic, or comes into it: how many a second, and how long each took from the store to here."""
    late_ms: list[float] = []
    came_s: list[float] = []
    done = asyncio.Event()

    async def handle(batch: Sequence[ReceivedMessage]) -> None:
        late_ms.extend(_CLOCK.now_ms() - each.stored_at_ms for each in batch)
        came_s.append(_CLOCK.monotonic_s())
        if len(late_ms) == order["count"]:
            done.set()

    options = ConsumerOptions(start=Start.FIRST_OFFSET)
    consumer = client.consumer(order["group"], {order["topic"]: "*"}, options)(handle)
    assert isinstance(consumer, Consumer)
    while sum(queue.topic == order["topic"] for queue in consumer.queues) < order["queues"]:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    _tell({"ready": True})
    await done.wait()
    return _spread(late_ms, per_s=(order["count"] - 1) / (came_s[-1] - came_s[0]))


async def _steady(client: Client, order: _Order) -> dict[str, float]:
    """Sends at a steady rate, whether or not those before have ended; one that fails took as long as it took."""
    options = ProducerOptions(fault_avoidance=order["avoid"], attempt_timeout_ms=order["attempt_ms"])
    producer = await client.producer("bench-senders", options=options)
    body = os.urandom(order["body_bytes"])
    took_ms: list[float] = []
    failed = 0

    async def send(at_s: float) -> None:
        nonlocal failed
        try:
            await producer.send(Message(order["topic"], body))
        except BrokerError:
            failed += 1
        took_ms.append((_CLOCK.monotonic_s() - at_s) * 1000)

    for _ in range(_ACQUAINTED):
        await producer.send(Message(order["topic"], body))
    _tell({"ready": True})
    begun_s, count = _CLOCK.monotonic_s(), int(order["rate"] * order["seconds"])
    async with asyncio.TaskGroup() as sends:
        for number in range(count):
            at_s = begun_s + number / order["rate"]
            await asyncio.sleep(at_s - _CLOCK.monotonic_s())
            sends.create_task(send(at_s))
    slow = sum(each > SLOW_MS for each in took_ms)
    return _spread(took_ms, slow_share=slow / count, failed_share=failed / count)


_ACTIONS: Mapping[str, Callable[[Client, _Order], Awaitable[dict[str, float]]]] = {
    "send": _send,
    "consume": _consume,
    "steady": _steady,
}


async def _do(names: str, order: _Order) -> None:
    async with await connect(f"rocketmq-remoting://{names}") as client:
        _tell(await _ACTIONS[order["do"]](client, order))


def main() -> None:
    """Do what stdin says until it ends."""
    for line in sys.stdin:
        asyncio.run(_do(sys.argv[1], json.loads(line)))


if __name__ == "__main__":
    main()
