"""RPC of ``AdminService`` that cancels, reschedules or fires delayed messages."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.contracts.message import pack_id, unpack_id
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import validate
from dmq.broker import EmbeddedBroker
from dmq.broker.delayed import Changed, ChangeOutcome, HeldBy, Meant


class ChangeCalls:
    """RPC of changes. Raise ``Refused`` for invalid input; exceptions of the broker pass through."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    async def change_messages(self, request: wire.ChangeMessagesRequest) -> wire.ChangeMessagesResponse:
        """Cancel, reschedule or fire pending messages."""
        topic, kind, delayed = check_topic(request.topic), validate.check_change(request), self._broker.delayed
        named = [Meant(pack_id(validate.check_message_id(each))) for each in request.message_ids]
        named += [self._broker.recalls.meant(topic, each) for each in request.recall_handles]
        meant = list(dict.fromkeys(named))

        async def change(meant: Sequence[Meant]) -> Sequence[Changed]:
            if kind == "cancel":
                return await delayed.cancel(topic, meant)
            if kind == "fire":
                return await delayed.fire(topic, meant)
            return await delayed.reschedule(topic, meant, request.deliver_at_ms)

        changed = dict(zip(meant, await change(meant) if meant else (), strict=True))
        answers = [(each.message_id, changed[each], "") for each in named]
        if request.own_keys:
            own_keys = list(dict.fromkeys(request.own_keys))
            found = dict(zip(own_keys, await delayed.by_key(topic, own_keys, change), strict=True))
            answers += [(*found[own_key], own_key) for own_key in request.own_keys]
        held: Sequence[HeldBy] = [HeldBy.NOTHING] * len(answers)
        if kind != "cancel":
            held = await delayed.held_by(topic, [answer for _, answer, _ in answers])
        return wire.ChangeMessagesResponse(
            messages=[_shown(*each, by) for each, by in zip(answers, held, strict=True)],
        )


def _shown(message_id: bytes, changed: Changed, own_key: str, held_by: HeldBy) -> wire.ChangedMessage:
    return wire.ChangedMessage(
        message_id=unpack_id(message_id) if message_id else "",
        outcome=wire.ChangedMessage.Outcome.Name(changed.outcome),
        at_ms=changed.at_ms,
        own_key=own_key,
        held_by=wire.ChangedMessage.HeldBy.Name(held_by),
    )


assert {each.name: each.value for each in ChangeOutcome}.items() <= dict(wire.ChangedMessage.Outcome.items()).items()
assert {each.name: each.value for each in HeldBy} == dict(wire.ChangedMessage.HeldBy.items())
