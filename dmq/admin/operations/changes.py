"""RPC of ``AdminService`` that changes delayed messages: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from broker_adapter.contracts.message import pack_id, unpack_id
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import validate
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.delayed.changes import Changed, ChangeOutcome, HeldBy, Meant


class MessageChanges(Protocol):
    """Changes of pending messages; see ``DelayedMessages``."""

    def meant(self, topic: str, recall_handle: str) -> Meant:
        """Return the message that a recall handle names."""
        ...

    async def by_key(
        self,
        topic: str,
        own_keys: Sequence[str],
        change: Callable[[Sequence[Meant]], Awaitable[Sequence[Changed]]],
    ) -> list[tuple[bytes, Changed]]:
        """Change the pending messages under own keys."""
        ...

    async def cancel(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Cancel messages."""
        ...

    async def reschedule(self, topic: str, meant: Sequence[Meant], deliver_at_ms: int) -> list[Changed]:
        """Set another delivery time."""
        ...

    async def fire(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Deliver messages now."""
        ...

    async def held_by(self, topic: str, changed: Sequence[Changed]) -> Sequence[HeldBy]:
        """Return for each rescheduled message that is due the reason why it is held back."""
        ...


class BrokerChanges:
    """Changes through the broker of a running daemon."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.meant = broker.recalls.meant
        self.by_key = broker.delayed.by_key
        self.cancel = broker.delayed.cancel
        self.reschedule = broker.delayed.reschedule
        self.fire = broker.delayed.fire
        self.held_by = broker.delayed.held_by


class ChangeCalls:
    """RPC of changes. Raise ``Refused`` for invalid input; exceptions of the broker pass through."""

    def __init__(self, changes: MessageChanges) -> None:
        self._changes = changes

    async def change_messages(self, request: wire.ChangeMessagesRequest) -> wire.ChangeMessagesResponse:
        """Cancel, reschedule or fire pending messages."""
        topic, kind = check_topic(request.topic), validate.check_change(request)
        named = [Meant(pack_id(validate.check_message_id(each))) for each in request.message_ids]
        named += [self._changes.meant(topic, each) for each in request.recall_handles]
        meant = list(dict.fromkeys(named))

        async def change(meant: Sequence[Meant]) -> Sequence[Changed]:
            if kind == "cancel":
                return await self._changes.cancel(topic, meant)
            if kind == "fire":
                return await self._changes.fire(topic, meant)
            return await self._changes.reschedule(topic, meant, request.deliver_at_ms)

        changed = dict(zip(meant, await change(meant) if meant else (), strict=True))
        answers = [(each.message_id, changed[each], "") for each in named]
        if request.own_keys:
            own_keys = list(dict.fromkeys(request.own_keys))
            found = dict(zip(own_keys, await self._changes.by_key(topic, own_keys, change), strict=True))
            answers += [(*found[own_key], own_key) for own_key in request.own_keys]
        held: Sequence[HeldBy] = [HeldBy.NOTHING] * len(answers)
        if kind != "cancel":
            held = await self._changes.held_by(topic, [answer for _, answer, _ in answers])
        return wire.ChangeMessagesResponse(
            messages=[_told(*each, by) for each, by in zip(answers, held, strict=True)],
        )


def _told(message_id: bytes, changed: Changed, own_key: str, held_by: HeldBy) -> wire.ChangedMessage:
    return wire.ChangedMessage(
        message_id=unpack_id(message_id) if message_id else "",
        outcome=wire.ChangedMessage.Outcome.Name(changed.outcome),
        at_ms=changed.at_ms,
        own_key=own_key,
        held_by=wire.ChangedMessage.HeldBy.Name(held_by),
    )


assert {each.name: each.value for each in ChangeOutcome}.items() <= dict(wire.ChangedMessage.Outcome.items()).items()
assert {each.name: each.value for each in HeldBy} == dict(wire.ChangedMessage.HeldBy.items())
