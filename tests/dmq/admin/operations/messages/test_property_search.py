"""Search by an indexed user property: a message is found at each place where it is, page by page."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.clients.embedded.admin_answers import ask
from support.clients.embedded.failing import change
from support.forges.messages.half import a_half, prepare
from support.forges.messages.letters import PURGE, REDRIVE, finish
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, every_durable_broker, receive

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Envelope, Message, pack_id
from broker_adapter.wire.mapping import encode
from dmq.admin import admin_v1 as wire
from dmq.broker.delayed.changes import Meant
from dmq.broker.topics import INDEX_STAYS, IndexChange, KeepChange
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.properties import PROPERTY

pytestmark = pytest.mark.contract
HOUR_MS = 3_600_000
Found = tuple[str, str, str]  # state, group and id


def an_order(message_id: str, order: str, *, deliver_at_ms: int = 0) -> Envelope:
    """A message of an order."""
    properties = {"order-id": order, "color": "red"}
    message = Message(topic=TOPIC, message_id=message_id, body=b"b", properties=properties, deliver_at_ms=deliver_at_ms)
    return encode(message)


async def index(rig: EmbeddedRig, *names: str) -> None:
    """Index properties of the topic, which exists then."""
    await rig.broker.route(TOPIC)
    await ask(rig, wire.SetTopicRequest(topic=TOPIC, index_properties=names))


async def pages(rig: EmbeddedRig, value: str, limit: int = 100) -> list[Sequence[wire.FoundMessage]]:
    """All pages of one value."""
    found: list[Sequence[wire.FoundMessage]] = []
    request = wire.FindMessagesRequest(topic=TOPIC, property="order-id", value=value, limit=limit)
    while True:
        answer = await ask(rig, request)
        assert len(answer.messages) <= limit
        found.append(answer.messages)
        request.token = answer.next_token
        if not answer.next_token:
            return found


async def places(rig: EmbeddedRig, value: str) -> list[Found]:
    """State, group and id at each place of a value."""
    messages = [each for page in await pages(rig, value) for each in page]
    assert all(each.content.properties["order-id"] == value for each in messages)
    return [(wire.MessageState.Name(each.state), each.group, each.message_id) for each in messages]


def rows(rig: EmbeddedRig) -> int:
    """Number of rows of properties."""
    stop = bytes((PROPERTY[0] + 1,))
    return len(rig.store.scan(Family.PROPERTY, PROPERTY, stop, limit=10_000).rows)


@every_durable_broker()
async def test_a_message_is_found_wherever_it_is(rig: EmbeddedRig) -> None:
    """Pending, rescheduled, queued, retried, ready for the next attempt and dead, also after a kill."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    await index(rig, "order-id")
    now_ms = rig.clock.now_ms()
    await rig.broker.send([an_order("m", "42", deliver_at_ms=now_ms + HOUR_MS), an_order("other", "43")])
    assert await places(rig, "42") == [("WAITING", "", "m")]
    await rig.broker.delayed.reschedule(TOPIC, [Meant(pack_id("m"))], now_ms + 1_000)
    await rig.restart(End.KILL)
    assert await places(rig, "42") == [("WAITING", "", "m")]
    await rig.pass_ms(1_000)
    assert await places(rig, "42") == [("QUEUED", "", "m")]
    for delivery in await receive(rig, renew_for="client"):
        await change(rig, delivery)
    assert await places(rig, "42") == [("RETRYING", GROUP, "m"), ("QUEUED", "", "m")]
    await rig.pass_ms(1_000)
    assert sorted(await places(rig, "42")) == [("QUEUED", "", "m"), ("READY", GROUP, "m")]
    for delivery in await receive(rig, renew_for="client"):
        await change(rig, delivery)
    await rig.restart(End.KILL)
    assert sorted(await places(rig, "42")) == [("DEAD", GROUP, "m"), ("QUEUED", "", "m")]
    assert sorted(await places(rig, "43")) == [("DEAD", GROUP, "other"), ("QUEUED", "", "other")]
    assert await places(rig, "44") == []


