"""The table of connected clients: bounded, filled from client requests, and not required to serve them.

It is empty after a restart, and clients are served without interruption. Their heartbeats fill it again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire

# RocketMQ's proxy removes a client 120 s after its last heartbeat; clients send one every 10 s.
IDLE_S_MAX = 120.0
_FRAMES_WAITING_MAX = 16
# A real settings frame has a few hundred bytes; larger ones than this are refused.
SETTINGS_BYTES_MAX = 64 * 1024
_SETTINGS_BYTES_IN_ALL_MAX = 64 * 1024 * 1024
_WORD_CHARS_MAX = 64  # longer header values are cut


class TelemetryOutbox:
    """Outgoing frames of one telemetry stream: bounded, and closed from either side."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[wire.TelemetryCommand | None] = asyncio.Queue(_FRAMES_WAITING_MAX)
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """True if no more frames are accepted."""
        return self._closed

    async def put(self, frame: wire.TelemetryCommand) -> None:
        """Queue a frame; wait while the queue is full. The frame is dropped if the outbox is closed."""
        if not self._closed:
            await self._frames.put(frame)

    def offer(self, frame: wire.TelemetryCommand) -> bool:
        """Queue a frame if there is room; return True if it was queued."""
        if self._closed or self._frames.full():
            return False
        self._frames.put_nowait(frame)
        return True

    def close(self) -> None:
        """End the stream after the queued frames; a full queue drops its oldest frame to make room for the end.
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        if self._frames.full():
            self._frames.get_nowait()
        self._frames.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[wire.TelemetryCommand]:
        while (frame := await self._frames.get()) is not None:
            yield frame


@dataclass(slots=True, kw_only=True)
class ClientSession:
    """The reported properties of one client. ``outbox`` leads to its newest telemetry stream.

    ``settings`` are the last ones requested on that stream; ``None`` without a stream, or if they were too large to
    keep.
    """

    client_id: str
    client_type: wire.ClientType
    group: str
    language: str
    version: str
    last_seen_s: float
    outbox: TelemetryOutbox | None = None
    settings: wire.Settings | None = None
    settings_bytes: int = 0
    is_respelt: bool = False  # see dmq.rocketmq_server.sessions.stream_reopening
    respelt_s: float = float("-inf")


class Sessions:
    """Sessions by client id, least recently seen first; above ``sessions_max`` the least recently seen are evicted."""

    def __init__(self, clock: Clock, *, sessions_max: int = 20_000) -> None:
        self._clock = clock
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[str, ClientSession] = OrderedDict()
        self._settings_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._sessions.values()))

    def get(self, client_id: str) -> ClientSession | None:
        """Return the session of a client, or None."""
        return self._sessions.get(client_id)

    def seen(
        self, client_id: str, client_type: wire.ClientType, group: str, language: str, version: str = ""
    ) -> ClientSession:
        """Record activity and return the client's session, created if it is new."""
        now_s = self._clock.monotonic_s()
        language, version = language[:_WORD_CHARS_MAX], version[:_WORD_CHARS_MAX]
        session = self._sessions.get(client_id)
        if session is None:
            self._make_room(now_s)
            session = ClientSession(
                client_id=client_id,
                client_type=client_type,
                group=group,
                language=language,
                version=version,
                last_seen_s=now_s,
            )
            self._sessions[client_id] = session
            return session
        session.client_type = client_type
        session.group = group or session.group
        session.language = language or session.language
        session.version = version or session.version
        session.last_seen_s = now_s
        self._sessions.move_to_end(client_id)
        return session

    def attach(self, session: ClientSession, settings: wire.Settings, outbox: TelemetryOutbox) -> None:
        """Store the requested settings and their stream, which becomes the target of commands."""
        self._drop_settings(session)
        session.outbox = outbox
        size = settings.ByteSize()
        if size <= SETTINGS_BYTES_MAX and self._settings_bytes + size <= _SETTINGS_BYTES_IN_ALL_MAX:
            session.settings, session.settings_bytes = settings, size
            self._settings_bytes += size

    def _drop_settings(self, session: ClientSession) -> None:
        self._settings_bytes -= session.settings_bytes
        session.settings, session.settings_bytes = None, 0

    def forget(self, client_id: str) -> None:
        """Remove a client that announced its termination. Its telemetry stream ends when the client closes it."""
        session = self._sessions.pop(client_id, None)
        if session is not None:
            self._drop_settings(session)

    def detach(self, client_id: str, outbox: TelemetryOutbox) -> None:
        """Record the end of a telemetry stream, unless a newer one has replaced it."""
        session = self._sessions.get(client_id)
        if session is not None and session.outbox is outbox:
            session.outbox = None
            self._drop_settings(session)

    def _make_room(self, now_s: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            # A client with an open stream is alive too: missing heartbeats may mean that the daemon was suspended.
            is_idle = oldest.outbox is None and now_s - oldest.last_seen_s > IDLE_S_MAX
            if not is_idle and len(self._sessions) < self._sessions_max:
                return
            self.forget(oldest.client_id)
