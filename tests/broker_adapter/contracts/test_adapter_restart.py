"""What a durable ``PopBroker`` promises beyond one run, however that run ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    Make,
    ack,
    an_envelope,
    ids,
    on_memory,
    on_rocksdb,
    play,
    receive,
    receive_one,
    send,
)

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Delivery, unpack_id
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract
SOON_MS = 5_000
ENDS = [
    pytest.param(on_rocksdb, End.CLOSE, id="rocksdb-close"),
    pytest.param(on_rocksdb, End.KILL, id="rocksdb-kill"),
    pytest.param(on_memory, End.CLOSE, id="memory-close"),
    pytest.param(on_memory, End.KILL, id="memory-kill"),
    pytest.param(on_memory, End.POWER_LOSS, id="memory-power-loss"),
]
Restart = Callable[[], Awaitable[None]]


def every_end(scenario: Callable[[EmbeddedRig, Restart], Awaitable[None]]) -> Callable[..., None]:
    """Run a scenario for each way a run can end."""

    def test(make: Make, end: End, tmp_path: Path) -> None:
        async def with_end(rig: EmbeddedRig) -> None:
            await scenario(rig, lambda: rig.restart(end))

        asyncio.run(play(make(tmp_path, 4), with_end))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return pytest.mark.parametrize(("make", "end"), ENDS)(test)


@every_end
async def test_everything_accepted_outlives_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Queued and delayed messages, each once, the delayed ones not before their time."""
    await send(rig, *(f"queued-{number}" for number in range(10)))
    at_ms = rig.clock.now_ms() + SOON_MS
    await send(rig, *(f"delayed-{number}" for number in range(10)), deliver_at_ms=at_ms)
    await restart()
    await rig.settle()
    assert sorted(ids(await receive(rig))) == [f"queued-{number}" for number in range(10)]
    rig.clock.advance(SOON_MS)
    await restart()
    await rig.settle()
    delayed = [each for each in await receive(rig) if each.delivery_attempt == 1 and each.deliver_at_ms]
    assert sorted(ids(delayed)) == [f"delayed-{number}" for number in range(10)]


@every_end
async def test_a_handle_of_a_message_with_a_long_id_outlives_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Handles carry a digest of such an id: what is hidden with one is looked up again, and not another message."""
    await send(rig, "7" * 254)
    found = await receive_one(rig)
    await restart()
    await rig.broker.change_invisible(GROUP, TOPIC, found.receipt_handle, SOON_MS)
    await rig.pass_ms(SOON_MS)
    assert ids([await receive_one(rig)]) == ["7" * 254]


@every_end
async def test_a_hand_over_is_not_repeated(rig: EmbeddedRig, restart: Restart) -> None:
    """What reached its queue before the end is there once."""
    await send(rig, "m-1", "m-2", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
    await rig.pass_ms(SOON_MS)
    for _ in range(2):
        await restart()
        await rig.settle()
    assert sorted(ids(await receive(rig))) == ["m-1", "m-2"]


@every_end
async def test_ids_are_still_known(rig: EmbeddedRig, restart: Restart) -> None:
    """A producer whose answer was lost with the run repeats its send; nothing is stored twice."""
    at_ms = rig.clock.now_ms() + SOON_MS
    (queued,) = await send(rig, "queued")
    await send(rig, "waiting", deliver_at_ms=at_ms)
    await restart()
    assert list(await send(rig, "queued")) == [queued._replace(repeated=True)]
    assert [each[:4] for each in await send(rig, "waiting", deliver_at_ms=at_ms)] == [("waiting", -1, -1, True)]
    await rig.pass_ms(SOON_MS)
    assert sorted(ids(await receive(rig))) == ["queued", "waiting"]


@every_end
async def test_acks_are_durable(rig: EmbeddedRig, restart: Restart) -> None:
    """In any order, with holes, in many runs: exactly the others come back."""
    await send(rig, *(f"m-{number:02}" for number in range(32)))
    deliveries = await receive(rig)
    left = set(ids(deliveries))
    for step in (3, 5, 2):
        finished = [each for each in deliveries if each.message_id in left][::step]
        assert set(await ack(rig, *finished)) == {None}
        left -= set(ids(finished))
        await restart()
    deliveries = await receive(rig)
    assert set(ids(deliveries)) == left
    assert len(deliveries) == len(left)


@every_end
async def test_attempts_are_durable(rig: EmbeddedRig, restart: Restart) -> None:
    """Expired and given-back deliveries come back with the attempt that was due."""
    await send(rig, "expired", "back")
    by_id = {each.message_id: each for each in await receive(rig)}
    await rig.broker.change_invisible(GROUP, TOPIC, by_id["back"].receipt_handle, 0)
    await rig.pass_ms(INVISIBLE_MS)
    await restart()
    assert {each.message_id: each.delivery_attempt for each in await receive(rig)} == {"expired": 2, "back": 2}


@every_end
async def test_a_renewed_lease_is_still_a_lease(rig: EmbeddedRig, restart: Restart) -> None:
    """Hidden until its time, its handles good, its end an attempt."""
    await send(rig, "m-1", "m-2")
    first, second = await receive(rig)
    for each in (first, second):
        await rig.broker.change_invisible(GROUP, TOPIC, each.receipt_handle, INVISIBLE_MS * 4)
    await restart()
    await rig.pass_ms(INVISIBLE_MS * 4 - 1)
    assert not await receive(rig)
    assert list(await ack(rig, first)) == [None]
    await rig.pass_ms(1)
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == (second.message_id, 2)


@every_end
async def test_a_suspended_lease_is_still_suspended(rig: EmbeddedRig, restart: Restart) -> None:
    """Its end costs no attempt in the next run either."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, SOON_MS, suspend=True)
    await restart()
    await receive(rig)
    await rig.pass_ms(SOON_MS)
    assert (await receive_one(rig)).delivery_attempt == 1