@every_durable_broker()
async def test_a_redriven_letter_and_its_child_are_found_and_a_purged_one_is_not(rig: EmbeddedRig) -> None:
    """A redrive makes another message; a purge deletes the properties."""
    await index(rig, "order-id")
    await rig.broker.send([an_order("m", "42"), an_order("n", "43")])
    for delivery in await receive(rig):
        await rig.broker.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1)
    await finish(rig, REDRIVE)
    found = [each for page in await pages(rig, "42") for each in page]
    assert sorted((wire.MessageState.Name(each.state), each.outcome) for each in found) == [
        *(("DEAD", "redriven"), ("QUEUED", ""), ("READY", "")),
    ]
    for delivery in await receive(rig):
        await rig.broker.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1)
    await finish(rig, PURGE)
    assert sorted(state for state, _, _ in await places(rig, "42")) == ["DEAD", "QUEUED"]


@every_durable_broker()
async def test_a_half_message_is_found_until_its_transaction_ends(rig: EmbeddedRig) -> None:
    """It is WAITING and marked as half."""
    await index(rig, "order-id")
    await prepare(rig, a_half("h", an_order("h", "42").payload))
    ((found,),) = await pages(rig, "42")
    assert (found.state, found.is_half, found.message_id) == (wire.WAITING, True, "h")


@every_durable_broker()
async def test_an_ended_message_is_not_found_and_has_no_row(rig: EmbeddedRig) -> None:
    """Cancelled, or removed from its queue by retention; a removed topic has no row either."""
    await index(rig, "order-id", "color")
    await rig.broker.send([an_order("late", "42", deliver_at_ms=rig.clock.now_ms() + HOUR_MS), an_order("m", "42")])
    assert rows(rig) == 4
    await rig.broker.delayed.cancel(TOPIC, [Meant(pack_id("late"))])
    assert await places(rig, "42") == [("QUEUED", "", "m")]
    await rig.broker.operator.set_topic(TOPIC, keep=KeepChange(1_000))
    rig.clock.advance(2_000)
    await rig.broker.retention.turn()
    assert rows(rig) == 0
    await rig.broker.send([an_order("n", "42")])
    assert rows(rig) == 2
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert rig.store.scan(Family.PROPERTY, b"", b"\xff", limit=10).rows == []


@every_durable_broker()
async def test_pages_of_a_frequent_value_are_complete(rig: EmbeddedRig) -> None:
    """Each message once, with pages of any size; also if pending messages are delivered between two pages."""
    await index(rig, "order-id")
    at_ms = rig.clock.now_ms() + 1_000
    ids = {f"m-{number}" for number in range(150)}
    await rig.broker.send([an_order(each, "42", deliver_at_ms=at_ms) for each in sorted(ids)])
    for limit in (1, 7, 64, 150):
        found = [each.message_id for page in await pages(rig, "42", limit) for each in page]
        assert (len(found), set(found)) == (150, ids)
    first = await ask(rig, wire.FindMessagesRequest(topic=TOPIC, property="order-id", value="42", limit=50))
    await rig.pass_ms(1_000)
    request = wire.FindMessagesRequest(
        topic=TOPIC, property="order-id", value="42", limit=1_000, token=first.next_token
    )
    assert {each.message_id for each in (await ask(rig, request)).messages} == ids


@every_durable_broker()
async def test_a_list_of_messages_has_a_term_for_a_property(rig: EmbeddedRig) -> None:
    """Pending and queued messages of the topic, page by page, with the other terms of the query."""
    await index(rig, "order-id")
    late_ms = rig.clock.now_ms() + HOUR_MS
    await rig.broker.send([an_order(f"w-{at}", "42", deliver_at_ms=late_ms) for at in range(3)])
    await rig.broker.send([an_order(f"q-{at}", "42") for at in range(3)] + [an_order("other", "43")])
    for delivery in await receive(rig, batch_max=1):
        await rig.broker.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1)

    async def listed(query: str, limit: int = 100) -> list[str]:
        found: list[str] = []
        request = wire.ListMessagesRequest(topic=TOPIC, query=query, limit=limit)
        while True:
            answer = await ask(rig, request)
            found += [each.message_id for each in answer.messages]
            request.token = answer.next_token
            if not answer.next_token:
                return sorted(found)

    for limit in (1, 2, 100):
        assert await listed("property:order-id=42", limit) == ["q-0", "q-1", "q-2", "w-0", "w-1", "w-2"]
    assert await listed("property:order-id=42 state:waiting") == ["w-0", "w-1", "w-2"]
    assert await listed("property:order-id=42 due-before:+1m") == ["q-0", "q-1", "q-2"]
    assert await listed("property:order-id=42 tag:none") == []
    assert await listed("id:w-1 property:order-id=42") == ["w-1"]
    assert await listed("id:w-1 property:order-id=43") == []
    for query, told in (
        ("property:order-id", "NAME=VALUE"),
        ("property:size=1", "not indexed"),
        ("property:order-id=42 order:newest", "in the order of their index"),
    ):
        with pytest.raises(Refused, match=told):
            await listed(query)


