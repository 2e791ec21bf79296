"""Channels: the delivery of a notification to a webhook, or to a topic of the same store."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import resource_of, set_timestamp, to_envelope
from dmq.broker import EmbeddedBroker
from dmq.config.destinations import WebhookUrl
from dmq.errors import DmqError
from dmq.notifications.notification import Notification
from dmq.notifications.post import DEADLINE_S, NotDelivered, post
from dmq.notifications.signature import headers_of, read_secrets
from dmq.store.schema.topics.names import PLAIN
from dmq.store.writer.operations import Put
from dmq.version import version_here

NOTIFICATION_ID = "DMQ_NOTIFICATION_ID"  # a user property of a notification in a topic


class Channel(Protocol):
    """Delivery of notifications. It belongs to the event loop."""

    async def deliver(self, notification: Notification, progress: Sequence[Put]) -> None:
        """Deliver ``notification``, then commit ``progress``; both are done on return.

        Raise ``NotDelivered``, ``BrokerError`` or ``StoreError`` if one is not. Then ``progress`` is not committed.
        """
        ...


class WebhookChannel:
    """Signed webhooks to one URL. Each is sent by a thread of its own, so a slow receiver delays nothing else."""

    def __init__(
        self,
        broker: EmbeddedBroker,
        url: WebhookUrl,
        secret_file: Path,
        *,
        allows_private: bool,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._broker = broker
        self._url = url
        self._secret_file = secret_file
        self._send = partial(post, url, clock=broker.store.clock, allows_private=allows_private, deadline_s=deadline_s)

    async def deliver(self, notification: Notification, progress: Sequence[Put]) -> None:
        """As ``Channel.deliver``."""
        if progress and (obstacle := self._broker.store.write_obstacle()):  # it would be delivered again and again
            raise NotDelivered(f"{self._url}: {obstacle}")
        await _in_thread(partial(self._post, notification, self._broker.store.clock.now_ms() // 1000))
        if progress:
            await self._broker.commits.commit(progress)

    def _post(self, notification: Notification, now_s: int) -> None:
        signed = headers_of(read_secrets(self._secret_file), notification.notification_id, now_s, notification.body)
        usual = {"Content-Type": "application/json", "User-Agent": f"rock-dmq/{version_here()}", "Connection": "close"}
        self._send({**usual, **signed}, notification.body)


class TopicChannel:
    """Messages of a topic. A message and the progress of its source are one unit: each notification comes once."""

    def __init__(self, broker: EmbeddedBroker, topic: str) -> None:
        self._broker = broker
        self._topic = topic

    async def deliver(self, notification: Notification, progress: Sequence[Put]) -> None:
        """As ``Channel.deliver``."""
        broker = self._broker
        if broker.store.is_disk_low():
            raise NotDelivered(f"topic:{self._topic}: the disk is almost full")
        topic = await broker.catalog.topic(self._topic)
        if topic.message_type not in {None, MessageType.NORMAL}:
            raise NotDelivered(f"topic:{self._topic}: it accepts {topic.message_type.name} messages only")
        now_ms = broker.store.clock.now_ms()
        changed, first = broker.names.plan_first({topic.name: PLAIN})
        accept = broker.placement.accept(topic, to_envelope(_message(topic.name, notification, now_ms)), now_ms)
        done = broker.commits.submit([*first, accept, *progress])
        broker.names.change_topics(changed)
        await broker.commits.committed(done)


def _message(topic: str, notification: Notification, now_ms: int) -> wire.Message:
    message = wire.Message(topic=resource_of(topic), body=notification.body)
    message.user_properties[NOTIFICATION_ID] = notification.notification_id
    system = message.system_properties
    system.message_id = new_message_id(now_ms, os.getpid(), secrets.token_bytes(10))
    system.tag = notification.kind
    system.body_encoding = wire.IDENTITY
    set_timestamp(system.born_timestamp, now_ms)
    return message


async def _in_thread(call: Callable[[], None]) -> None:
    """Run ``call`` in a daemon thread, which the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: DmqError | None) -> None:
        if done.done():  # cancelled
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        try:
            call()
            error = None
        except DmqError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - any error is passed to the caller
            error = NotDelivered(f"{type(failure).__name__}: {failure}")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="dmq-webhook", daemon=True).start()
    await done
