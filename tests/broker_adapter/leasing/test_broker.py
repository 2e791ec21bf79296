"""Leases over queues that a group's members divide: what the contract of all brokers leaves open, and every end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.clients.embedded.consumers import PATIENCE_S, Faulty, eventually
from support.models.broker.progress_check import assert_member_progress
from support.models.costs.unread import UnreadDict
from support.rigs.broker.rig import EmbeddedRig, play
from support.rigs.rocketmq.real_time import Decider, a_message

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.classic import Start
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from broker_adapter.contracts.message import Delivery
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.contracts.transactions import Half
from broker_adapter.leasing import LeasingBroker, LeasingOptions, leases
from broker_adapter.leasing.handles import HalfHandle, LeaseHandle
from broker_adapter.wire.mapping import decode

pytestmark = pytest.mark.contract

TOPIC, GROUP = "orders", "workers"
INVISIBLE_MS, WAIT_MS = 30_000, 3_000
PATIENCE_MS = int(PATIENCE_S * 1000)
Scenario = Callable[["Site"], Coroutine[object, object, None]]


class Site:
    """Leasing brokers on one embedded broker, each a member of the groups it receives for."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.rig = rig
        self.classics: list[Faulty] = []
        self.brokers: list[LeasingBroker] = []
        self._names = count()

    def broker(self, start: Start = Start.FIRST_OFFSET) -> LeasingBroker:
        """Another one, as another daemon has it."""
        classic = Faulty(self.rig.broker, f"daemon-{next(self._names)}")
        made = LeasingBroker(classic, self.rig.clock, LeasingOptions(start=start))
        self.classics.append(classic)
        self.brokers.append(made)
        return made

    async def send(self, broker: LeasingBroker, *bodies: str, **facts: Any) -> None:  # noqa: ANN401
        """Send messages, one after the other."""
        for body in bodies:
            await broker.send([a_message(TOPIC, body.encode(), **facts)])

    async def pass_time(self, ms: int, *, seen: str = "") -> None:
        """Let time pass in steps in which a living client sends its heartbeat, and what is due happen."""
        while ms > 0:
            step = min(ms, 10_000)
            ms -= step
            self.rig.clock.advance(step)
            for each in self.brokers:
                if seen:
                    each.client_seen(seen)
                for member in each._members.values():
                    if member.leases is not None:
                        assert_member_progress(member.leases)
                    if member.tick(looks=True):
                        await member.close(if_idle=True)
            await self.rig.settle()

    async def kill(self, broker: LeasingBroker) -> None:
        """End it as a crash does: nothing more is committed."""
        for task in broker._tasks:
            task.cancel()
        for member in broker._members.values():
            consumer = member._consumer
            assert consumer is not None
            assert consumer._service is not None
            for task in consumer._tasks:
                task.cancel()
            for owned in consumer._owned.values():
                assert owned.pulling is not None
                owned.pulling.cancel()
            consumer._service.close()
        await broker._membership.close()
        await broker._classic.leave(consumer=GROUP)
        self.brokers.remove(broker)


async def receive(
    broker: LeasingBroker,
    *,
    topic: str = TOPIC,
    batch_max: int = 32,
    wait_ms: int = WAIT_MS,
    renew_for: str = "",
    sql: str = "",
) -> Sequence[Delivery]:
    """Receive once."""
    return await broker.receive(
        GROUP,
        Subscription(topic, sql=sql),
        batch_max=batch_max,
        invisible_ms=INVISIBLE_MS,
        wait_ms=wait_ms,
        renew_for=renew_for,
    )


async def one(broker: LeasingBroker, **facts: Any) -> Delivery:  # noqa: ANN401
    """Receive one message, which there is, once this member has its queue."""
    (found,) = await receive(broker, batch_max=1, wait_ms=PATIENCE_MS, **facts)
    return found


async def comes_again(site: Site, broker: LeasingBroker, **facts: Any) -> Delivery:  # noqa: ANN401
    """Receive a message that was sent back, as time passes."""
    found: Sequence[Delivery] = ()
    for _ in range(100):
        if found := await receive(broker, batch_max=1, wait_ms=50, **facts):
            break
        await site.pass_time(1_000)
    return found[0]