@every_end
async def test_a_plain_lease_ends_with_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Its message is there at once, and the hand-out that nobody can finish any more is not counted."""
    await send(rig, "m-1")
    await receive_one(rig)
    await restart()
    assert (await receive_one(rig)).delivery_attempt == 1


@every_end
async def test_a_handle_from_before_is_honoured(rig: EmbeddedRig, restart: Restart) -> None:
    """A consumer that worked through the restart finishes its message; so does one that only wants more time."""
    await send(rig, "m-1", "m-2", "m-3")
    first, second, third = await receive(rig)
    await restart()
    assert list(await ack(rig, first)) == [None]
    await rig.broker.change_invisible(GROUP, TOPIC, second.receipt_handle, INVISIBLE_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, third.receipt_handle, 0)
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == (third.message_id, 2)
    assert list(await ack(rig, second, again)) == [None, None]
    await restart()
    assert not await receive(rig)


@every_end
async def test_an_ack_with_a_handle_from_before_names_its_message(rig: EmbeddedRig, restart: Restart) -> None:
    """The trail says which message was finished also when the run that handed it out is over; twice is once."""
    await send(rig, "m-1", "m-2")
    first, second = await receive(rig)
    await restart()
    assert list(await ack(rig, first, second, first)) == [None] * 3
    acked = [told.event for told in read_outbox(rig.store) if told.event.kind is EventKind.ACKED]
    assert sorted((unpack_id(each.message_id), each.attempt) for each in acked) == [("m-1", 1), ("m-2", 1)]


async def retried_one(rig: EmbeddedRig) -> Delivery:
    """The second delivery of m-1: it was given back, and came back as a retry, in the lane of its group."""
    await send(rig, "m-1")
    (first,) = await receive(rig, renew_for="client-1")
    await rig.broker.send_back(GROUP, TOPIC, first.receipt_handle, 1)
    await rig.pass_ms(SOON_MS)
    return await receive_one(rig)


@every_end
async def test_an_ack_with_a_handle_from_before_counts_all_attempts(rig: EmbeddedRig, restart: Restart) -> None:
    """Also those that were made before the message came back as a retry, somewhere else."""
    second = await retried_one(rig)
    assert second.delivery_attempt == 2
    await restart()
    assert list(await ack(rig, second)) == [None]
    assert [each.event.attempt for each in read_outbox(rig.store) if each.event.kind is EventKind.ACKED] == [2]


@every_end
async def test_the_end_of_a_suspended_lease_from_before_names_its_message(rig: EmbeddedRig, restart: Restart) -> None:
    """And counts all attempts; the lease itself is a row that knows neither."""
    second = await retried_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, second.receipt_handle, SOON_MS, suspend=True)
    await restart()
    await receive(rig)
    await rig.pass_ms(SOON_MS)
    assert (await receive_one(rig)).delivery_attempt == 2
    (ended,) = (told.event for told in read_outbox(rig.store) if told.event.kind is EventKind.LEASE_EXPIRED)
    assert (unpack_id(ended.message_id), ended.attempt) == ("m-1", 2)


@every_end
async def test_a_handle_from_before_is_refused_once_the_message_was_handed_out_again(
    rig: EmbeddedRig, restart: Restart
) -> None:
    """Two consumers never finish the same delivery."""
    await send(rig, "m-1")
    stale = await receive_one(rig)
    await restart()
    current = await receive_one(rig)
    assert [type(each) for each in await ack(rig, stale)] == [Refused]
    assert list(await ack(rig, current)) == [None]


@every_end
async def test_the_last_handle_is_honoured_after_any_earlier_return(rig: EmbeddedRig, restart: Restart) -> None:
    """The second hand-out of a message is a plain lease like any other."""
    await send(rig, "m-1")
    await rig.broker.change_invisible(GROUP, TOPIC, (await receive_one(rig)).receipt_handle, 0)
    second = await receive_one(rig)
    await restart()
    assert list(await ack(rig, second)) == [None]
    assert not await receive(rig)


@every_end
async def test_names_outlive_the_run(rig: EmbeddedRig, restart: Restart) -> None:
    """Topics and groups keep their ids, and new ones get ids of their own."""
    for number in range(3):
        topic = f"topic-{number}"
        await rig.broker.send([an_envelope(f"m-{number}", topic=topic)])
        await rig.broker.ensure_group(f"group-{number}")
        await restart()
    for number in range(3):
        deliveries = await receive(rig, topic=f"topic-{number}", group=f"group-{number}")
        assert ids(deliveries) == [f"m-{number}"]
    assert len({topic.topic_id for topic in rig.broker.names.topics.values()}) == 3
    assert not {topic.topic_id for topic in rig.broker.names.topics.values()} & {
        group.group_id for group in rig.broker.names.groups.values()
    }


@every_end
async def test_offsets_go_on_where_they_were(rig: EmbeddedRig, restart: Restart) -> None:
    """No offset is used twice, none is left out."""
    offsets: list[tuple[int, int]] = []
    for run in range(3):
        receipts = await send(rig, *(f"m-{run}-{number}" for number in range(8)))
        offsets += [(each.queue_id, each.queue_offset) for each in receipts]
        await restart()
    per_queue = {queue: sorted(offset for at, offset in offsets if at == queue) for queue, _ in offsets}
    assert all(found == list(range(len(found))) for found in per_queue.values())
    assert sum(map(len, per_queue.values())) == 24
