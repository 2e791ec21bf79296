"""Half messages for tests, and a producer that is asked about them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.forges.messages.letters import told
from support.rigs.broker.rig import TOPIC, EmbeddedRig, an_envelope, until

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.transactions import Check, Half, HalfReceipt
from dmq.broker.transactions.transaction_checks import GIVEN_UP_GROUP
from dmq.store.schema.keys import half_scope
from dmq.trail.events import EventKind

FIRST_MS, EVERY_MS, CHECKS_MAX = 6_000, 30_000, 15
DEAD = f"%DLQ%{GIVEN_UP_GROUP}"


class Producer:
    """One that is connected or not, and remembers what it was asked."""

    def __init__(self, rig: EmbeddedRig, *, is_there: bool = True) -> None:
        self.asked: list[Check] = []
        self.is_there = is_there
        self._broker = rig.broker
        rig.broker.transactions.attach(self)

    def is_live(self, topic: str) -> bool:
        return self.is_there and topic == TOPIC

    async def check(self, check: Check) -> bool:
        self.asked.append(check)
        return self.is_there

    async def heard(self, count: int) -> list[Check]:
        """Wait for so many questions."""
        await until(lambda: len(self.asked) >= count)
        assert len(self.asked) == count
        return self.asked


def a_half(
    message_id: str = "m-1", payload: bytes = b"payload", *, due_ms: int = 0, delay_ms: int = 0, check_after_ms: int = 0
) -> Half:
    """A half message."""
    envelope = an_envelope(message_id, payload=payload, tag="red", deliver_at_ms=due_ms)
    return Half(envelope, delay_ms, check_after_ms)


async def prepare(rig: EmbeddedRig, *halves: Half) -> Sequence[HalfReceipt]:
    """Send half messages in one call."""
    return await rig.broker.transactions.prepare(halves or (a_half(),))


async def prepare_one(rig: EmbeddedRig, message_id: str = "m-1", *, due_ms: int = 0, delay_ms: int = 0) -> str:
    """Send a half message and return its transaction id."""
    (receipt,) = await prepare(rig, a_half(message_id, due_ms=due_ms, delay_ms=delay_ms))
    assert (receipt.message_id, receipt.ended) == (message_id, "")
    return receipt.transaction_id


def halves(rig: EmbeddedRig) -> int:
    """How many half messages wait, as counted."""
    return rig.store.pending().get(half_scope(rig.broker.names.topics[TOPIC].topic_id), 0)


def kinds(rig: EmbeddedRig) -> list[EventKind]:
    """What the trail says of the message, in order."""
    found = [each for kind in EventKind for each in told(rig, kind) if each.message_id]
    return sorted(each.kind for each in found)


async def refusal(rig: EmbeddedRig, transaction_id: str, *, commits: bool) -> Refused:
    """Decide, and return what it is refused with."""
    transactions = rig.broker.transactions
    with pytest.raises(Refused) as refused:
        await (transactions.commit if commits else transactions.roll_back)(TOPIC, transaction_id)
    return refused.value