async def ack(broker: LeasingBroker, *deliveries: Delivery) -> list[Rule | None]:
    """Acknowledge; return which rule was broken."""
    answers = await broker.ack(GROUP, TOPIC, [each.receipt_handle for each in deliveries])
    return [each.rule if isinstance(each, Refused) else None for each in answers]


def bodies(deliveries: Sequence[Delivery]) -> list[str]:
    """The bodies of what came."""
    return [decode(each.payload).body.decode() for each in deliveries]


def on_queues(queues: int = 1) -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on the embedded broker in memory."""

    def decorate(scenario: Scenario) -> Callable[..., None]:
        def test(tmp_path: Path) -> None:
            async def run(rig: EmbeddedRig) -> None:
                site = Site(rig)
                try:
                    await scenario(site)
                finally:
                    for each in site.brokers:
                        await each.close()

            asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=queues), run))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return decorate


@on_queues()
async def test_a_handle_is_good_once(site: Site) -> None:
    """Acknowledging twice is fine; an earlier hand-out's handle is refused once the message went out again."""
    broker = site.broker()
    await site.send(broker, "1")
    first = await one(broker)
    await broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 0, suspend=True)
    second = await one(broker)
    assert second.delivery_attempt == 1
    assert await ack(broker, first) == [Rule.RECEIPT_HANDLE]
    assert await ack(broker, second) == [None]
    assert await ack(broker, second, first) == [None, Rule.RECEIPT_HANDLE]


@on_queues()
async def test_a_returned_message_is_the_next_to_be_delivered(site: Site) -> None:
    """Before those behind it; unless it was suspended, that counts as an attempt."""
    broker = site.broker()
    await site.send(broker, "1", "2")
    first = await one(broker)
    await broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 0)
    found = await receive(broker)
    assert (bodies(found), [each.delivery_attempt for each in found]) == (["1", "2"], [2, 1])


@on_queues()
async def test_a_push_consumers_failure_waits_at_the_broker(site: Site) -> None:
    """For the delay of its attempt, 10 s the first; its handle is of no use any more, and its queue goes on."""
    broker = site.broker()
    await site.send(broker, "1", "2")
    first = await one(broker, renew_for="c")
    await broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 1_000)
    assert await ack(broker, first) == [Rule.RECEIPT_HANDLE]
    assert await ack(broker, await one(broker)) == [None]
    await site.pass_time(9_000)
    assert not await receive(broker, wait_ms=1)
    await site.pass_time(1_000)
    again = await one(broker)
    assert (bodies([again]), again.delivery_attempt, again.topic) == (["1"], 2, TOPIC)
    assert await ack(broker, again) == [None]


@on_queues()
async def test_a_failure_waits_at_least_as_long_as_its_consumer_asks(site: Site) -> None:
    """At the next delay level above."""
    broker = site.broker()
    await site.send(broker, "1")
    first = await one(broker, renew_for="c")
    await broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 100_000)
    await site.pass_time(110_000)
    assert not await receive(broker, wait_ms=1)
    await site.pass_time(10_000)
    assert (await one(broker)).delivery_attempt == 2


@on_queues()
async def test_a_lease_that_ends_is_an_attempt(site: Site) -> None:
    """The message comes again a second later, and the late acknowledgement is refused."""
    broker = site.broker()
    await site.send(broker, "1")
    first = await one(broker)
    await site.pass_time(INVISIBLE_MS)

    again = await comes_again(site, broker)
    assert (bodies([again]), again.delivery_attempt) == (["1"], 2)
    assert await ack(broker, first) == [Rule.RECEIPT_HANDLE]


@on_queues()
async def test_an_acknowledgement_at_the_end_of_a_lease_counts_or_is_refused(site: Site) -> None:
    """Danger: it was answered OK between the end of the lease and the sending back, and the message came again."""
    broker = site.broker()
    await site.send(broker, "1")
    first = await one(broker)
    site.rig.clock.advance(INVISIBLE_MS)
    held = broker._members[GROUP].leases
    assert held is not None
    held.end_due()
    assert await ack(broker, first) == [Rule.RECEIPT_HANDLE]
    assert (await comes_again(site, broker)).delivery_attempt == 2


