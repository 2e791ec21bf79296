"""What an ``MessagePort`` promises, beside what brokers do: in the process of the broker, and through a front.

``test_pop_broker_*`` hold the same two to the contract of brokers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.rigs.broker.joined import CLIENT, Joined, port_of
from support.rigs.broker.rig import GROUP, INVISIBLE_MS, TOPIC, EmbeddedRig, an_envelope, ids, play, until

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.contracts.message import Delivery
from dmq.acl.quotas import ADDRESS, KEY, Holder, Quota
from dmq.processes import frames
from dmq.processes.clocks import FrontClock
from dmq.rocketmq_server.calls.exchange import MessagePort, Receive, Received

pytestmark = pytest.mark.contract
LONG_MS = 60_000  # of waiting: what waits that long fails its test
HOLDERS = (Holder(KEY, "shop"), Holder(ADDRESS, "192.0.2.7"))


class Rig(EmbeddedRig):
    """The embedded broker and an exchange in front of it."""

    def __init__(self, path: Path, *, on_disk: bool, is_fronted: bool) -> None:
        super().__init__(path, on_disk=on_disk, queues=1)
        self._is_fronted = is_fronted
        self.joined: Joined | None = None
        self.exchange: MessagePort

    async def open(self) -> None:
        await super().open()
        self.port = port_of(self.broker, self.clock)
        self.exchange = self.port.service.exchange
        if self._is_fronted:
            self.joined = await Joined(self.port, self.clock).open()
            self.exchange = self.joined.store

    async def close(self) -> None:
        if self.joined is not None:
            await self.joined.close()
        await until(lambda: not self.port.service.exchange._giving_back)
        await super().close()

    async def settle(self) -> None:
        if self.joined is not None:
            await self.joined.quiet()
        await until(lambda: not self.port.service.exchange._giving_back)
        await super().settle()

    async def send(self, *message_ids: str, **facts: Any) -> None:  # noqa: ANN401 - of envelopes
        await self.exchange.send([an_envelope(each, **facts) for each in message_ids], HOLDERS)

    def receive(self, *, wait_ms: int = 0, is_renewed: bool = False, client: str = CLIENT) -> asyncio.Task[Received]:
        wanted = Receive(GROUP, Subscription(TOPIC), 32, INVISIBLE_MS, wait_ms, is_renewed)
        return asyncio.ensure_future(self.exchange.receive(wanted, client, HOLDERS))

    async def waiting(self, **facts: Any) -> asyncio.Task[Received]:  # noqa: ANN401
        """Return a receive that found nothing and waits."""
        before = self.receives_waiting
        receiving = self.receive(wait_ms=LONG_MS, **facts)
        await until(lambda: self.receives_waiting > before)
        return receiving

    async def ack(self, *deliveries: Delivery) -> Sequence[Exception | None]:
        handles = [each.receipt_handle for each in deliveries]
        return list(await self.exchange.ack(GROUP, TOPIC, handles)) or [None] * len(handles)


Scenario = Callable[[Rig], Coroutine[object, object, None]]
_WAYS = {"directly": (False, False), "on RocksDB": (True, False), "by a front": (False, True)}
_BY_A_FRONT = {"by a front": (False, True), "by a front, on RocksDB": (True, True)}


def _on(ways: dict[str, tuple[bool, bool]]) -> Callable[[Scenario], Callable[..., None]]:
    def decorate(scenario: Scenario) -> Callable[..., None]:
        def test(way: str, tmp_path: Path) -> None:
            on_disk, is_fronted = ways[way]
            asyncio.run(play(Rig(tmp_path, on_disk=on_disk, is_fronted=is_fronted), scenario))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return pytest.mark.parametrize("way", ways)(test)

    return decorate


every_exchange, fronted_exchange = _on(_WAYS), _on(_BY_A_FRONT)


async def _error_of(call: Callable[[], Awaitable[object]]) -> BrokerError:
    with pytest.raises(BrokerError) as raised:
        await call()
    return raised.value


@every_exchange
async def test_a_refusal_gives_the_reason(rig: Rig) -> None:
    """Each call with the very error, rule, value, limit and text that the broker raises."""
    exchange, direct = rig.exchange, rig.port.service.exchange
    await rig.send("m-1")

    def calls(of: MessagePort) -> list[Callable[[], Any]]:
        def receive(**wrong: Any) -> Any:  # noqa: ANN401
            wanted = Receive(GROUP, Subscription(TOPIC), 1, INVISIBLE_MS, 0, False)
            return of.receive(wanted._replace(**wrong), CLIENT, ())

        return [
            lambda: of.send([an_envelope("m-2", topic="%RETRY%workers")], ()),
            lambda: receive(subscription=Subscription(TOPIC, 7)),
            lambda: receive(subscription=Subscription(TOPIC, sql="a >")),
            lambda: of.ack("nobody", "nothing", ["garbage"]),
            lambda: of.change_invisible(GROUP, TOPIC, "garbage", 1_000, suspend=False),
        ]

    for number, (asked, as_asked) in enumerate(zip(calls(exchange), calls(direct), strict=True)):

        async def outcome(call: Callable[[], Any]) -> tuple[object, ...]:
            try:
                found: object = await call()
            except BrokerError as raised:
                found = raised
            errors = found if isinstance(found, Sequence) else [found]
            return tuple((type(each), str(each), vars(each)) for each in errors if isinstance(each, Exception))

        assert await outcome(asked) == await outcome(as_asked) != (), number


@every_exchange
async def test_a_client_above_its_share_gets_an_error(rig: Rig) -> None:
    """By the quotas of keys and addresses, whichever process counts them; others are served."""
    quotas, (key, address) = rig.port.service.quotas, HOLDERS
    quotas.is_known = lambda _, name: name in {TOPIC, GROUP}
    await rig.send("m-1")
    for holder, quota, limit, call in (
        (key, Quota.SENDS_PER_S, 1, lambda: rig.exchange.send([an_envelope("m-2"), an_envelope("m-3")], HOLDERS)),
        (address, Quota.TOPICS, 0, lambda: rig.exchange.send([an_envelope("m-2", topic="another")], HOLDERS)),
        (key, Quota.POLLS, 0, rig.receive),
    ):
        quotas.change(holder, quota, limit)
        if quota is Quota.SENDS_PER_S:  # which a first one is always served with
            await rig.send("m-4")
        error = await _error_of(call)
        assert isinstance(error, Overloaded)
        assert str(error).startswith(f"quota {quota.value} of {holder}: ")
        assert str(error).endswith(f" in use (limit {limit}); try again later")
        quotas.change(holder, quota, None)
    await rig.send("m-2")
    assert ids((await rig.receive()).deliveries) == ["m-1", "m-4", "m-2"]


@every_exchange
async def test_a_receive_ends_when_its_client_unregisters(rig: Rig) -> None:
    """With nothing, at once, and others wait on."""
    mine, others = await rig.waiting(client="leaves"), await rig.waiting(client="stays")
    rig.port.service._polls.end("leaves")
    assert list((await mine).deliveries) == []
    await rig.send("m-1")
    assert ids((await others).deliveries) == ["m-1"]


@every_exchange
async def test_a_cancelled_receive_gives_its_place_back(rig: Rig) -> None:
    """Without a message that ends it: nobody waits there any more."""
    receiving = await rig.waiting()
    assert len(rig.port.service._polls._places) == 1
    receiving.cancel()
    await until(lambda: not rig.receives_waiting)
    assert len(rig.port.service._polls._places) == 0


@every_exchange
async def test_receives_end_when_the_daemon_does(rig: Rig) -> None:
    """Those that wait, and those that come then do not wait; what is there they get."""
    receiving = await rig.waiting()
    rig.port.service.drain()
    assert list((await receiving).deliveries) == []
    assert list((await rig.receive(wait_ms=LONG_MS)).deliveries) == []
    await rig.send("m-1")
    assert ids((await rig.receive(wait_ms=LONG_MS)).deliveries) == ["m-1"]


@every_exchange
async def test_a_returned_message_comes_again_as_the_same_attempt(rig: Rig) -> None:
    """Its client was shown nothing of it, so it cannot have died of it."""
    await rig.send("m-1", "m-2")
    (await rig.receive()).give_back()
    await rig.settle()
    again = (await rig.receive()).deliveries
    assert [(each.message_id, each.delivery_attempt) for each in again] == [("m-1", 1), ("m-2", 1)]


@every_exchange
async def test_a_taken_message_stays_delivered(rig: Rig) -> None:
    """It is the client's, until its time is over."""
    await rig.send("m-1", "m-2")
    received = await rig.receive()
    received.over(True)
    await rig.settle()
    assert not (await rig.receive()).deliveries
    assert await rig.ack(*received.deliveries) == [None, None]


