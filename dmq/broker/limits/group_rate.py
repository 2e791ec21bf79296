"""Delivery rates of groups: a paused group gets no messages, a resumed one starts with a ramp. Event loop only."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from broker_adapter.runtime.clock import Clock
from dmq.broker.limits.flow import RAMP_STEP_S, RAMP_STEPS, Flow, full, ramp, refilled, taken, wait_s
from dmq.broker.topics import FlowChange, Group, Names, paused_since

_WAIT_S_LEAST = 0.05  # limits polling by many receives that wait for few messages


class GroupFlows:
    """Number of messages that a receive of a group may get now.

    Pauses and rates are stored in the group settings. The ramp after a pause is in memory, and a restart ends it.
    """

    def __init__(self, names: Names, clock: Clock) -> None:
        self._names = names
        self._clock = clock
        self._flows: dict[str, Flow] = {}  # of groups with a rate or a running ramp
        self._resumed: dict[str, asyncio.Event] = {}  # of paused groups with waiting receives

    def is_paused(self, group: str) -> bool:
        """Return True if a group is paused."""
        return group in self._names.paused

    def take(self, group: str, wanted: int) -> int:
        """Reserve and return how many of ``wanted`` messages may be delivered; ``give_back`` the rest."""
        if group in self._names.paused:
            return 0
        flow, rate = self._flows.get(group), self._names.rates.get(group)
        if flow is None and rate is None:
            return wanted
        now_s = self._clock.monotonic_s()
        if flow is not None and (flow.ramp_since_s is None or now_s - flow.ramp_since_s >= RAMP_STEPS * RAMP_STEP_S):
            if rate is None:
                del self._flows[group]
                return wanted
            flow = flow._replace(ramp_since_s=None)
        flow = refilled(flow or full(rate or 0, now_s), rate, now_s)
        count = min(wanted, int(flow.allowed))
        self._flows[group] = taken(flow, count)
        return count

    def give_back(self, group: str, count: int) -> None:
        """Return the unused part of a reservation."""
        if count and (flow := self._flows.get(group)) is not None:
            self._flows[group] = taken(flow, -count)

    async def wait(self, group: str, timeout_s: float) -> None:
        """Return when the rate may allow a delivery to the group, or after ``timeout_s`` seconds."""
        if group not in self._names.paused:
            flow, now_s = self._flows.get(group), self._clock.monotonic_s()
            rate = self._names.rates.get(group)
            left_s = wait_s(refilled(flow, rate, now_s), rate, now_s) if flow is not None else 0.0
            await asyncio.sleep(min(timeout_s, max(left_s, _WAIT_S_LEAST)))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._resumed.setdefault(group, asyncio.Event()).wait()

    async def left_ms(self, group: str, wait_ms: int) -> int:
        """Wait while a group is paused, at most ``wait_ms``; return the remaining time, or -1 if it is still paused."""
        if group not in self._names.paused:
            return wait_ms
        until_s = self._clock.monotonic_s() + wait_ms / 1000
        await self.wait(group, wait_ms / 1000)
        return -1 if group in self._names.paused else max(0, int((until_s - self._clock.monotonic_s()) * 1000))

    def change(self, group: Group, is_paused: bool | None, deliver_rate: int | None) -> tuple[Group, str]:
        """Return the group with its pause and rate changed, and the text of the change for the audit trail.

        ``None`` leaves a setting unchanged. Raise ``Refused(REQUEST)`` for an invalid rate.
        """
        change = FlowChange(is_paused, deliver_rate)
        change.check()
        since_ms = paused_since(group.paused_since_ms, change.is_paused, self._clock.now_ms())
        rate = group.deliver_rate if change.deliver_rate is None else change.deliver_rate or None
        return group._replace(paused_since_ms=since_ms, deliver_rate=rate), change.said()

    def changed(self, before: Group, group: Group) -> None:
        """Start the ramp of a resumed group and wake its receives; call it after its settings are changed."""
        if before.paused_since_ms is None or group.paused_since_ms is not None:
            return
        self._flows[group.name] = ramp(self._clock.monotonic_s())
        if (waited := self._resumed.pop(group.name, None)) is not None:
            waited.set()
