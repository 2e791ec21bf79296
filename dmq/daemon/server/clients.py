"""Clients of the public protocol for the admin service: implements ``ClientSource``."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import ClientSilent
from dmq.rocketmq_server.rpc.commands import NoAnswer
from dmq.rocketmq_server.rpc.telemetry import Streams
from dmq.rocketmq_server.sessions.sessions import IDLE_S_MAX, Sessions


class Clients:
    """Client registry that reads the sessions and queries clients over their telemetry streams."""

    def __init__(self, clock: Clock, sessions: Sessions, streams: Streams) -> None:
        self._clock = clock
        self._sessions = sessions
        self._streams = streams

    def clients(self, group: str) -> Sequence[wire.Client]:
        """See ``ClientSource.clients``."""
        now_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
        found = [
            wire.Client(
                client_id=session.client_id,
                kind=public.ClientType.Name(session.client_type),
                group=session.group,
                language=session.language,
                version=session.version,
                last_seen_at_ms=now_ms - int((now_s - session.last_seen_s) * 1000),
                streams=self._streams.held_by(session.client_id),
            )
            for session in self._sessions
            if (not group or session.group == group) and now_s - session.last_seen_s <= IDLE_S_MAX
        ]
        return sorted(found, key=lambda client: (client.group, client.client_id))

    async def stack(self, client_id: str, timeout_s: float) -> str:
        """See ``ClientSource.stack``."""
        try:
            return await self._streams.commands.stack(client_id, timeout_s)
        except NoAnswer as error:
            raise ClientSilent(str(error)) from error

    async def verify(self, client_id: str, payload: bytes, timeout_s: float) -> tuple[int, str]:
        """See ``ClientSource.verify``."""
        try:
            return await self._streams.commands.verify(client_id, payload, timeout_s)
        except NoAnswer as error:
            raise ClientSilent(str(error)) from error
