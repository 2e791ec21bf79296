"""Leases of the embedded broker: their bound, those that it renews by itself, and races around their end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clients.embedded.admin_answers import ask
from support.models.broker.trail import read_facts
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    play,
    receive,
    receive_one,
    send,
)

from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from broker_adapter.contracts.message import Delivery, pack_id
from broker_adapter.runtime import live_clients
from dmq.admin import admin_v1 as wire
from dmq.broker.deliveries.dispatch import HandOut
from dmq.broker.failures.failures import POSTPONED_MS
from dmq.broker.groups import group_queue, subscriptions
from dmq.broker.groups import lease_timers as lease_ends
from dmq.broker.groups.group_queue import DeliveryLease
from dmq.broker.groups.lease_timers import IN_HAND_SHARE, TIDY_AGAIN_S
from dmq.broker.groups.subscription import GroupSubscription, SubscribedQueue
from dmq.broker.operations.admin import END
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.writer.operations import Put
from dmq.trail.events import EventKind
from retry.flow import Failure, Outcome

pytestmark = pytest.mark.contract
SOON_MS = 5_000


async def pass_time(rig: EmbeddedRig, ms: int, *, seen: str = "") -> None:
    """Let time pass in steps in which a living client sends its heartbeat."""
    while ms > 0:
        step = min(ms, 10_000)
        ms -= step
        if seen:
            rig.broker.client_seen(seen)
        await rig.pass_ms(step)


def test_leases_of_all_groups_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds very many gets no more; everybody else gets a batch, and all goes on once they are finished."""
    monkeypatch.setattr(lease_ends, "IN_HAND_MAX", 100)

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, *(f"m-{number}" for number in range(200)))
        greedy = [each for _ in range(4) for each in await receive(rig, batch_max=25, group="greedy")]
        assert len(greedy) == 100
        with pytest.raises(Overloaded, match="messages in hand"):
            await receive(rig, batch_max=25, group="greedy")
        honest = await receive(rig, batch_max=50)
        assert len(honest) == IN_HAND_SHARE
        with pytest.raises(Overloaded):
            await receive(rig)
        await ack(rig, *honest)
        assert len(await receive(rig, batch_max=2)) == 2
        await ack(rig, *greedy[:50], group="greedy")
        rig.clock.advance(round(TIDY_AGAIN_S * 1000))  # it is looked through again, seldom
        assert len(await receive(rig, batch_max=25, group="greedy")) == 25
        await rig.restart(End.KILL)
        assert len(await receive(rig, batch_max=100, group="greedy")) == 100

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


def test_messages_waiting_for_their_message_group_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it a group looks at a batch of a queue, whose order goes on; what is removed or reset makes room."""
    monkeypatch.setattr(group_queue, "REMEMBERED_MAX", 100)

    async def scenario(rig: EmbeddedRig) -> None:
        def parked(group: str) -> int:
            names = rig.broker.names
            found = rig.broker.subscriptions.get(names.groups[group].group_id, names.topics[TOPIC].topic_id)
            return sum(queue.order.parked_count for queue in found.queues) if found is not None else 0

        await rig.broker.send([an_envelope(f"m-{number}", message_group="all in a line") for number in range(300)])
        heads = {group: (await receive(rig, group=group, batch_max=1))[0] for group in ("greedy", GROUP)}
        for group in heads:
            for _ in range(20):
                assert not await receive(rig, group=group)
        first = heads[GROUP]
        assert 100 <= parked("greedy") < 100 + 32
        assert 32 <= parked(GROUP) < 64
        for number in range(1, 100):
            await ack(rig, first)
            (first,) = await receive(rig, batch_max=1)
            assert first.message_id == f"m-{number}"
        await rig.broker.operator.reset_group("greedy", TOPIC, END)
        for _ in range(20):
            assert not await receive(rig)
        assert parked(GROUP) > 100

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


def test_returned_messages_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it a group gets what came back and nothing new, also after a restart; what is finished makes room."""
    monkeypatch.setattr(group_queue, "REMEMBERED_MAX", 100)

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, *(f"m-{number}" for number in range(300)))
        taken = [each.message_id for _ in range(4) for each in await receive(rig)]
        done: set[str] = set()
        again: list[Delivery] = []
        for end in (None, End.KILL, End.CLOSE):
            await pass_time(rig, INVISIBLE_MS + 1_000)
            if end is not None:
                await rig.restart(end)
            again = [each for _ in range(8) for each in await receive(rig)]
            assert set(ids(again)) <= set(taken), end
            assert len(again) >= 32
        while left := 300 - len(done):
            found = await receive(rig)
            await ack(rig, *again, *found)
            done |= {*ids(again), *ids(found)}
            again = []
            assert len(done) > 300 - left

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


