"""Flow control of one topic's sends to the cluster: circuit breaker, ramp, and a queue of waiting sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from broker_adapter.runtime.clock import Clock
from retry import BreakerState
from retry.hook import Breaker, Ramp


class ForwardGate:
    """The gate of one topic's sends. The event loop owns it."""

    def __init__(self, clock: Clock) -> None:
        self.error = ""  # the last error, if there was no success after it
        self._clock = clock
        self._breaker = Breaker()
        self._ramp = Ramp()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True if the cluster accepts messages of the topic, as far as is known."""
        return self._breaker.state is BreakerState.CLOSED

    async def enter(self, messages: int) -> bool:
        """Wait until ``messages`` may be sent; return True for a probe. Call ``succeeded``, ``failed`` or ``void``
        after it.
        """
        if self.is_open and self._ramp.rate_per_s is None and not self._turn.locked():
            return False
        async with self._turn:
            while True:
                now_s = self._clock.monotonic_s()
                if self.is_open:
                    if not (wait_s := self._ramp.wait_s(now_s)):
                        for _ in range(messages):
                            self._ramp.spend(now_s)
                        return False
                elif self._breaker.begin_probe(now_s):
                    return True
                else:
                    wait_s = max(0.0, self._breaker.next_probe_s - now_s)
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), wait_s)

    def succeeded(self) -> bool:
        """Record an acceptance, or a definite refusal; return True if the previous result was a failure."""
        if self._breaker.on_success():
            self._ramp.start(self._clock.monotonic_s())
            self._changed.set()
        self._ramp.on_success(self._clock.monotonic_s())
        was_error, self.error = self.error, ""
        return bool(was_error)

    def failed(self, message_ids: Iterable[str], why: str, *, is_probe: bool = False) -> bool:
        """Record that the cluster did not accept messages; return True if there was no earlier failure."""
        now_s = self._clock.monotonic_s()
        was_error, self.error = self.error, why
        self._ramp.on_failure(now_s)
        if is_probe:
            self._breaker.on_probe_failed(now_s)
            self._changed.set()  # waiters computed their delay with the time limit of this probe
        else:
            for each in message_ids:
                self._breaker.on_failure(each.encode(), now_s)
        return not was_error

    def void(self, *, is_probe: bool) -> None:
        """Record that the send was not made."""
        if is_probe:
            self._breaker.on_probe_void(self._clock.monotonic_s())
            self._changed.set()

    def try_now(self) -> None:
        """Allow the next probe at once: a part of the cluster is reachable again."""
        if not self.is_open:
            self._breaker.next_probe_s = min(self._breaker.next_probe_s, self._clock.monotonic_s())
            self._changed.set()
