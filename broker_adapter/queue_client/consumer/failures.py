"""Retries and dead letters of messages with a failed handler."""

from __future__ import annotations

from dataclasses import replace

from broker_adapter.contracts.classic import Outgoing, ReceivedMessage
from broker_adapter.contracts.errors import BrokerError
from broker_adapter.contracts.topics import retry_topic
from broker_adapter.queue_client import Membership
from broker_adapter.runtime.log import LibraryLog

_FIRST_LEVEL = 3  # of retries: 10 s; RocketMQ 5.5
_SEND_MS_MAX = 5_000  # RocketMQ 5.5 (consumer's send back)
_LEVEL_MAX = 18

_log = LibraryLog("broker_adapter.queue_client.consumer")


class ConsumerFailures:
    """Sends failed messages of a group back to brokers."""

    def __init__(self, membership: Membership, group: str, attempts: int) -> None:
        self._membership = membership
        self._group = group
        self._attempts = attempts

    async def send_back(self, received: ReceivedMessage, delay_level: int, error: BaseException | str = "") -> bool:
        """Schedule a retry, or create a dead letter; return True if a broker accepted it.

        The broker of the message copies it. If that fails, the whole message is sent to the group's retry topic at any
        broker. So a message may be duplicated, and none is lost.
        """
        try:
            await self._membership.broker.send_back(
                self._group, received, delay_level=delay_level, attempts_max=self._attempts, error=error
            )
        except BrokerError as refusal:
            _log.warning("send_back_failed", group=self._group, **_facts(received), error=str(refusal))
            if received.unreadable:
                return False
            return await self.put(received, delay_level, error)
        return True

    async def put(self, received: ReceivedMessage, delay_level: int = 0, error: BaseException | str = "") -> bool:
        """Send a message to the group's retry topic with one more failure; return True if a broker accepted it."""
        failed = received.attempts_failed + 1
        system = {
            "RETRY_TOPIC": received.message.topic,
            "ORIGIN_MESSAGE_ID": received.system.get("ORIGIN_MESSAGE_ID", received.message.message_id),
            "RECONSUME_TIME": str(failed),
            "MAX_RECONSUME_TIMES": str(self._attempts),
        }
        topic = retry_topic(self._group)
        outgoing = Outgoing(
            message=replace(received.message, topic=topic, deliver_at_ms=0),
            delay_level=delay_level if delay_level > 0 else min(_FIRST_LEVEL + received.attempts_failed, _LEVEL_MAX),
            # above attempts_max a broker stores a dead letter
            attempts_failed=failed if delay_level >= 0 else max(failed, self._attempts + 1),
            attempts_max=self._attempts,
            error=error,
            system=system,
        )
        try:
            route = await self._membership.route(topic)
        except BrokerError as refusal:
            _log.warning("retry_topic_not_found", topic=topic, error=str(refusal))
            return False
        for queue in sorted(route.writable, key=lambda each: each.broker == received.queue.broker):
            try:
                await self._membership.broker.send(self._group, queue, [outgoing], timeout_ms=_SEND_MS_MAX)
            except BrokerError as refusal:
                _log.warning("retry_send_failed", queue=str(queue), **_facts(received), error=str(refusal))
            else:
                return True
        return False


def _facts(received: ReceivedMessage) -> dict[str, object]:
    return {"message_id": received.message.message_id, "lies_at": str(received.queue), "offset": received.queue_offset}