@every_durable_broker()
async def test_a_property_is_indexed_from_the_change_on(rig: EmbeddedRig) -> None:
    """A pending message is found once it is delivered; without the index nothing is found, and no row is left."""
    await rig.broker.send([an_order("old", "42"), an_order("late", "42", deliver_at_ms=rig.clock.now_ms() + 1_000)])
    await index(rig, "order-id", "color")
    assert await places(rig, "42") == []
    await rig.pass_ms(1_000)
    await rig.restart(End.KILL)
    assert await places(rig, "42") == [("QUEUED", "", "late")]
    await ask(rig, wire.SetTopicRequest(topic=TOPIC, no_index_properties=["order-id"]))
    assert rows(rig) == 1
    with pytest.raises(Refused, match=r"not indexed in the topic.*color"):
        await pages(rig, "42")
    topic = (await ask(rig, wire.GetTopicRequest(topic=TOPIC))).topic
    assert list(topic.index_properties) == ["color"]


@every_durable_broker()
async def test_hostile_values_are_values(rig: EmbeddedRig) -> None:
    """An empty one, one of 15,000 bytes, and one with bytes of zero and delimiters; each has a row of one size."""
    await index(rig, "order-id")
    values = ("", "x" * 15_000, "\0\xff=\n'", "42")
    await rig.broker.send([an_order(f"m-{at}", value) for at, value in enumerate(values)])
    for at, value in enumerate(values):
        assert [each for _, _, each in await places(rig, value)] == [f"m-{at}"]
    assert {len(key) for key, _ in rig.store.scan(Family.PROPERTY, PROPERTY, b"q", limit=10).rows} == {44}


def test_an_invalid_change_of_the_index_is_refused() -> None:
    """Names that the query cannot have, too many, and contradictions."""
    assert IndexChange(("b", "a")).applied_to(("c",)) == ("a", "b", "c")
    assert INDEX_STAYS.applied_to(("a",)) == ("a",)
    for change_, told in (
        (IndexChange(("",)), "not the name of a property"),
        (IndexChange(("a=b",)), "not the name of a property"),
        (IndexChange(("x" * 256,)), "not the name of a property"),
        (IndexChange((), ("z",)), "the property is not indexed"),
        (IndexChange(("a",), ("a",)), "is to be indexed, too"),
        (IndexChange(tuple("abcdefghi")), "too many indexed properties"),
    ):
        with pytest.raises(Refused, match=told):
            change_.applied_to(("a",))


@every_durable_broker()
async def test_a_bad_request_is_refused(rig: EmbeddedRig) -> None:
    """Unknown topic, unknown property, damaged token; no index of a dead-letter topic."""
    await index(rig, "order-id")
    for request, told in (
        (wire.FindMessagesRequest(topic="none", property="order-id", limit=1), "topic not found"),
        (wire.FindMessagesRequest(topic=TOPIC, property="size", limit=1), "not indexed"),
        (wire.FindMessagesRequest(topic=TOPIC, property="order-id", limit=1, token="zz"), "token is damaged"),
        (wire.FindMessagesRequest(topic=TOPIC, property="order-id", value="x" * 20_000, limit=1), "too long"),
        (wire.FindMessagesRequest(topic=TOPIC, property="order-id"), "page size"),
    ):
        with pytest.raises(Refused, match=told):
            await ask(rig, request)
