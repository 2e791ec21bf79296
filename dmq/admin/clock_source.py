"""The daemon's clock as the admin service sees it, and the calls about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Protocol

from google.protobuf.message import Message

from broker_adapter.errors import Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.source import ClockState

WHY_CHARS_MAX = 200


class ClockSource(Protocol):
    """What watches the clock of the daemon's host."""

    async def clock(self) -> ClockState:
        """Say how the clock is."""
        ...

    async def accept(self, why: str) -> bool:
        """Believe the clock from here on, durable on return; say whether that changed anything."""
        ...


class ClockCalls:
    """The calls. Raises ``Refused`` for input that breaks a rule; what the source raises passes through."""

    def __init__(self, source: ClockSource | None) -> None:
        self._source = source
        self.calls: Mapping[str, Callable[..., Awaitable[Message]]] = {
            "GetClock": self.get_clock,
            "AcceptClock": self.accept_clock,
        }

    async def get_clock(self, _request: wire.GetClockRequest) -> wire.GetClockResponse:
        """Say how the clock is."""
        return wire.GetClockResponse(clock=_wire(await self._watch().clock()))

    async def accept_clock(self, request: wire.AcceptClockRequest) -> wire.AcceptClockResponse:
        """Believe the clock from here on."""
        why = request.why.strip()
        if len(why) > WHY_CHARS_MAX or not why.isprintable():
            text = f"the reason may have up to {WHY_CHARS_MAX} printable characters"
            raise Refused(Rule.REQUEST, text, value=request.why[: WHY_CHARS_MAX + 1])
        watch = self._watch()
        has_changed = await watch.accept(why)
        return wire.AcceptClockResponse(has_changed=has_changed, clock=_wire(await watch.clock()))

    def _watch(self) -> ClockSource:
        if self._source is None:
            raise Refused(Rule.REQUEST, "this daemon does not watch its clock")
        return self._source


def _wire(clock: ClockState) -> wire.Clock:
    return wire.Clock(**asdict(clock))
