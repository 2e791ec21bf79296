"""Sending, as every ``PopBroker`` promises it (``broker_adapter.contracts.adapter``): accepted once, never early, all
or none.
"""

from __future__ import annotations

import asyncio

import pytest
from support.rigs.broker.rig import (
    INVISIBLE_MS,
    TOPIC,
    End,
    Rig,
    ack,
    an_envelope,
    every_broker,
    every_durable_broker,
    ids,
    receive,
    receive_one,
    send,
)

from broker_adapter.contracts.limits import MESSAGE_ID_BYTES_MAX

pytestmark = pytest.mark.contract
SOON_MS = 5_000


@every_broker()
async def test_a_message_arrives_as_it_was_sent(rig: Rig) -> None:
    """Payload, id, topic and tag pass untouched, and the delivery says where the receipt said."""
    envelope = an_envelope("0A" * 17, payload=bytes(range(256)), tag="blue")
    (receipt,) = await rig.broker.send([envelope])
    delivery = await receive_one(rig)
    assert (delivery.topic, delivery.message_id, delivery.payload) == (TOPIC, "0A" * 17, bytes(range(256)))
    assert (receipt.message_id, receipt.repeated) == ("0A" * 17, False)
    assert (delivery.queue_id, delivery.queue_offset) == (receipt.queue_id, receipt.queue_offset)
    assert (delivery.delivery_attempt, delivery.invisible_ms) == (1, INVISIBLE_MS)
    assert (delivery.stored_at_ms, delivery.deliver_at_ms) == (rig.clock.now_ms(), 0)


@every_broker()
async def test_ids_of_any_form_come_back_unchanged(rig: Rig) -> None:
    """Clients' 34 hex digits, lower case, other lengths, text of other scripts: an id is opaque."""
    message_ids = [
        "01" + "AB" * 16,
        "01" + "ab" * 16,
        "00" + "AB" * 16,
        "x",
        "Ü-1",
        "7" * MESSAGE_ID_BYTES_MAX,
        "01" + "AB" * 17,
    ]
    await send(rig, *message_ids)
    assert sorted(ids(await receive(rig))) == sorted(message_ids)


@every_durable_broker(fronted=True)
async def test_a_tag_of_any_size_that_the_protocol_takes(rig: Rig) -> None:
    """At once and delayed, before a restart and after it: a filter finds it, and what lies behind it is whole."""
    tags = ("t" * 255, "t" * 256, "\u00fc" * 8192)
    for number, tag in enumerate(tags):
        await rig.broker.send([an_envelope(f"now-{number}", tag=tag, message_group="g", payload=b"now")])
        later_ms = rig.clock.now_ms() + SOON_MS
        await rig.broker.send([an_envelope(f"later-{number}", tag=tag, payload=b"later", deliver_at_ms=later_ms)])
    await rig.restart(End.KILL)
    await rig.pass_ms(SOON_MS)
    for number, tag in enumerate(tags):
        found = await receive(rig, group=f"g-{number}", tags=[tag])
        assert sorted((each.message_id, each.payload) for each in found) == [
            (f"later-{number}", b"later"),
            (f"now-{number}", b"now"),
        ]


@every_broker()
async def test_a_delayed_message_is_invisible_until_its_time(rig: Rig) -> None:
    """Nothing one millisecond before, the message at its millisecond."""
    at_ms = rig.clock.now_ms() + SOON_MS
    (receipt,) = await send(rig, "m-1", deliver_at_ms=at_ms)
    assert (receipt.queue_id, receipt.queue_offset, receipt.repeated) == (-1, -1, False)
    for step in (0, SOON_MS - 1):
        await rig.pass_ms(step)
        assert await receive(rig) in ([], ())
    await rig.pass_ms(1)
    delivery = await receive_one(rig)
    assert (delivery.message_id, delivery.deliver_at_ms, delivery.delivery_attempt) == ("m-1", at_ms, 1)


@every_broker()
async def test_a_time_that_has_come_means_at_once(rig: Rig) -> None:
    """Now and the past are not delays: in the queue on return."""
    now_ms = rig.clock.now_ms()
    for number, at_ms in enumerate((now_ms, now_ms - 1, 1)):
        (receipt,) = await send(rig, f"m-{number}", deliver_at_ms=at_ms)
        assert receipt.queue_offset >= 0
        assert (await receive_one(rig)).deliver_at_ms == at_ms


