"""Topics and groups as objects: fits ``ObjectSource``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from broker_adapter.errors import topic_unknown
from broker_adapter.message import MessageType
from dmq.admin.source import GroupStatus, Reader, TopicCount, TopicStatus
from dmq.daemon.operations import Operations
from dmq.embedded.operator import BEGIN, END
from dmq.embedded.topic_settings import KeepChange, TopicSettings


class Objects(Operations, ABC):
    """What ``Report`` leaves to the broker's operator."""

    @abstractmethod
    async def count(self, topic: str) -> TopicCount:
        """Return where the queues of a topic begin and end."""

    @abstractmethod
    async def topics(self) -> Sequence[TopicStatus]:
        """Return every topic."""

    async def topic(self, name: str) -> TopicStatus:
        """Return one topic, with its readers."""
        status = next((each for each in await self.topics() if each.name == name), None)
        if status is None:
            raise topic_unknown(name)
        topic = self.broker.names.topics.get(name)
        readings = await self.broker.operator.readings(topic) if topic is not None else ()
        ranges = (await self.count(name)).queues if topic is not None else ()
        readers = [Reader(group=each.group, unread=each.unread) for each in readings]
        return replace(status, readers=readers, ranges=ranges)

    async def create_topic(
        self, name: str, *, queues: int, message_type: MessageType | None, keep: KeepChange
    ) -> TopicStatus:
        """Make a topic."""
        await self.broker.operator.create_topic(name, queues=queues, message_type=message_type, keep=keep)
        return await self.topic(name)

    async def set_topic(
        self, name: str, *, queues: int, message_type: MessageType | Literal["MIXED"] | None, keep: KeepChange
    ) -> TopicStatus:
        """Change a topic."""
        settings = None
        if message_type is not None:
            settings = TopicSettings(message_type if isinstance(message_type, MessageType) else None)
        await self.broker.operator.set_topic(name, queues=queues, settings=settings, keep=keep)
        return await self.topic(name)

    async def remove_topic(self, name: str, *, is_forced: bool) -> None:
        """Remove a topic."""
        await self.broker.operator.remove_topic(name, is_forced=is_forced)

    async def create_group(self, name: str) -> GroupStatus:
        """Make a group."""
        await self.broker.operator.create_group(name)
        return await self.group(name)

    async def remove_group(self, name: str, *, is_forced: bool, with_dead_letters: bool) -> None:
        """Remove a group."""
        await self.broker.operator.remove_group(name, is_forced=is_forced, with_dead_letters=with_dead_letters)

    async def reset_group(self, group: str, topic: str, to: int | Literal["begin", "end"]) -> Sequence[int]:
        """Let a group go on from elsewhere."""
        marks = {"begin": BEGIN, "end": END}
        return await self.broker.operator.reset_group(group, topic, to if isinstance(to, int) else marks[to])
