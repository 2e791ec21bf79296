"""Who the clients are: a bounded table, filled from what they send, and never needed to serve them.

After a restart it is empty and every client goes on; it fills again as they send heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire

# RocketMQ's proxy forgets a client 120 s after its last heartbeat; they come every 10 s.
IDLE_S_MAX = 120.0
_FRAMES_WAITING_MAX = 16
# A settings frame takes a few hundred bytes; one that is larger than this is refused.
SETTINGS_BYTES_MAX = 64 * 1024
_SETTINGS_BYTES_IN_ALL_MAX = 64 * 1024 * 1024
_WORD_CHARS_MAX = 64  # what is kept of a header


class Outbox:
    """Frames on their way to one telemetry stream: bounded, and closed from either side."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[wire.TelemetryCommand | None] = asyncio.Queue(_FRAMES_WAITING_MAX)
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will be taken."""
        return self._closed

    async def put(self, frame: wire.TelemetryCommand) -> None:
        """Queue a frame, waiting while the client does not read; dropped when closed."""
        if not self._closed:
            await self._frames.put(frame)

    def offer(self, frame: wire.TelemetryCommand) -> bool:
        """Queue a frame if there is room; say whether it was."""
        if self._closed or self._frames.full():
            return False
        self._frames.put_nowait(frame)
        return True

    def close(self) -> None:
        """End the stream after what is queued; if the queue is full, its newest frame gives way. Idempotent."""
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
class Session:
    """What a client told about itself. ``outbox`` leads to its newest telemetry stream.

    ``settings`` is what it wished for last on that stream; ``None`` without one, or if the wish was too long to keep.
    """

    client_id: str
    client_type: wire.ClientType
    group: str
    language: str
    version: str
    last_seen_s: float
    outbox: Outbox | None = None
    settings: wire.Settings | None = None
    settings_bytes: int = 0
    is_respelt: bool = False  # see dmq.rocketmq_server.sessions.stream_reopening
    respelt_s: float = float("-inf")


class Sessions:
    """Client id to session, longest unseen first; at most ``sessions_max``, the longest unseen give way."""

    def __init__(self, clock: Clock, *, sessions_max: int = 20_000) -> None:
        self._clock = clock
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._settings_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, client_id: str) -> Session | None:
        """Return what is known about a client."""
        return self._sessions.get(client_id)

    def seen(
        self, client_id: str, client_type: wire.ClientType, group: str, language: str, version: str = ""
    ) -> Session:
        """Note a sign of life and return the client's session, made if it is new."""
        now_s = self._clock.monotonic_s()
        language, version = language[:_WORD_CHARS_MAX], version[:_WORD_CHARS_MAX]
        session = self._sessions.get(client_id)
        if session is None:
            self._make_room(now_s)
            session = Session(
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

    def attach(self, session: Session, settings: wire.Settings, outbox: Outbox) -> None:
        """Keep what a client wishes for, and the stream on which it said so: the newest is the one for commands."""
        self._drop_settings(session)
        session.outbox = outbox
        size = settings.ByteSize()
        if size <= SETTINGS_BYTES_MAX and self._settings_bytes + size <= _SETTINGS_BYTES_IN_ALL_MAX:
            session.settings, session.settings_bytes = settings, size
            self._settings_bytes += size

    def _drop_settings(self, session: Session) -> None:
        self._settings_bytes -= session.settings_bytes
        session.settings, session.settings_bytes = None, 0

    def forget(self, client_id: str) -> None:
        """Drop a client that said goodbye. Its telemetry stream ends when the client closes it."""
        session = self._sessions.pop(client_id, None)
        if session is not None:
            self._drop_settings(session)

    def detach(self, client_id: str, outbox: Outbox) -> None:
        """Note that a telemetry stream ended, unless a newer one took its place."""
        session = self._sessions.get(client_id)
        if session is not None and session.outbox is outbox:
            session.outbox = None
            self._drop_settings(session)

    def _make_room(self, now_s: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            # An open stream is a sign of life as well: it may be the daemon that was stopped.
            is_idle = oldest.outbox is None and now_s - oldest.last_seen_s > IDLE_S_MAX
            if not is_idle and len(self._sessions) < self._sessions_max:
                return
            self.forget(oldest.client_id)