@every_exchange
async def test_untaken_messages_come_again(rig: Rig) -> None:
    """At once, to whoever waits, as the next attempt; leases that are renewed too."""
    for number, is_renewed in enumerate((False, True)):
        await rig.send(f"m-{number}")
        received = await rig.receive(is_renewed=is_renewed)
        receiving = await rig.waiting()
        received.over(False)
        (again,) = (await receiving).deliveries
        assert (again.message_id, again.delivery_attempt) == (f"m-{number}", 2)
        assert await rig.ack(again) == [None]


@every_exchange
async def test_a_message_group_keeps_its_order_when_it_was_not_taken(rig: Rig) -> None:
    """Nobody gets the second one before the first one."""
    await rig.send("m-1", "m-2", "m-3", message_group="g")
    received = await rig.receive()
    assert ids(received.deliveries)[:1] == ["m-1"]
    received.over(False)
    await rig.settle()
    came: list[str] = []
    while len(came) < 3:
        deliveries = (await rig.receive(wait_ms=LONG_MS)).deliveries
        came += ids(deliveries)
        assert not any(await rig.ack(*deliveries))
    assert came == ["m-1", "m-2", "m-3"]


@every_exchange
async def test_each_handle_has_its_result(rig: Rig) -> None:
    """The good ones among the others are finished; also if many calls come in one turn."""
    await rig.send(*(f"m-{number}" for number in range(20)))
    deliveries = (await rig.receive()).deliveries
    calls = [
        rig.exchange.ack(GROUP, TOPIC, ["garbage", each.receipt_handle] if number % 3 else [each.receipt_handle])
        for number, each in enumerate(deliveries)
    ]
    for number, results in enumerate(await asyncio.gather(*(_awaited(call) for call in calls))):
        if number % 3:
            wrong, good = results
            assert good is None
            assert isinstance(wrong, Refused)
            assert wrong.rule is Rule.RECEIPT_HANDLE
        else:
            assert not any(results)
    await rig.pass_ms(INVISIBLE_MS)
    assert not (await rig.receive()).deliveries


