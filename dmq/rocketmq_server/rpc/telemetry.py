"""Telemetry streams: they carry settings and commands to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from broker_adapter.contracts.adapter import PopBroker
from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import full_name
from dmq.acl.gate import holders_of
from dmq.acl.quotas import Quota, Quotas
from dmq.http2 import Allowance, Rate
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.codec import validate
from dmq.rocketmq_server.codec.codes import OK_STATUS
from dmq.rocketmq_server.rpc.commands import Commands
from dmq.rocketmq_server.rpc.transactions import Producers
from dmq.rocketmq_server.sessions.sessions import SETTINGS_BYTES_MAX, Sessions, TelemetryOutbox
from dmq.rocketmq_server.sessions.settings import CONSUMERS, SidecarConfig, client_type_of, merged
from dmq.rocketmq_server.sessions.slots import Slots

# Clients send their settings when they connect, every five minutes, and when a subscription changes.
_SETTINGS_RATE: Final = Rate(burst=64, per_s=4)
_TOPICS_MAX: Final = 1024  # of one client's settings


class Streams:
    """All telemetry streams of the server. The event loop owns the object."""

    def __init__(
        self,
        broker: PopBroker,
        sessions: Sessions,
        producers: Producers,
        config: SidecarConfig,
        quotas: Quotas,
        clock: Clock,
    ) -> None:
        self._quotas = quotas
        self._monotonic_s = clock.monotonic_s
        self._connections = Slots(
            "telemetry streams on one connection",
            in_all=config.streams_max,
            per_client=config.streams_per_connection_max,
        )
        self._broker = broker
        self._sessions = sessions
        self._producers = producers
        self._places = Slots("telemetry streams", in_all=config.streams_max, per_client=config.streams_per_client_max)
        self._outboxes: set[TelemetryOutbox] = set()
        self._draining = False
        self.commands = Commands(sessions)

    def held_by(self, client_id: str) -> int:
        """Return the number of open streams of a client."""
        return self._places.held_by(client_id)

    def drain(self) -> None:
        """End all streams now, and each new one at once. Idempotent."""
        self._draining = True
        for outbox in self._outboxes:
            outbox.close()

    async def serve(
        self, requests: AsyncIterator[wire.TelemetryCommand], call: Call
    ) -> AsyncGenerator[wire.TelemetryCommand, None]:
        """Answer each settings frame with the effective settings; process other frames without an answer.

        Ends when the client ends it, at ``drain``, or with the error of a frame. Commands go to the newest stream of a
        client. An older stream stays until its client closes it. Otherwise clients that dial two addresses of this
        server would close each other's stream for ever.
        """
        self._take(call)
        outbox = TelemetryOutbox()
        self._outboxes.add(outbox)
        if self._draining:
            outbox.close()
        reader = asyncio.create_task(self._read(requests, call, outbox), name="dmq-telemetry")
        try:
            async for frame in outbox:
                yield frame
            if not self._draining:
                await reader
        finally:
            self._free(call)
            self._outboxes.discard(outbox)
            self._sessions.detach(call.client_id, outbox)
            self._producers.left(call.client_id, outbox)
            reader.cancel()  # which closes the outbox
            await asyncio.gather(reader, return_exceptions=True)

    def _take(self, call: Call) -> None:
        holders = holders_of(call.admission)
        self._places.take(call.client_id)
        try:
            self._connections.take(call.peer)
            try:
                self._quotas.take(Quota.STREAMS, holders)
            except Overloaded:
                self._connections.free(call.peer)
                raise
        except Overloaded:
            self._places.free(call.client_id)
            raise

    def _free(self, call: Call) -> None:
        self._places.free(call.client_id)
        self._connections.free(call.peer)
        self._quotas.free(Quota.STREAMS, holders_of(call.admission))

    async def _read(self, requests: AsyncIterator[wire.TelemetryCommand], call: Call, outbox: TelemetryOutbox) -> None:
        allowance = Allowance("settings", _SETTINGS_RATE, self._monotonic_s())
        try:
            async for frame in requests:
                self._broker.client_seen(call.client_id)
                if frame.HasField("settings"):
                    if not allowance.has_one(self._monotonic_s()):
                        limit = f"{_SETTINGS_RATE.burst} at once, {_SETTINGS_RATE.per_s:g} a second"
                        raise Overloaded("settings of one telemetry stream", limit=limit)
                    await self._tell(frame.settings, call, outbox)
                else:
                    self.commands.answered(call.client_id, frame)
        finally:
            outbox.close()

    async def _tell(self, wanted: wire.Settings, call: Call, outbox: TelemetryOutbox) -> None:
        """Answer a settings frame, and record the client's settings."""
        _check_size(wanted)
        client_type = client_type_of(wanted)
        group = ""
        if client_type in CONSUMERS:
            group = validate.group_of(wanted.subscription.group)
            self._quotas.about_to_make(Quota.GROUPS, holders_of(call.admission), group)
            await self._broker.ensure_group(group)
        session = self._sessions.seen(call.client_id, client_type, group, call.language, call.version)
        self._sessions.attach(session, wanted, outbox)
        self._producers.told(session)
        await outbox.put(self._settings_frame(wanted, group, call.language))

    def _settings_frame(self, wanted: wire.Settings, group: str, language: str) -> wire.TelemetryCommand:
        topics = [full_name(entry.topic) for entry in wanted.subscription.subscriptions]
        settings = merged(wanted, self._broker.group_settings(group, topics), language)
        return wire.TelemetryCommand(status=OK_STATUS, settings=settings)

    def group_changed(self, group: str) -> None:
        """Send the new settings to all connected consumers of ``group``. Call it on the event loop; it never blocks.

        A client that does not read its stream is skipped; it requests its settings again every 5 minutes.
        """
        for session in self._sessions:
            if session.group == group and session.outbox is not None and session.settings is not None:
                session.outbox.offer(self._settings_frame(session.settings, group, session.language))


def _check_size(wanted: wire.Settings) -> None:
    """Refuse settings larger than any real client's: each stream stores one copy."""
    size = wanted.ByteSize()
    if size > SETTINGS_BYTES_MAX:
        raise Refused(Rule.REQUEST, "the settings are too large", value=size, limit=f"{SETTINGS_BYTES_MAX} bytes")
    topics = max(len(wanted.subscription.subscriptions), len(wanted.publishing.topics))
    if topics > _TOPICS_MAX:
        raise Refused(Rule.REQUEST, "the settings name too many topics", value=topics, limit=_TOPICS_MAX)