@on_queues()
async def test_leases_of_living_clients_are_renewed_for_three_hours(site: Site) -> None:
    """And no longer: who is that slow is stuck."""
    broker = site.broker()
    await site.send(broker, "1")
    first = await one(broker, renew_for="c")
    await site.pass_time(AUTO_RENEW_MS_MAX - AUTO_RENEW_INVISIBLE_MS, seen="c")
    assert not await receive(broker, wait_ms=1)
    await site.pass_time(AUTO_RENEW_INVISIBLE_MS, seen="c")
    assert (await comes_again(site, broker)).delivery_attempt == 2
    assert await ack(broker, first) == [Rule.RECEIPT_HANDLE]


@on_queues()
async def test_a_client_that_unregisters_returns_its_messages(site: Site) -> None:
    """Soon; and one that falls silent, after its minute."""
    broker = site.broker()
    await site.send(broker, "1", "2")
    assert await one(broker, renew_for="leaves")
    assert await one(broker, renew_for="silent")
    broker.client_gone("leaves")
    await site.pass_time(1_000)
    assert bodies([await comes_again(site, broker, renew_for="third")]) == ["1"]
    await site.pass_time(AUTO_RENEW_INVISIBLE_MS, seen="third")
    assert bodies([await comes_again(site, broker, renew_for="third")]) == ["2"]


@on_queues()
async def test_an_unregistration_visits_no_messages_of_others(site: Site) -> None:
    """Danger: each goodbye, as often as a client likes, went through all that was pulled for any group."""
    broker = site.broker()
    await site.send(broker, "1", "2")
    assert await one(broker, renew_for="leaves")
    assert await one(broker, renew_for="stays")
    leased = broker._members[GROUP].leases
    assert leased is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leased, "_held", UnreadDict(leased._held))
        broker.client_gone("leaves")
    await site.pass_time(1_000)
    assert bodies([await comes_again(site, broker, renew_for="third")]) == ["1"]


@on_queues()
async def test_acknowledged_messages_do_not_come_again_after_the_end(site: Site) -> None:
    """It is committed; what was leased comes again, and its handle is good until then."""
    broker = site.broker()
    await site.send(broker, "1", "2", "3")
    found = await receive(broker)
    assert await ack(broker, found[0]) == [None]
    await broker.close()
    site.brokers.remove(broker)
    second = site.broker()
    await eventually(lambda: _holds(second, 2))
    assert await ack(second, found[1]) == [None]
    again = await receive(second)
    assert bodies(again) == ["3"]
    assert await ack(second, found[2]) == [Rule.RECEIPT_HANDLE]
    assert await ack(second, *again) == [None]


async def _holds(broker: LeasingBroker, wanted: int) -> bool:
    """Whether a broker has pulled so many messages; nobody receives them meanwhile."""
    await receive(broker, topic="other", wait_ms=1)
    member = broker._members[GROUP]
    if TOPIC not in member._filters:
        await member._consume(TOPIC, next(iter(member._filters.values()))[0])
    assert member.leases is not None
    return sum(len(each) for each in member.leases._held.values()) == wanted


@on_queues()
async def test_a_kill_repeats_and_loses_nothing(site: Site) -> None:
    """What was not acknowledged comes again, also behind what was."""
    broker = site.broker()
    await site.send(broker, "1", "2", "3")
    found = await receive(broker)
    assert await ack(broker, found[1]) == [None]
    await site.kill(broker)
    again = await receive(site.broker())
    assert set(bodies(again)) >= {"1", "3"}


@on_queues(queues=4)
async def test_a_queue_that_goes_to_another_member_takes_its_messages_along(site: Site) -> None:
    """The handles of what was leased are refused, and every message comes to one of both."""
    first = site.broker()
    await site.send(first, *map(str, range(8)))
    found: list[Delivery] = []
    while len(found) < 8:
        found += await receive(first)
    second = site.broker()
    other: list[Delivery] = []

    async def has_come() -> bool:
        other.extend(await receive(second, wait_ms=50))
        return len(other) == 4

    await eventually(has_come)
    answers = await ack(first, *found)
    kept = [body for body, error in zip(bodies(found), answers, strict=True) if error is None]
    assert sorted(kept + bodies(other)) == sorted(map(str, range(8)))
    assert await ack(second, *other) == [None] * 4