async def _awaited(call: Any) -> Any:  # noqa: ANN401
    return await call


@every_exchange
async def test_messages_as_large_as_they_get(rig: Rig) -> None:
    """Four of them at once, there and back."""
    body = bytes(range(256)) * (BODY_BYTES_MAX // 256)
    for number in range(4):
        await rig.exchange.send([an_envelope(f"m-{number}", payload=body)], HOLDERS)
    came: list[Delivery] = []
    while len(came) < 4:
        came += (await rig.receive(wait_ms=LONG_MS)).deliveries
    assert [each.payload == body for each in came] == [True] * 4


# -- a front that lags behind, or dies --------------------------------------------------------------------------------


@fronted_exchange
async def test_a_receive_may_be_cancelled_at_any_moment(rig: Rig) -> None:
    """Before its answer, with it, behind it: the message comes to the next one, as its first attempt, once."""
    assert rig.joined is not None
    for turns in range(40):
        receiving = await rig.waiting()
        await rig.send(f"m-{turns}")
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        receiving.cancel()
        (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
        if isinstance(outcome, Received):
            received = outcome
        else:
            received = await rig.receive(wait_ms=LONG_MS)
        deliveries = received.deliveries
        received.over(True)
        assert [(each.message_id, each.delivery_attempt) for each in deliveries] == [(f"m-{turns}", 1)]
        assert await rig.ack(*deliveries) == [None]
    await rig.joined.quiet()
    assert not rig.joined.host._handed
    assert not rig.joined.store._waiting


@fronted_exchange
async def test_messages_of_a_dead_front_come_again_at_once(rig: Rig) -> None:
    """What it did not pass on, and what a socket took in its last second; nothing that is older or acknowledged."""
    assert rig.joined is not None
    await rig.send("old")
    old = await rig.receive(is_renewed=True)
    old.over(True)
    await rig.joined.quiet()
    rig.clock.advance(1_001)
    await rig.send("new", "done")
    new = await rig.receive(is_renewed=True)
    new.over(True)
    done = next(each for each in new.deliveries if each.message_id == "done")
    assert await rig.ack(done) == [None]
    await rig.send("told")
    told = await rig.receive()
    assert ids(told.deliveries) == ["told"]
    await rig.joined.quiet()
    rig.joined.kill()
    await until(lambda: rig.joined is not None and rig.joined.behind.is_lost)
    await until(lambda: not rig.port.service.exchange._giving_back)
    rig.exchange = rig.port.service.exchange
    again = (await rig.receive()).deliveries
    assert sorted((each.message_id, each.delivery_attempt) for each in again) == [("new", 2), ("told", 2)]


@fronted_exchange
async def test_messages_that_a_client_has_had_for_long_stay_its_own(rig: Rig) -> None:
    """Though nothing was taken since, and its front dies."""
    assert rig.joined is not None
    await rig.send("old")
    old = await rig.receive(is_renewed=True)
    old.over(True)
    await rig.joined.quiet()
    rig.clock.advance(1_001)
    rig.joined.kill()
    await until(lambda: rig.joined is not None and rig.joined.behind.is_lost)
    assert not rig.port.service.exchange._giving_back
    rig.exchange = rig.port.service.exchange
    assert await rig.ack(*old.deliveries) == [None]


@fronted_exchange
async def test_a_dead_front_takes_its_receives_with_it(rig: Rig) -> None:
    """What comes later goes to somebody who lives, at his first attempt; its places are free."""
    assert rig.joined is not None
    receiving = [await rig.waiting() for _ in range(3)]
    rig.joined.kill()
    await until(lambda: not rig.receives_waiting)
    for each in receiving:
        assert isinstance(await _error_of(partial(_awaited, each)), BrokerUnavailable)
    rig.exchange = rig.port.service.exchange
    await rig.send("m-1")
    (delivery,) = (await rig.receive()).deliveries
    assert delivery.delivery_attempt == 1
    assert len(rig.port.service._polls._places) == 0


@fronted_exchange
async def test_calls_of_a_lost_store_process_are_in_doubt(rig: Rig) -> None:
    """Every one of them is told so, and none waits for ever."""
    assert rig.joined is not None
    await rig.send("m-1")
    (delivery,) = (await rig.receive()).deliveries
    calls: list[Any] = [
        rig.exchange.send([an_envelope("m-2")], ()),
        rig.exchange.ack(GROUP, TOPIC, [delivery.receipt_handle]),
        rig.exchange.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 1_000, suspend=False),
        rig.receive(wait_ms=LONG_MS),
    ]
    await asyncio.sleep(0)
    rig.joined.kill()
    for each in calls:
        assert isinstance(await _error_of(partial(_awaited, each)), BrokerUnavailable)


@fronted_exchange
async def test_a_delay_counts_from_the_time_that_is_believed(rig: Rig) -> None:
    """A front that has not heard of a step of the clock moves no message; a time that somebody gave stays."""
    step_ms = 3_600_000
    behind = FrontClock(rig.clock.now_ms() - rig.clock.boot_ms() - step_ms)
    async with Joined(rig.port, rig.clock, behind) as joined:
        at_ms = rig.clock.now_ms() + 5_000
        delayed = an_envelope("delayed", deliver_at_ms=at_ms - step_ms)._replace(is_relative=True)
        await joined.store.send([delayed, an_envelope("dated", deliver_at_ms=at_ms + 1)], ())
    await rig.pass_ms(4_999)
    assert not (await rig.receive()).deliveries
    await rig.pass_ms(2)
    assert [(each.message_id, each.deliver_at_ms) for each in (await rig.receive(wait_ms=LONG_MS)).deliveries] == [
        ("delayed", at_ms),
        ("dated", at_ms + 1),
    ]


@fronted_exchange
async def test_a_call_that_cannot_be_served_fails_alone(rig: Rig) -> None:
    """A fault of ours is told as one; those that came with it are served."""
    assert rig.joined is not None

    def breaks(*_: object) -> None:
        raise ValueError("a secret")

    sending = rig.port.service.exchange.send
    rig.port.service.exchange.send = breaks  # type: ignore[method-assign,assignment]
    failing = rig.exchange.send([an_envelope("m-1")], ())
    receiving = rig.receive()
    with pytest.raises(frames.Unexpected) as raised:
        await failing
    assert "secret" not in str(raised.value)
    assert not (await receiving).deliveries
    rig.port.service.exchange.send = sending  # type: ignore[method-assign]
    await rig.send("m-1")
