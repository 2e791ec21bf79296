"""The producer hook on a manual clock, with a sink in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

from broker_adapter.runtime.clock import ManualClock
from retry import SPOOL_STEPS_MS, Outcome, Redelivery, RetryPolicy, Table
from retry.sink import Entry
from retry.testing import FakeProducer, MemorySink

# The table without jitter.
EXACT = RetryPolicy(backoff=Table(SPOOL_STEPS_MS), max_attempts=len(SPOOL_STEPS_MS) + 1)
AWAY = ConnectionError("away")


class Rig:
    """A hook without threads on a manual clock, with one handler for the type ``t``."""

    def __init__(self, script: list[Any] | None = None, **options: Any) -> None:  # noqa: ANN401 - those of Redelivery
        self.clock = ManualClock()
        self.sink = options.pop("sink", None) or MemorySink(self.clock, can_hold=options.pop("can_hold", True))
        self.producer = FakeProducer(script or [])
        self.hook = Redelivery(self.sink, **{"policy": EXACT, "autostart": False, "rng": Random(1), **options})
        self.hook.add_handler("t", self.producer.send)

    def send(self, payload: bytes | bytearray = b"p", **more: Any) -> Outcome:  # noqa: ANN401 - those of send
        return self.hook.send("t", payload, **more)


def make(handler: Callable[..., Any], **options: Any) -> tuple[Redelivery, MemorySink, ManualClock]:  # noqa: ANN401
    """A hook on a manual clock with one handler for the type ``t``; without threads unless told."""
    clock = ManualClock()
    sink = MemorySink(clock)
    settings: dict[str, Any] = {"policy": EXACT, "autostart": False, "rng": Random(1), **options}
    hook = Redelivery(sink, **settings)
    hook.add_handler("t", handler)
    return hook, sink, clock


def fill(sink: MemorySink, count: int, *, key: str = "", type_name: str = "t") -> list[bytes]:
    """Put entries that are due now into the sink; return their uids."""
    now_ms = sink.clock.now_ms()
    uids = [number.to_bytes(16, "big") for number in range(1, count + 1)]
    for uid in uids:
        sink.put(
            Entry(type_name=type_name, uid=uid, payload=uid[-1:], key=key, created_at_ms=now_ms, due_at_ms=now_ms)
        ).result()
    return uids


def until(holds: Callable[[], bool]) -> None:
    """Wait until something another thread does is done."""
    for _ in range(2_000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never happened")