@on_queues()
async def test_a_message_group_waits_for_its_failed_message(site: Site) -> None:
    """One at a time; what fails is tried again before those behind it, in the queue; others go on."""
    broker = site.broker()
    await site.send(broker, "1", "2", message_group="g")
    await site.send(broker, "x")
    found = await receive(broker, renew_for="c")
    assert bodies(found) == ["1", "x"]
    await broker.change_invisible(GROUP, TOPIC, found[0].receipt_handle, 1_000)
    assert await ack(broker, found[0]) == [Rule.RECEIPT_HANDLE]
    assert not await receive(broker, wait_ms=1)
    await site.pass_time(10_000)
    (again,) = await receive(broker, renew_for="c")
    assert (bodies([again]), again.delivery_attempt) == (["1"], 2)
    assert await ack(broker, again) == [None]
    assert bodies(await receive(broker)) == ["2"]


@on_queues()
async def test_a_message_that_failed_too_often_is_a_dead_letter(site: Site) -> None:
    """After 17 deliveries, in a message group too, and then the next one of the group goes out."""
    broker = site.broker()
    await site.send(broker, "poison", "next", message_group="g")
    for attempt in range(1, leases.ATTEMPTS_MAX + 1):
        failing = await one(broker)
        assert (bodies([failing]), failing.delivery_attempt) == (["poison"], attempt)
        await broker.change_invisible(GROUP, TOPIC, failing.receipt_handle, 0)
    assert bodies([await one(broker)]) == ["next"]
    assert bodies([await one(broker, topic=dead_letter_topic(GROUP))]) == ["poison"]


@on_queues()
async def test_a_message_that_cannot_be_sent_back_now_is_kept(site: Site) -> None:
    """The failure is told, the lease goes on, and its end lets the message be received again here."""
    broker = site.broker()
    await site.send(broker, "1")
    first = await one(broker, renew_for="c")
    site.classics[0].failing = frozenset({"send_back", "send"})
    with pytest.raises(BrokerUnavailable):
        await broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 1_000)
    broker.client_gone("c")
    await site.pass_time(10_000)
    again = await one(broker)
    assert again.delivery_attempt == 2
    site.classics[0].failing = frozenset()
    assert await ack(broker, again) == [None]