def test_finished_leases_are_forgotten_before_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that finishes at once and asks for twelve hours each time costs no memory for twelve hours."""
    monkeypatch.setattr(lease_ends, "_TIDY_AT_MIN", 64)

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, *(f"m-{number}" for number in range(1_000)))
        lengths = [*range(1_000, 21_000, 1_000)]
        random.Random(7).shuffle(lengths)
        kept: dict[int, str] = {}
        for invisible_ms in lengths:
            (one,) = await receive(rig, batch_max=1, invisible_ms=invisible_ms)
            kept[invisible_ms] = one.message_id
            for length in (invisible_ms + 30_000, invisible_ms + 20_000):
                await ack(rig, *await receive(rig, batch_max=20, invisible_ms=length))
        assert len(rig.broker.lease_ends._timers._heap) <= 64 + 1
        for invisible_ms in sorted(lengths):
            await rig.pass_ms(1_000)
            assert kept[invisible_ms] in ids(await receive(rig, batch_max=1))

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


def test_a_lease_ends_in_its_time_if_its_receive_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the middle of a receive leaves no message of it with nobody for ever."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1", "m-2", "m-3")
        deliver, calls = HandOut._delivery, iter((False, True))

        def failing(*args: object) -> object:
            if next(calls):
                raise RuntimeError("a message that cannot be handed out")
            return deliver(*args)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(HandOut, "_delivery", failing)
            with pytest.raises(RuntimeError):
                await receive(rig, invisible_ms=SOON_MS)
        await rig.pass_ms(SOON_MS)
        assert sorted(ids(await receive(rig))) == ["m-1", "m-2", "m-3"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


@every_durable_broker(queues=2)
async def test_all_leases_of_a_receive_end(rig: EmbeddedRig) -> None:
    """A receive that chooses among uneven queues twice, with time in between: one timer covers all of its leases."""
    for number in range(6):
        await rig.broker.send([an_envelope(f"{number}")._replace(queue_id=int(number > 0))])
    choose = GroupSubscription.choose

    def choose_slowly(
        found: GroupSubscription, available: Sequence[SubscribedQueue], limit: int
    ) -> Sequence[tuple[SubscribedQueue, int]]:
        rig.clock.advance(1)
        return choose(found, available, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupSubscription, "choose", choose_slowly)
        assert len(await receive(rig, batch_max=6)) == 6
    for ms in (INVISIBLE_MS - 2, 1, 1):
        await rig.pass_ms(ms)
    assert ids(await receive(rig, batch_max=6)) == ["0", "1", "2", "3", "4", "5"]


@every_durable_broker()
async def test_a_lease_is_renewed_while_its_client_lives(rig: EmbeddedRig) -> None:
    """No attempt is spent, the first handle stays good, and the ack ends it."""
    await send(rig, "m-1")
    (delivery,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-1")
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS * 10, seen="client-1")
    assert not await receive(rig)
    assert list(await ack(rig, delivery)) == [None]
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS * 2, seen="client-1")
    assert not await receive(rig)


@every_durable_broker()
async def test_renewing_ends_after_three_hours(rig: EmbeddedRig) -> None:
    """A consumer that hangs for ever does not keep its message for ever, nor for a renewal longer."""
    await send(rig, "m-1")
    await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS * 3 // 4, renew_for="client-1")
    await pass_time(rig, AUTO_RENEW_MS_MAX - 1, seen="client-1")
    assert not await receive(rig)
    await pass_time(rig, 1, seen="client-1")
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_renewing_ends_with_silence(rig: EmbeddedRig) -> None:
    """A client that sent nothing for a minute is not waited for; another client's heartbeat does not help it."""
    await send(rig, "m-1", "m-2")
    (silent,) = await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="silent")
    await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="alive")
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS * 2, seen="alive")
    assert ids(await receive(rig)) == [silent.message_id]


@every_durable_broker()
async def test_renewing_ends_when_the_client_leaves(rig: EmbeddedRig) -> None:
    """What it held comes back within a second; what others hold, and what it received without renewal, does not."""
    await send(rig, "m-1", "m-2", "m-3")
    gone = await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="gone")
    await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="alive")
    await receive(rig, batch_max=1, invisible_ms=INVISIBLE_MS)
    rig.broker.client_gone("gone")
    rig.broker.client_gone("gone")
    rig.broker.client_gone("never seen")
    await rig.pass_ms(999)
    assert not await receive(rig)
    await rig.pass_ms(1)
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == (gone[0].message_id, 2)


