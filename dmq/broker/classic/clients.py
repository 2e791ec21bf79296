"""Registry of in-process clients that divide queues: group members, their notifications, and transaction checks.

All state is in memory and uses the monotonic clock. There is no timer: each heartbeat expires silent clients, and a
single client shares its queues with no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from broker_adapter.contracts.classic import Listener, MessageQueue, TransactionCheck
from broker_adapter.contracts.transactions import Check
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import epoch_ms
from dmq.broker.classic.messages import BROKER, PRODUCER_GROUP, received_of
from dmq.broker.pulling import Members

HEARTBEAT_S = 5.0  # interval of equeue clients; RocketMQ clients use 30 s for remote brokers
SILENT_S_MAX = 6 * HEARTBEAT_S


class ClassicClients:
    """Implements ``Checker``. It belongs to the event loop, except for ``is_live``, which runs on any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._consumers = Members(clock, silent_s_max=SILENT_S_MAX)
        self._producers = Members(clock, silent_s_max=SILENT_S_MAX)
        self._producer_seen_s = 0.0  # last heartbeat of any producer
        self._listeners: dict[str, Listener] = {}

    def attach(self, client_id: str, listener: Listener) -> None:
        """Register the listener for events of a client."""
        self._listeners[client_id] = listener

    def detach(self, client_id: str) -> None:
        """Remove a closed client from all groups."""
        self._producers.gone(client_id)
        self._tell(self._consumers.gone(client_id), client_id)
        self._listeners.pop(client_id, None)

    def seen(self, client_id: str, producers: Iterable[str], consumers: Iterable[str]) -> None:
        """Record a heartbeat for these groups; notify the other members of a consumer group that the client joins."""
        self._producers.expire()
        self._tell(self._consumers.expire(), "")
        for group in producers:
            self._producers.seen(group, client_id)
            self._producer_seen_s = self._clock.monotonic_s()
        self._tell([group for group in consumers if self._consumers.seen(group, client_id)], client_id)

    def gone(self, client_id: str, *, producer: str = "", consumer: str = "") -> None:
        """Remove a client from a group; notify the other members of a consumer group."""
        if producer:
            self._producers.gone(client_id, producer)
        if consumer:
            self._tell(self._consumers.gone(client_id, consumer), client_id)

    def members(self, group: str) -> list[str]:
        """Return the sorted client ids of a consumer group."""
        return self._consumers.of(group)

    def _tell(self, groups: Iterable[str], by: str) -> None:
        for group in groups:
            for client_id in self._consumers.of(group):
                if client_id != by and (listener := self._listeners.get(client_id)) is not None:
                    self._loop.call_soon(listener.members_changed, group)

    # -- transactions -------------------------------------------------------------------------------------------------

    def is_live(self, topic: str) -> bool:  # noqa: ARG002 - a heartbeat names groups and no topics
        """As ``Checker.is_live``: any producer counts."""
        return len(self._producers) > 0 and self._clock.monotonic_s() - self._producer_seen_s < SILENT_S_MAX

    async def check(self, check: Check) -> bool:
        """As ``Checker.check``: checks rotate among the producers of the group that sent the half message."""
        try:
            sent = wire.Message.FromString(check.payload)
        except DecodeError:  # not from a client of this kind
            return False
        group = dict(sent.user_properties).get(PRODUCER_GROUP, "")
        known = [each for each in self._producers.of(group) if each in self._listeners]
        if not known:
            return False
        queue = MessageQueue(check.topic, BROKER, sent.system_properties.queue_id)
        half = received_of(check.payload, check.message_id, queue, -1, epoch_ms(sent.system_properties.born_timestamp))
        asked = TransactionCheck(group, half, check.transaction_id, BROKER)
        self._listeners[known[check.number % len(known)]].check(asked)
        return True
