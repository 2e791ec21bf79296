"""The load generator where there is no Go: same options, same JSON. It costs as much per call as a server does.

python -m bench.load_python send|receive|wake --address=HOST:PORT ...
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

import grpc
import uvloop

from bench.messages import BODY_BYTES, TOPIC
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp

_CLOCK = SystemClock()
# As in the Go program.
BOUNDS_MS = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0),
    *(75.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0),
)
_CLIENT_ID = f"bench@{os.getpid()}@{os.urandom(4).hex()}"


class Options(dict[str, str]):
    """Options as they were given; what is missing has the Go program's default."""

    def number(self, name: str, default: float) -> float:
        """Return a number."""
        return float(self.get(name, default))


class Sender:
    """Closed loop, or open loop at a rate."""

    def __init__(self, given: Options) -> None:
        self._given = given
        self._batch = int(given.number("batch", 1))
        self._left = int(given.number("count", 0)) or None
        self._rate = given.number("rate", 0)
        self._prefix, self._sent = f"01{os.urandom(8).hex().upper()}", 0
        self._begun_s = _CLOCK.monotonic_s()
        self._started_s = self._begun_s + given.number("warm-up", 0)
        self._ending_s = self._started_s + given.number("seconds", 5)
        self._latencies: list[float] = []
        self._codes: Counter[str] = Counter()
        self._calls = self._calls_all = self._wire_bytes = 0
        self._last_s = self._started_s

    async def run(self) -> dict[str, Any]:
        """Send, and return what was found."""
        async with grpc.aio.insecure_channel(self._given["address"]) as channel:
            call: Callable[..., Awaitable[bytes]] = channel.unary_unary(wire.METHODS["SendMessage"].path)
            await asyncio.gather(*(self._work(call) for _ in range(int(self._given.number("in-flight", 64)))))
        messages = self._codes.total()
        took_s = max(self._last_s - self._started_s, 1e-9)
        return {
            "messages": messages,
            "calls": self._calls,
            "calls_all": self._calls_all,
            "seconds": took_s,
            "messages_per_s": messages / took_s,
            "latency_ms": spread(self._latencies),
            "codes": dict(self._codes),
            "wire_bytes": self._wire_bytes,
            "offered": round(self._rate * (self._ending_s - self._begun_s) / self._batch),
            "cpu_s": time.process_time(),
        }

    def _next(self) -> int:
        if self._left is None:
            return 0 if self._is_over(_CLOCK.monotonic_s()) else self._batch
        count = min(self._batch, self._left)
        self._left -= count
        return count

    def _is_over(self, now_s: float) -> bool:
        """Whether the window is: not before something was answered, on a machine that stands still."""
        return now_s >= self._ending_s and self._calls > 0

    async def _work(self, call: Callable[..., Awaitable[bytes]]) -> None:
        while count := self._next():
            if self._rate:
                await asyncio.sleep(max(0.0, self._begun_s + self._sent / self._rate - _CLOCK.monotonic_s()))
            request = wire.SendMessageRequest(messages=[self.message() for _ in range(count)]).SerializeToString()
            at_s = _CLOCK.monotonic_s()
            code = await self.code(call, request)
            now_s = _CLOCK.monotonic_s()
            self._calls_all += 1
            if now_s < self._started_s or (self._left is None and self._is_over(now_s)):
                continue
            self._calls += 1
            self._codes[code] += count
            self._latencies.append((now_s - at_s) * 1000)
            self._last_s = now_s

    async def code(self, call: Callable[..., Awaitable[bytes]], request: bytes) -> str:
        """Send once and return the code of the answer."""
        try:
            answer = await call(request, metadata=headers(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return f"grpc {error.code().name}"
        if self._given.get("echo") == "true":
            return "20000"
        return str(int(wire.SendMessageResponse.FromString(answer).status.code))

    def message(self) -> wire.Message:
        """Return a new message as it is asked for."""
        now_ms, due_ms = _CLOCK.now_ms(), int(self._given.number("deliver-at", 0))
        longest_ms = int(self._given.number("delay-max", 0))
        if not due_ms and longest_ms:
            due_ms = now_ms + random.randint(int(self._given.number("delay-min", 0)), longest_ms)
            if self._given.get("whole-seconds") == "true":
                due_ms = -(-due_ms // 1000) * 1000
        message = wire.Message(
            topic=wire.Resource(name=self._given.get("topic", TOPIC)),
            body=os.urandom(int(self._given.number("body", BODY_BYTES))),
        )
        system = message.system_properties
        self._sent += 1
        system.message_id = f"{self._prefix}{self._sent:016X}"
        system.body_encoding = wire.IDENTITY
        system.message_type = wire.DELAY if due_ms else wire.NORMAL
        system.born_timestamp.seconds = now_ms // 1000
        system.born_host = "10.0.0.12"
        if due_ms:
            set_timestamp(system.delivery_timestamp, due_ms)
        self._wire_bytes = message.ByteSize()
        return message


class Receiver:
    """Long polls, each acknowledged as a whole."""

    def __init__(self, given: Options) -> None:
        self._given = given
        self._count = int(given.number("count", 0))
        self._topic = wire.Resource(name=given.get("topic", TOPIC))
        self._group = wire.Resource(name=given.get("group", "bench-group"))
        self.seen: dict[str, float] = {}  # when each came first, monotonic
        self._late: list[float] = []
        self._found: Counter[str] = Counter(received=0, duplicates=0, early=0, early_queued=0)
        self._codes: Counter[str] = Counter()
        self._last_s = _CLOCK.monotonic_s()
        self._last_ack_ms = 0

    async def run(self) -> dict[str, Any]:
        """Receive until all are there, or nothing comes any more, and return what was found."""
        begun_s = _CLOCK.monotonic_s()
        async with grpc.aio.insecure_channel(self._given["address"]) as channel:
            await asyncio.gather(*(self._loop(channel) for _ in range(int(self._given.number("parallel", 4)))))
        return {
            **self._found,
            "lateness_ms": spread(self._late),
            "histogram": histogram(self._late),
            "seconds": _CLOCK.monotonic_s() - begun_s,
            "last_ack_ms": self._last_ack_ms,
            "codes": dict(self._codes),
            "cpu_s": time.process_time(),
        }

    def _is_done(self) -> bool:
        is_idle = _CLOCK.monotonic_s() - self._last_s > self._given.number("idle", 10)
        return is_idle or 0 < self._count <= len(self.seen)

    async def _loop(self, channel: grpc.aio.Channel) -> None:
        poll: Callable[..., AsyncIterable[bytes]] = channel.unary_stream(wire.METHODS["ReceiveMessage"].path)
        ack: Callable[..., Awaitable[bytes]] = channel.unary_unary(wire.METHODS["AckMessage"].path)
        request = wire.ReceiveMessageRequest(
            group=self._group,
            message_queue=wire.MessageQueue(topic=self._topic, id=-1),
            filter_expression=wire.FilterExpression(type=wire.TAG, expression="*"),
            batch_size=32,
            invisible_duration=wire.Duration(seconds=30),
            long_polling_timeout=wire.Duration(seconds=1),
        ).SerializeToString()
        while not self._is_done():
            entries = []
            async for body in poll(request, metadata=headers(), timeout=6):
                frame = wire.ReceiveMessageResponse.FromString(body)
                if frame.HasField("status"):
                    self._codes[str(int(frame.status.code))] += 1
                elif frame.HasField("message"):
                    entries.append(self._note(frame.message.system_properties))
            if entries:
                acks = wire.AckMessageRequest(group=self._group, topic=self._topic, entries=entries)
                answer = await ack(acks.SerializeToString(), metadata=headers(), timeout=5)
                code = int(wire.AckMessageResponse.FromString(answer).status.code)
                self._codes[f"ack {code}"] += len(entries)
                self._last_ack_ms = _CLOCK.now_ms()

    def _note(self, system: wire.SystemProperties) -> wire.AckMessageEntry:
        now_ms, self._last_s = _CLOCK.now_ms(), _CLOCK.monotonic_s()
        if system.message_id in self.seen:
            self._found["duplicates"] += 1
        else:
            self.seen[system.message_id] = self._last_s
            self._found["received"] += 1
            if system.HasField("delivery_timestamp"):
                due_ms = _epoch_ms(system.delivery_timestamp)
                self._late.append(now_ms - due_ms)
                self._found["early"] += now_ms < due_ms
                self._found["early_queued"] += _epoch_ms(system.store_timestamp) < due_ms
        return wire.AckMessageEntry(message_id=system.message_id, receipt_handle=system.receipt_handle)


class Waker:
    """One message at a time to receives that wait: how long each takes to arrive."""

    _UNCOUNTED = 20

    def __init__(self, given: Options) -> None:
        self._given = Options({**given, "count": str(int(given.number("count", 500)) + self._UNCOUNTED)})
        self._sender, self._receiver = Sender(self._given), Receiver(self._given)

    async def run(self) -> dict[str, Any]:
        """Send and receive, and return what was found."""
        receiving = asyncio.create_task(self._receiver.run())
        sent: dict[str, tuple[float, float]] = {}
        async with grpc.aio.insecure_channel(self._given["address"]) as channel:
            call: Callable[..., Awaitable[bytes]] = channel.unary_unary(wire.METHODS["SendMessage"].path)
            for _ in range(int(self._given["count"])):
                await asyncio.sleep(random.random() * 2 * self._given.number("every", 10) / 1000)
                message = self._sender.message()
                at_s = _CLOCK.monotonic_s()
                await self._sender.code(call, wire.SendMessageRequest(messages=[message]).SerializeToString())
                sent[message.system_properties.message_id] = at_s, _CLOCK.monotonic_s()
        found, arrived = await receiving, self._receiver.seen
        counted = [(arrived[each], *times) for each, times in sent.items()][self._UNCOUNTED :]
        wakes = [(here_s - answered_s) * 1000 for here_s, _, answered_s in counted]
        return {
            "wake_ms": spread(wakes),
            "send_ms": spread([(answered_s - sent_s) * 1000 for _, sent_s, answered_s in counted]),
            "total_ms": spread([(here_s - sent_s) * 1000 for here_s, sent_s, _ in counted]),
            "histogram": histogram(wakes),
            "received": len(counted),
            "codes": {code: count for code, count in found["codes"].items() if code == "20000"},
        }


def headers() -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call, as the official Python client's."""
    return (
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "GRPC_V2"),
        ("x-mq-client-version", "5.1.2"),
        ("x-mq-date-time", "20260101T000000Z"),
        ("x-mq-request-id", os.urandom(16).hex()),
        ("x-mq-client-id", _CLIENT_ID),
        ("x-mq-namespace", ""),
        ("authorization", f"MQv2-HMAC-SHA1 Credential=key, SignedHeaders=x-mq-date-time, Signature={'0' * 40}"),
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return how values lie."""
    ordered = sorted(values)

    def at(q: float) -> float:
        return round(ordered[max(0, -int(-q * len(ordered) // 1) - 1)], 3) if ordered else 0.0

    return {"p50": at(0.5), "p99": at(0.99), "p999": at(0.999), "max": at(1)}


def histogram(values: Sequence[float]) -> list[tuple[float, int]]:
    """Return how many values lie in each bucket, by its upper bound; what is above the last one counts there."""
    counted = [0] * len(BOUNDS_MS)
    for value in values:
        counted[min(bisect_left(BOUNDS_MS, value), len(BOUNDS_MS) - 1)] += 1
    return list(zip(BOUNDS_MS, counted, strict=True))


def _epoch_ms(timestamp: wire.Timestamp) -> int:
    return timestamp.seconds * 1000 + timestamp.nanos // 1_000_000


async def _main(action: str, arguments: Sequence[str]) -> None:
    given = Options(each.removeprefix("--").partition("=")[::2] for each in arguments)
    runs: dict[str, Callable[[Options], Sender | Receiver | Waker]] = {
        "send": Sender,
        "receive": Receiver,
        "wake": Waker,
    }
    print(json.dumps(await runs[action](given).run()))


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2:]))
