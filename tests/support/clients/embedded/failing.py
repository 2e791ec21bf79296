"""Consumers that fail, for the tests of what a broker does then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.rigs.broker.rig import GROUP, INVISIBLE_MS, TOPIC, Rig, ack, receive

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import DeadLetterFacts, Delivery

CLIENT = "client-1"
UNDERTAKER = "undertaker"  # the group that reads dead letters
DELAYS_MS = (1_000, 5_000)
ATTEMPTS = 3  # the first, and one after each delay


async def pushed(rig: Rig, *, group: str = GROUP, topic: str = TOPIC, queue_id: int = -1) -> Sequence[Delivery]:
    """What a push consumer is handed out now."""
    return await receive(rig, group=group, topic=topic, queue_id=queue_id, renew_for=CLIENT)


async def pushed_one(rig: Rig, *, group: str = GROUP, topic: str = TOPIC) -> Delivery:
    """The one message that a push consumer is handed out now."""
    (delivery,) = await pushed(rig, group=group, topic=topic)
    return delivery


async def change(
    rig: Rig, delivery: Delivery, invisible_ms: int = 0, *, suspend: bool = False, group: str = GROUP
) -> str:
    """Change the invisible duration of a delivery, by which a push consumer says that it failed."""
    return await rig.broker.change_invisible(
        group, delivery.topic, delivery.receipt_handle, invisible_ms, suspend=suspend
    )


async def give_up(rig: Rig, delivery: Delivery, attempts: int = 1, *, group: str = GROUP) -> None:
    """Forward a delivery to the dead-letter queue, as its consumer's ``attempts``-th try."""
    await rig.broker.dead_letter(group, delivery.topic, delivery.receipt_handle, attempts=attempts)


async def comes_after(rig: Rig, ms: int, *, group: str = GROUP, topic: str = TOPIC) -> Delivery:
    """Let ``ms`` pass and return the one message that comes then, and not a millisecond before."""
    if ms:
        await rig.pass_ms(ms - 1)
        assert not await pushed(rig, group=group, topic=topic), f"earlier than {ms} ms"
        await rig.pass_ms(1)
    return await pushed_one(rig, group=group, topic=topic)


async def dead_letters(rig: Rig, *, group: str = GROUP) -> list[tuple[str, DeadLetterFacts]]:
    """Take what is in a group's dead-letter queue, for good: message ids and facts."""
    topic = f"%DLQ%{group}"
    found = await receive(rig, group=UNDERTAKER, topic=topic)
    await ack(rig, *found, group=UNDERTAKER, topic=topic)
    letters = []
    for each in found:
        assert (each.topic, each.delivery_attempt) == (topic, 1)
        assert each.dead_letter is not None
        letters.append((each.message_id, each.dead_letter))
    return letters


async def is_over(rig: Rig, *, group: str = GROUP, topic: str = TOPIC) -> bool:
    """Say whether nothing comes to a group any more, however long it waits."""
    for _ in range(3):
        await rig.pass_ms(INVISIBLE_MS + max(DELAYS_MS))
        if await receive(rig, group=group, topic=topic):
            return False
    return True


async def is_refused(rig: Rig, delivery: Delivery, *, group: str = GROUP) -> bool:
    """Say whether the handle of a delivery is good for nothing, whatever it is used for."""
    (result,) = await ack(rig, delivery, group=group, topic=delivery.topic)
    if not isinstance(result, Refused):
        return False
    with pytest.raises(Refused) as hidden:
        await change(rig, delivery, group=group)
    with pytest.raises(Refused) as given_up:
        await give_up(rig, delivery, group=group)
    return result.rule is hidden.value.rule is given_up.value.rule is Rule.RECEIPT_HANDLE