@every_durable_broker()
async def test_an_unregistration_returns_the_remaining_messages_of_a_client(rig: EmbeddedRig) -> None:
    """What it received after something that it has finished comes back; nothing stays of a client that has nothing."""
    await send(rig, "m-1", "m-2")
    (first,) = await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-1")
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS // 2, seen="client-1")
    (second,) = await receive(rig, batch_max=1, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-1")
    assert list(await ack(rig, first)) == [None]
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS // 2, seen="client-1")
    rig.broker.client_gone("client-1")
    await rig.pass_ms(1_000)
    (again,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-2")
    assert (again.message_id, again.delivery_attempt) == (second.message_id, 2)
    assert list(await ack(rig, again)) == [None]
    await pass_time(rig, AUTO_RENEW_INVISIBLE_MS, seen="client-2")
    assert not rig.broker.lease_ends._renewed


@every_durable_broker()
async def test_any_setter_of_the_time_ends_the_renewal(rig: EmbeddedRig) -> None:
    """A consumer that wants the message again in five seconds, with no attempt counted, gets it, alive as it is."""
    await send(rig, "m-1")
    (delivery,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client-1")
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, SOON_MS, suspend=True)
    await pass_time(rig, SOON_MS, seen="client-1")
    assert (await receive_one(rig)).delivery_attempt == 1


@every_durable_broker()
async def test_a_clock_that_steps_back_while_a_message_comes_back_does_not_lose_it(rig: EmbeddedRig) -> None:
    """The end of the lease was decided; the step comes while it is being written."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    expiring = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    rig.clock.step_to(rig.clock.now_ms() - SOON_MS)
    await expiring
    await rig.settle()
    again = await receive_one(rig)
    assert again.delivery_attempt == 2
    giving_back = asyncio.ensure_future(rig.broker.change_invisible(GROUP, TOPIC, again.receipt_handle, 0))
    await asyncio.sleep(0)
    rig.clock.step_to(rig.clock.now_ms() - SOON_MS)
    await giving_back
    assert (await receive_one(rig)).delivery_attempt == 3
    assert delivery.delivery_attempt == 1


@every_durable_broker()
async def test_an_ack_while_the_lease_is_being_ended_wins(rig: EmbeddedRig) -> None:
    """The handle is good until the message is handed out again, so it never comes back; nor after a restart."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    expiring = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    assert list(await ack(rig, delivery)) == [None]
    await expiring
    await rig.settle()
    assert not await receive(rig)
    await rig.restart(End.KILL)
    assert not await receive(rig)


@every_durable_broker()
async def test_failures_that_come_together_are_all_decided(rig: EmbeddedRig) -> None:
    """One is acknowledged while they are decided; the others are retried, even if the daemon is killed then."""
    sent = [f"m-{number}" for number in range(5)]
    await send(rig, *sent)
    received = await receive(rig, batch_max=5, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="client")
    found = {each.message_id: each for each in received}
    assert sorted(found) == sent
    failing = [
        asyncio.ensure_future(rig.broker.change_invisible(GROUP, TOPIC, each.receipt_handle, 0))
        for each in found.values()
    ]
    finished = list(found)[1]
    await asyncio.sleep(0)
    assert list(await ack(rig, found[finished])) == [None]
    await asyncio.gather(*failing)
    await rig.restart(End.KILL)
    await pass_time(rig, 60_000)
    again = await receive(rig, batch_max=5)
    assert sorted(ids(again)) == sorted({*sent} - {finished})
    assert {each.delivery_attempt for each in again} == {2}


@every_durable_broker()
async def test_an_extension_while_the_lease_is_being_ended_wins(rig: EmbeddedRig) -> None:
    """Hidden until the time that was answered, in this run and in the next."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    expiring = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    await expiring
    await rig.settle()
    assert not await receive(rig)
    await rig.restart(End.KILL)
    await rig.settle()
    assert not await receive(rig)
    await rig.pass_ms(INVISIBLE_MS)
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_a_first_receive_that_is_cancelled_does_not_spoil_the_group(rig: EmbeddedRig) -> None:
    """Whoever waited beside it while the group was loaded sees the group as it is, and forgets none of its acks."""
    await send(rig, *(f"m-{number}" for number in range(8)))
    await ack(rig, *(await receive(rig, batch_max=5)))
    for steps in range(8):
        await rig.restart(End.KILL)
        first = asyncio.ensure_future(receive(rig, batch_max=1, invisible_ms=1))
        second = asyncio.ensure_future(receive(rig, batch_max=32, invisible_ms=1))
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first, second})
        found = ids(await second)
        assert len(found) >= 2, steps  # the cancelled one may have held one of the three for a moment
        found += ids(first.result()) if not first.cancelled() else []
        found += ids(await receive(rig))  # what the cancelled one gave back
        assert len(found) == len(set(found)) == 3, (steps, found)


def returns(rig: EmbeddedRig) -> list[tuple[EventKind, int]]:
    """What the trail says came back, with the attempt that comes next."""
    kinds = {EventKind.LEASE_EXPIRED, EventKind.GIVEN_BACK}
    return [(fact.kind, fact.attempt) for fact in read_facts(rig.broker) if fact.kind in kinds]


@every_durable_broker()
async def test_a_lease_that_was_changed_ends_once(rig: EmbeddedRig) -> None:
    """Several times of one lease may be over when somebody looks; it is one end, and one event."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    for invisible_ms in (SOON_MS, 2 * SOON_MS, SOON_MS):
        await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, invisible_ms)
    await rig.pass_ms(INVISIBLE_MS * 2)
    assert returns(rig) == [(EventKind.LEASE_EXPIRED, 2)]
    assert len(await receive(rig)) == 1


@every_durable_broker()
async def test_a_delivery_that_is_being_returned_does_not_expire(rig: EmbeddedRig) -> None:
    """Its time is over while the answer is being written: it came back once, because it was given back."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    giving_back = asyncio.ensure_future(rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 0))
    await asyncio.sleep(0)
    rig.clock.advance(INVISIBLE_MS)
    assert await rig.broker.leases.expire() == 0
    await giving_back
    await rig.settle()
    assert returns(rig) == [(EventKind.GIVEN_BACK, 2)]
    assert len(await receive(rig)) == 1


@every_durable_broker()
async def test_a_process_that_stood_still_fails_no_delivery_of_a_client_that_lives(rig: EmbeddedRig) -> None:
    """A paused container ends no lease that would have been renewed; who is silent afterwards loses it then."""
    await send(rig, "m-1")
    (delivery,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="c-1")
    await rig.pass_ms(10 * AUTO_RENEW_INVISIBLE_MS)
    assert not await receive(rig)
    assert returns(rig) == []
    await pass_time(rig, 2 * AUTO_RENEW_INVISIBLE_MS, seen="c-1")
    assert await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 0, suspend=True)
    (again,) = await receive(rig, invisible_ms=AUTO_RENEW_INVISIBLE_MS, renew_for="c-1")
    assert again.delivery_attempt == 1
    await pass_time(rig, 2 * AUTO_RENEW_INVISIBLE_MS)
    assert len(await receive(rig)) == 1


@every_durable_broker()
async def test_a_delivery_extended_while_its_expiry_is_decided_continues(rig: EmbeddedRig) -> None:
    """Its time is over, and that makes a dead letter of it: not once its consumer was told that it has more time."""
    await rig.set_group(GROUP, max_attempts=1, delays_ms=(SOON_MS,))
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    ending = asyncio.ensure_future(rig.broker.leases.expire())
    await asyncio.sleep(0)
    assert rig.broker.failures._waiting, "its end is being decided"
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    await ending
    await rig.pass_ms(INVISIBLE_MS - 1)
    assert await ack(rig, delivery) == [None]
    assert EventKind.DEAD_EXHAUSTED not in [event.kind for _, event in read_outbox(rig.broker.store)]


@every_durable_broker()
async def test_a_delivery_that_cannot_be_decided_holds_up_no_other(rig: EmbeddedRig) -> None:
    """Danger: one whose end met a fault of ours, and no lease of anybody ended any more, without a word."""
    await send(rig, "poison", "other")
    assert sorted(ids(await receive(rig, batch_max=2))) == ["other", "poison"]
    outcome = rig.broker.failures.outcome

    def faulty(queue: SubscribedQueue, lease: DeliveryLease, failure: Failure, **facts: Any) -> Outcome:  # noqa: ANN401
        if lease.message_id == pack_id("poison"):
            raise LookupError("unexpected")
        return outcome(queue, lease, failure, **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.broker.failures, "outcome", faulty)
        await pass_time(rig, INVISIBLE_MS)
        assert ids(await receive(rig, batch_max=2)) == ["other"]
    await pass_time(rig, POSTPONED_MS)
    assert "poison" in ids(await receive(rig, batch_max=2))


@every_durable_broker()
async def test_a_lease_that_ends_during_a_failed_call_ends_later(rig: EmbeddedRig) -> None:
    """Its timer expires during the decision about its failure, and that decision raises an unexpected error."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)

    def faulty(*_: object, **__: object) -> Outcome:
        rig.clock.advance(INVISIBLE_MS)
        assert not rig.broker.lease_ends.pop(1)
        raise LookupError("unexpected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.broker.failures, "outcome", faulty)
        with pytest.raises(BrokerUnavailable):
            await rig.broker.send_back(GROUP, TOPIC, delivery.receipt_handle, 0)
    await pass_time(rig, POSTPONED_MS)
    assert ids(await receive(rig)) == ["m-1"]


@every_durable_broker(queues=1)
async def test_messages_of_a_failed_acknowledgement_are_delivered_again(rig: EmbeddedRig) -> None:
    """Handles of an earlier run: the first is valid, the second message cannot be read at the time."""
    await send(rig, "m-1", "m-2")
    delivered = await receive(rig)
    await rig.restart(End.KILL)
    key = pack_queue_key(rig.broker.names.topics[TOPIC].topic_id, 0, 1)
    (row,) = rig.store.get_many(Family.QUEUE, [key])
    assert row is not None
    await rig.store.commit_async([Put(Family.QUEUE, key, b"damaged")])
    with pytest.raises(BrokerUnavailable):
        await ack(rig, *delivered)
    await rig.store.commit_async([Put(Family.QUEUE, key, row)])
    await pass_time(rig, POSTPONED_MS)
    assert ids(await receive(rig)) == ["m-1", "m-2"]


@every_durable_broker()
async def test_clients_that_fell_silent_are_forgotten(rig: EmbeddedRig) -> None:
    """Every start of an application is a new client id: the memory of them has an end in time and in number."""
    seen = rig.broker.lease_ends.clients._seen_s
    for number in range(1_000):
        rig.broker.client_seen(f"c-{number}")
        rig.clock.advance(125)
    assert list(seen) == [f"c-{number}" for number in range(520, 1_000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_clients, "CLIENTS_MAX", 10)
        rig.broker.client_seen("c-700")
    assert list(seen) == [*(f"c-{number}" for number in range(991, 1_000)), "c-700"]


def test_a_handle_that_is_none_makes_no_subscription(tmp_path: Path) -> None:
    """Danger: an acknowledgement with any text for a handle made one for good, in memory, on disk and in the trail."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        good = await receive_one(rig)
        await rig.broker.ensure_group("stranger")
        (refused,) = await rig.broker.ack("stranger", TOPIC, [good.receipt_handle])
        assert "no such delivery" in str(refused)
        with pytest.raises(Refused, match="no such delivery"):
            await rig.broker.change_invisible("stranger", TOPIC, good.receipt_handle, INVISIBLE_MS, suspend=False)
        assert not rig.broker.subscriptions.has("stranger", TOPIC)
        stranger = rig.broker.names.groups["stranger"].group_id
        events = [event for _, event in read_outbox(rig.broker.store) if event.kind is EventKind.SUBSCRIBED]
        assert events
        assert stranger not in {event.group_id for event in events}
        assert await ack(rig, good) == [None]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


def test_pairs_of_groups_and_topics_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept in memory for as long as the daemon runs: beyond the bound a new one is refused."""
    monkeypatch.setattr(subscriptions, "SUBSCRIPTIONS_MAX", 2)

    async def scenario(rig: EmbeddedRig) -> None:
        for group in ("first", "second"):
            await receive(rig, group=group, wait_ms=0)
        with pytest.raises(Overloaded, match=r"too many groups receive from too many topics \(limit 2 pairs\)"):
            await receive(rig, group="third", wait_ms=0)
        await send(rig, "m-1")
        await ack(rig, await receive_one(rig, group="first"), group="first")
        await rig.broker.operator.remove_group("second", is_forced=True)
        assert ids(await receive(rig, group="third", wait_ms=0)) == ["m-1"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


def test_a_subscription_begins_at_the_requested_position(tmp_path: Path) -> None:
    """By a daemon whose groups begin at the end, too: whoever subscribes by hand reads what was there before."""

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-1")
        for _ in range(2):  # who reads the topic already goes on where it is
            await ask(rig, wire.SubscribeRequest(group="by-hand", topic=TOPIC))
        assert ids(await receive(rig, group="late")) == []
        await send(rig, "m-2")
        assert sorted(ids(await receive(rig, group="by-hand"))) == ["m-1", "m-2"]
        assert ids(await receive(rig, group="late")) == ["m-2"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, group_start="latest"), scenario))
