"""Whether messages of one topic may be sent to the cluster now: breaker and ramp, and who waits for them, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from broker_adapter.runtime.clock import Clock
from retry.hook.breaker import Breaker, BreakerState
from retry.hook.ramp import Ramp


class Gate:
    """One topic's way to the cluster. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.error = ""  # what went wrong last, if nothing has gone well since
        self._clock = clock
        self._breaker = Breaker()
        self._ramp = Ramp()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the cluster takes messages of the topic, as far as is known."""
        return self._breaker.state is BreakerState.CLOSED

    async def enter(self, messages: int) -> bool:
        """Return when ``messages`` may be sent; ``True``: as a probe. End it with one of the next three."""
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
        """The cluster took them, or said clearly why not; say whether it did not before."""
        if self._breaker.on_success():
            self._ramp.start(self._clock.monotonic_s())
            self._changed.set()
        self._ramp.on_success(self._clock.monotonic_s())
        was_error, self.error = self.error, ""
        return bool(was_error)

    def failed(self, message_ids: Iterable[str], why: str, *, is_probe: bool = False) -> bool:
        """The cluster did not take them; say whether it did before."""
        now_s = self._clock.monotonic_s()
        was_error, self.error = self.error, why
        self._ramp.on_failure(now_s)
        if is_probe:
            self._breaker.on_probe_failed(now_s)
            self._changed.set()  # who waits has reckoned with the time that this one could have taken
        else:
            for each in message_ids:
                self._breaker.on_failure(each.encode(), now_s)
        return not was_error

    def void(self, *, is_probe: bool) -> None:
        """Nothing was asked after all."""
        if is_probe:
            self._breaker.on_probe_void(self._clock.monotonic_s())
            self._changed.set()

    def try_now(self) -> None:
        """Let the next probe begin: something of the cluster has come back."""
        if not self.is_open:
            self._breaker.next_probe_s = min(self._breaker.next_probe_s, self._clock.monotonic_s())
            self._changed.set()
