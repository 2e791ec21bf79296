"""Open pages as server-sent events, once a second."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from dmq.admin.client import AdminClient, NotAllowed, Sample, rates_of, sample_of
from dmq.console.views import Values, dead_of, due_of, status_of
from dmq.errors import DmqError

STREAMS_MAX: Final = 32
_INTERVAL_S: Final = 1.0
_RATE_SAMPLES: Final = 6  # rates are those of the last five seconds
_SLOW_EVERY: Final = 5  # the histogram and the dead letters: every fifth event

Render = Callable[[str, Values], str]


class Feed(ABC):
    """Events of one open page."""

    async def events(self) -> AsyncIterator[str]:
        """Yield events until the page closes the stream."""
        yield "retry: 2000\n\n"
        while True:
            try:
                found = await asyncio.to_thread(self._next)
            except DmqError as error:
                found = {"error": str(error)}
            yield f"data: {json.dumps(found)}\n\n"
            await asyncio.sleep(_INTERVAL_S)

    @abstractmethod
    def _next(self) -> dict[str, Any]:
        """Return the parts of the page, by the id of their element."""


class ScreenFeed(Feed):
    """Events of a page with one part, which ``show`` returns."""

    def __init__(self, show: Callable[[], str]) -> None:
        self._show = show

    def _next(self) -> dict[str, Any]:
        return {"parts": {"part": self._show()}}


class OverviewFeed(Feed):
    """Events of the overview."""

    def __init__(self, client: AdminClient, render: Render, span: str) -> None:
        self._client = client
        self._render = render
        self._span = span
        self._samples = deque[Sample](maxlen=_RATE_SAMPLES)
        self._count = 0
        self._dead: int | None = None

    def _next(self) -> dict[str, Any]:
        try:
            values = status_of(self._client)
        except DmqError:
            self._samples.clear()
            raise
        status = values["status"]
        self._samples.append(sample_of(status))
        parts = {}
        if self._count % _SLOW_EVERY == 0:
            try:
                self._dead = dead_of(self._client)
            except NotAllowed:
                self._dead = None
            parts["due"] = self._render("_due.html.j2", due_of(self._client, "", self._span))
        self._count += 1
        now = rates_of(self._samples)
        values |= {"rates": now, "dead": self._dead}
        parts |= {"band": self._render("_band.html.j2", values), "figures": self._render("_figures.html.j2", values)}
        return {"parts": parts, "at_ms": status.now_ms, "rates": now}
