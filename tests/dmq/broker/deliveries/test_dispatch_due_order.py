"""Across the queues of a topic the messages that were due first come first, within the bound of GUARANTEES_LIMITS."""

from __future__ import annotations

import pytest
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, ack, an_envelope, every_durable_broker, ids, receive

from broker_adapter.contracts.message import Delivery

pytestmark = pytest.mark.contract

QUEUES, EVERY_MS = 4, 1_000


async def due(rig: EmbeddedRig, queue_ids: list[int]) -> None:
    """Have one message after another in the given queues, each due a second later, and start again."""
    now_ms = rig.clock.now_ms()
    for number, queue_id in enumerate(queue_ids, start=1):
        envelope = an_envelope(f"{number}", deliver_at_ms=now_ms + number * EVERY_MS)
        await rig.broker.send([envelope._replace(queue_id=queue_id)])
    await receive(rig)  # makes the group
    await rig.restart(End.KILL, down_ms=(len(queue_ids) + 1) * EVERY_MS)
    await rig.settle()


async def received(rig: EmbeddedRig, batch: int) -> list[list[Delivery]]:
    """Receive and acknowledge all there is, a batch at a time."""
    found: list[list[Delivery]] = []
    while taken := await receive(rig, batch_max=batch):
        await ack(rig, *taken)
        found.append(list(taken))
    return found


@every_durable_broker(queues=QUEUES)
async def test_the_longest_due_come_first_across_queues(rig: EmbeddedRig) -> None:
    """Uneven queues after a start: each receive takes of several queues, and of the one that is furthest behind."""
    uneven = [2, 0, 0, 1, 3, 3, 1, 1, 2, 0, 1, 3, 3, 1, 3, 2, 2, 0, 3, 1]
    await due(rig, uneven)
    first, *others = [ids(each) for each in await received(rig, 4)]
    assert sorted(first, key=int) == ["1", "2", "4", "5"]
    assert sum(map(len, others)) == len(uneven) - 4
    assert set(others[0]) & {"3", "6"}


@every_durable_broker(queues=QUEUES)
async def test_a_message_that_comes_back_at_once_stops_no_other_queue(rig: EmbeddedRig) -> None:
    """The oldest one is given back each time, and a receive takes one message: those of other queues come, too."""
    await due(rig, [0, 1, 2, 1, 2, 3])
    came: set[str] = set()
    for _ in range(2 * 6):
        (found,) = await receive(rig, batch_max=1)
        came.add(found.message_id)
        if found.message_id == "1":
            await rig.broker.change_invisible(GROUP, TOPIC, found.receipt_handle, 1)
            await rig.pass_ms(1)
        else:
            await ack(rig, found)
        if len(came) == 6:
            break
    assert came == {"1", "2", "3", "4", "5", "6"}