@on_queues()
async def test_a_lease_that_ends_during_a_failed_call_is_an_attempt(site: Site) -> None:
    """Its timer expires while the message is sent back; no broker accepts it, so the message stays here."""
    broker = site.broker()
    await site.send(broker, "1")
    failing, classic = await one(broker), site.classics[0]

    async def send_back(*_: object, **__: object) -> None:
        await site.pass_time(INVISIBLE_MS)
        raise BrokerUnavailable("away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classic, "send_back", send_back)
        patch.setattr(classic, "failing", frozenset({"send"}))
        with pytest.raises(BrokerUnavailable, match="no broker accepts message"):
            await broker.dead_letter(GROUP, TOPIC, failing.receipt_handle, attempts=1)
    again = await comes_again(site, broker)
    assert (bodies([again]), again.delivery_attempt) == (["1"], 2)


@on_queues()
async def test_a_message_stays_available_if_a_call_with_an_earlier_handle_fails(site: Site) -> None:
    """The call ends no lease of this run; a receive passes over the message meanwhile."""
    first = site.broker()
    await site.send(first, "1")
    delivery = await one(first)
    await site.kill(first)
    second = site.broker()
    await eventually(lambda: _holds(second, 1))

    async def send_back(*_: object, **__: object) -> None:
        assert not await receive(second, wait_ms=50)
        raise BrokerUnavailable("away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.classics[1], "send_back", send_back)
        patch.setattr(site.classics[1], "failing", frozenset({"send"}))
        with pytest.raises(BrokerUnavailable, match="no broker accepts message"):
            await second.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1)
    assert bodies(await receive(second)) == ["1"]


@on_queues()
async def test_a_damaged_message_is_a_dead_letter_and_delays_no_other(site: Site) -> None:
    """Its checksum differs: no consumer could read it."""
    broker = site.broker()
    site.classics[0].unreadable = frozenset({b"damaged"})
    await site.send(broker, "damaged", "well")
    assert bodies(await receive(broker)) == ["well"]


@on_queues()
async def test_a_damaged_message_among_the_retries_delays_no_other(site: Site) -> None:
    """Danger: nobody receives the retry topic by its name, so it lay there for ever."""
    broker = site.broker()
    await site.send(broker, "1")
    failing = await one(broker, renew_for="c")
    site.classics[0].unreadable = frozenset({b"1"})
    await broker.change_invisible(GROUP, TOPIC, failing.receipt_handle, 0)
    await site.pass_time(10_000)
    reader, letters = site.broker(), dead_letter_topic(GROUP)
    found: list[Delivery] = []

    async def is_dead() -> bool:
        found.extend(
            await reader.receive("readers", Subscription(letters), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=50)
        )
        return bool(found)

    await eventually(is_dead)


@on_queues()
async def test_a_broker_that_does_not_answer_delays_no_others_leases(site: Site) -> None:
    """Danger: leaving one group waited for its broker, and meanwhile no lease of any group ended."""
    broker = site.broker()
    await site.send(broker, "1")
    found = await one(broker)
    assert await ack(broker, found) == [None]
    leaving = broker._members[GROUP]
    site.classics[0].hanging = asyncio.Event()
    site.rig.clock.advance(61_000)

    async def has_begun_to_leave() -> bool:
        return leaving.leases is None

    await eventually(has_begun_to_leave)
    others = Subscription(TOPIC)
    assert await broker.receive("others", others, batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=WAIT_MS)
    site.rig.clock.advance(INVISIBLE_MS)
    held = broker._members["others"].leases
    assert held is not None

    async def has_ended() -> bool:
        return not held.leased

    await eventually(has_ended)
    site.classics[0].hanging.set()


@on_queues()
async def test_a_cancelled_receive_takes_nothing(site: Site) -> None:
    """What comes is for the one that still waits."""
    broker = site.broker()
    assert not await receive(broker, wait_ms=1)
    waiting = [asyncio.ensure_future(receive(broker, wait_ms=60_000)) for _ in range(2)]

    async def wait() -> bool:
        member = broker._members[GROUP].leases
        return member is not None and len(member._receives[TOPIC]) == 2

    await eventually(wait)
    waiting[0].cancel()
    await site.send(broker, "1")
    async with asyncio.timeout(30):
        assert bodies(await waiting[1]) == ["1"]


@on_queues()
async def test_consumers_of_a_group_need_the_same_sql_filter(site: Site) -> None:
    """Otherwise each would finish what the other one wants; once nobody uses the old one the new one counts."""
    broker = site.broker()
    await site.send(broker, "red", properties={"colour": "red"})
    await site.send(broker, "blue", properties={"colour": "blue"})
    found = await receive(broker, sql="colour = 'red'")
    assert bodies(found) == ["red"]
    assert await ack(broker, *found) == [None]
    with pytest.raises(Refused, match="same filter"):
        await receive(broker, sql="colour = 'green'")
    site.rig.clock.advance(60_001)
    await site.send(broker, "green", properties={"colour": "green"})
    assert bodies(await receive(broker, sql="colour = 'green'")) == ["green"]


@on_queues()
async def test_an_unused_group_is_left(site: Site) -> None:
    """After a minute, so that other members get the queues; it is joined again by the next receive."""
    broker = site.broker()
    await site.send(broker, "1")
    found = await one(broker)
    await site.pass_time(20_000)
    assert await site.classics[0].members(GROUP, TOPIC) == ["daemon-0"]
    assert await ack(broker, found) == [None]
    await site.pass_time(61_000)
    assert await site.classics[0].members(GROUP, TOPIC) == []
    assert await ack(broker, found) == [Rule.RECEIPT_HANDLE]
    await site.send(broker, "2")
    assert bodies([await one(broker)]) == ["2"]


@on_queues()
async def test_a_receive_keeps_its_member_in_the_group(site: Site) -> None:
    """Also if the member was about to leave after a minute without a receive."""
    broker = site.broker()
    await site.send(broker, "1")
    assert await ack(broker, await one(broker)) == [None]
    member = broker._members[GROUP]
    async with member._changing:
        receiving = asyncio.create_task(one(broker))

        async def waits() -> bool:
            return bool(member._changing._waiters)

        await eventually(waits)
        leaving = asyncio.create_task(member.close(if_idle=True))
        await asyncio.sleep(0)
    await leaving
    await site.send(broker, "2")
    assert bodies([await receiving]) == ["2"]


@on_queues()
async def test_retries_of_an_unread_topic_make_room(site: Site) -> None:
    """They go back for half an hour, with the attempts they had."""
    broker = site.broker()
    await site.send(broker, "1")
    failing = await one(broker, renew_for="c")
    await broker.change_invisible(GROUP, TOPIC, failing.receipt_handle, 0)
    await site.pass_time(10_000)
    for _ in range(100):
        await receive(broker, topic="other", wait_ms=1)
        await site.pass_time(10_000)
    await site.pass_time(30 * 60_000)
    again = await one(broker)
    assert (bodies([again]), again.delivery_attempt) == (["1"], 2)


@on_queues()
async def test_a_retry_that_cannot_be_postponed_stays_available(site: Site) -> None:
    """The postponement meets an unexpected error; the retry is received later, with the attempts it had."""
    broker = site.broker()
    await site.send(broker, "1")
    failing = await one(broker, renew_for="c")
    await broker.change_invisible(GROUP, TOPIC, failing.receipt_handle, 0)
    await site.pass_time(10_000)
    is_tried = asyncio.Event()

    async def send(*_: object, **__: object) -> None:
        is_tried.set()
        raise LookupError("unexpected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.classics[0], "send", send)
        for _ in range(100):
            await receive(broker, topic="other", wait_ms=1)
            await site.pass_time(10_000)
    assert is_tried.is_set()
    again = await one(broker)
    assert (bodies([again]), again.delivery_attempt) == (["1"], 2)


@on_queues()
async def test_long_leases_that_are_finished_cost_no_memory(site: Site) -> None:
    """A consumer that asks for twelve hours each time and finishes at once leaves nothing behind."""
    broker = site.broker()
    for number in range(3 * 1_024):
        if number % 512 == 0:
            await site.send(broker, *("m" for _ in range(512)))
        found = await broker.receive(
            GROUP, Subscription(TOPIC), batch_max=1, invisible_ms=12 * 3600 * 1000, wait_ms=WAIT_MS
        )
        assert await ack(broker, *found) == [None]
    held = broker._members[GROUP].leases
    assert held is not None
    assert len(held._timers._heap) <= 1_024


@on_queues()
async def test_a_later_run_is_asked_about_a_transaction_of_an_earlier_one(site: Site) -> None:
    """Its answer counts."""
    first, decider = site.broker(), Decider()
    await first.prepare([Half(a_message(TOPIC, b"open"), check_after_ms=1_000)])
    await first.close()
    site.brokers.remove(first)
    second = site.broker()
    second.attach(decider)
    await second.route(TOPIC)
    await eventually(lambda: _asked(site, decider))
    check = decider.asked.get_nowait()
    await second.commit(TOPIC, check.transaction_id)
    assert bodies([await one(second)]) == ["open"]


async def _asked(site: Site, decider: Decider) -> bool:
    await site.pass_time(1_000)
    return not decider.asked.empty()


def test_handles_contain_the_place_of_a_message() -> None:
    """And are read back as they were; what is none is refused."""
    queue = MessageQueue("orders", "broker with a space", 3)
    lease = LeaseHandle(queue, 42, "0123ab", 7)
    half = HalfHandle(queue, 42, "7F0000010000", "id", "transaction", is_asked=True)
    assert LeaseHandle.of(str(lease)) == lease
    assert HalfHandle.of(str(half), "orders") == half
    for text in ("", "lease", "lease a b c d e f", f"half {'[' * 5000}", "half [1]", "half {}", str(half)):
        with pytest.raises(Refused) as refused:
            LeaseHandle.of(text)
        assert refused.value.rule is Rule.RECEIPT_HANDLE
        if text != str(half):
            with pytest.raises(Refused) as refused:
                HalfHandle.of(text, "orders")
            assert refused.value.rule is Rule.TRANSACTION_ID
    with pytest.raises(Refused):
        HalfHandle.of(str(half), "other")
