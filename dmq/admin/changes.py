"""The call of ``AdminService`` that changes delayed messages: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from broker_adapter.message import pack_id, unpack_id
from broker_adapter.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin import validate
from dmq.embedded.broker import EmbeddedBroker
from dmq.embedded.delayed import Changed, Meant, Outcome


class Changes(Protocol):
    """Changes what waits in topics; see ``DelayedMessages``."""

    def meant(self, topic: str, recall_handle: str) -> Meant:
        """Return which message a recall handle is of."""
        ...

    async def cancel(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Cancel messages."""
        ...

    async def reschedule(self, topic: str, meant: Sequence[Meant], deliver_at_ms: int) -> list[Changed]:
        """Give messages another delivery time."""
        ...

    async def fire(self, topic: str, meant: Sequence[Meant]) -> list[Changed]:
        """Deliver messages now."""
        ...


class BrokerChanges:
    """Those of a running daemon."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.meant = broker.recalls.meant
        self.cancel = broker.delayed.cancel
        self.reschedule = broker.delayed.reschedule
        self.fire = broker.delayed.fire


class ChangeCalls:
    """The call. Raises ``Refused`` for input that breaks a rule; what the broker raises passes through."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def change_messages(self, request: wire.ChangeMessagesRequest) -> wire.ChangeMessagesResponse:
        """Cancel, reschedule or fire messages that wait."""
        topic, kind = check_topic(request.topic), validate.check_change(request)
        named = [Meant(pack_id(validate.check_message_id(each))) for each in request.message_ids]
        named += [self._changes.meant(topic, each) for each in request.recall_handles]
        meant = list(dict.fromkeys(named))
        if kind == "cancel":
            changed = await self._changes.cancel(topic, meant)
        elif kind == "fire":
            changed = await self._changes.fire(topic, meant)
        else:
            changed = await self._changes.reschedule(topic, meant, request.deliver_at_ms)
        answers = zip(meant, changed, strict=True)
        return wire.ChangeMessagesResponse(
            messages=[
                wire.ChangedMessage(
                    message_id=unpack_id(each.message_id),
                    outcome=wire.ChangedMessage.Outcome.Name(answer.outcome),
                    at_ms=answer.at_ms,
                )
                for each, answer in answers
            ]
        )


assert {each.name: each.value for each in Outcome}.items() <= dict(wire.ChangedMessage.Outcome.items()).items()