@every_broker()
async def test_delayed_messages_become_visible_in_the_order_of_their_times(rig: Rig) -> None:
    """Whatever order they were sent in."""
    now_ms = rig.clock.now_ms()
    for delay_ms in (300, 100, 200):
        await send(rig, f"m-{delay_ms}", deliver_at_ms=now_ms + delay_ms)
    seen: list[str] = []
    for _ in range(3):
        await rig.pass_ms(100)
        seen += ids(await receive(rig))
    assert seen == ["m-100", "m-200", "m-300"]


@every_broker()
async def test_a_repeated_send_of_a_waiting_message_is_not_stored_again(rig: Rig) -> None:
    """Same id, waiting: marked repeated, delivered once, at the first time."""
    at_ms = rig.clock.now_ms() + SOON_MS
    await send(rig, "m-1", deliver_at_ms=at_ms)
    for again_at_ms in (at_ms, at_ms + SOON_MS, 0):
        (receipt,) = await send(rig, "m-1", deliver_at_ms=again_at_ms)
        assert receipt[:4] == ("m-1", -1, -1, True)
    assert not await receive(rig)
    await rig.pass_ms(SOON_MS)
    assert (await receive_one(rig)).deliver_at_ms == at_ms
    await rig.pass_ms(SOON_MS)
    assert not await receive(rig)


@every_broker()
async def test_a_repeated_send_of_a_queued_message_gets_the_first_receipt(rig: Rig) -> None:
    """Same place, marked repeated; also once it was delivered and acknowledged."""
    (first,) = await send(rig, "m-1")
    (second,) = await send(rig, "m-1")
    assert second == first._replace(repeated=True)
    await ack(rig, await receive_one(rig))
    (third,) = await send(rig, "m-1")
    assert third == first._replace(repeated=True)
    assert not await receive(rig)


@every_broker()
async def test_a_repeated_send_of_a_handed_over_message_is_not_stored_again(rig: Rig) -> None:
    """Same id, delayed and delivered since: still known."""
    at_ms = rig.clock.now_ms() + SOON_MS
    await send(rig, "m-1", deliver_at_ms=at_ms)
    await rig.pass_ms(SOON_MS)
    await ack(rig, await receive_one(rig))
    for again_at_ms in (at_ms, at_ms + SOON_MS):
        (receipt,) = await send(rig, "m-1", deliver_at_ms=again_at_ms)
        assert receipt.repeated
    await rig.pass_ms(SOON_MS)
    assert not await receive(rig)


@every_broker()
async def test_an_id_twice_in_one_call_is_stored_once(rig: Rig) -> None:
    """Receipts in the order of the call; the second one is the repeated one."""
    receipts = await send(rig, "m-1", "m-2", "m-1")
    assert [(each.message_id, each.repeated) for each in receipts] == [("m-1", False), ("m-2", False), ("m-1", True)]
    assert receipts[2] == receipts[0]._replace(repeated=True)
    assert sorted(ids(await receive(rig))) == ["m-1", "m-2"]


@every_broker()
async def test_ids_are_known_per_topic(rig: Rig) -> None:
    """The same id in another topic is another message."""
    (here,) = await send(rig, "m-1")
    (there,) = await rig.broker.send([an_envelope("m-1", topic="refunds")])
    assert not here.repeated
    assert not there.repeated
    assert ids(await receive(rig)) == ids(await receive(rig, topic="refunds")) == ["m-1"]


@every_broker()
async def test_concurrent_repeats_are_stored_once(rig: Rig) -> None:
    """However many producers' retries are under way at the same time, one is the first."""
    receipts = [(await each)[0] for each in [asyncio.ensure_future(send(rig, "m-1")) for _ in range(20)]]
    assert sorted(each.repeated for each in receipts) == [False] + [True] * 19
    assert len({(each.queue_id, each.queue_offset) for each in receipts}) == 1
    assert ids(await receive(rig)) == ["m-1"]
