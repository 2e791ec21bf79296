"""Audit events of one message before their export."""

from __future__ import annotations

import pytest
from support.clients.embedded.admin_answers import ask
from support.forges.messages.letters import a_message, die
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, every_durable_broker

from broker_adapter.contracts.errors import Refused
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.trail import events

pytestmark = pytest.mark.contract
HOUR_MS = 3_600_000


async def found(rig: EmbeddedRig, message_id: str, topic: str = TOPIC) -> wire.ListMessageEventsResponse:
    """Return the events of a message."""
    response: wire.ListMessageEventsResponse = await ask(
        rig, wire.ListMessageEventsRequest(topic=topic, message_id=message_id)
    )
    return response


@every_durable_broker()
async def test_the_events_of_one_message_are_found_before_their_export(rig: EmbeddedRig) -> None:
    """In their order, with the group and the due time; those of other messages and topics are not among them."""
    due_at_ms = rig.clock.now_ms() + HOUR_MS
    await rig.broker.send([a_message("m-10", deliver_at_ms=due_at_ms)])
    await die(rig, a_message("m-1"))
    (scheduled,) = (await found(rig, "m-10")).events
    assert (scheduled.kind, scheduled.due_at_ms, scheduled.at_ms) == ("SCHEDULED", due_at_ms, rig.clock.now_ms())
    died = (await found(rig, "m-1")).events
    assert [(each.kind, each.group) for each in died] == [("QUEUED", ""), ("DEAD_FORWARDED", GROUP)]
    assert [each.sequence for each in died] == sorted(each.sequence for each in died)
    for message_id, topic in (("m-1", "other"), ("unknown", TOPIC)):
        nothing = await found(rig, message_id, topic)
        assert (list(nothing.events), nothing.is_whole) == ([], True)
    with pytest.raises(Refused, match="id is blank"):
        await found(rig, " ")


@every_durable_broker()
async def test_a_call_looks_at_a_bounded_number_of_events(
    rig: EmbeddedRig,
) -> None:
    """The newest ones; the answer says that there are older ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(events, "EVENTS_MAX", 2)
        for number in range(3):
            await rig.broker.send([a_message(f"m-{number}")])
        oldest, newest = await found(rig, "m-0"), await found(rig, "m-2")
    assert (list(oldest.events), oldest.is_whole) == ([], False)
    assert [each.kind for each in newest.events] == ["QUEUED"]
