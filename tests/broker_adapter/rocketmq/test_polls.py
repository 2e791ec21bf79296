"""The receives of one consumer share their long polls at several proxies."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence

import pytest

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import Delivery
from broker_adapter.rocketmq import polls
from broker_adapter.rocketmq.polls import PollBatch, Polls
from broker_adapter.runtime.clock import SystemClock

WAIT_MS = 60_000  # nothing waits that long unless it is broken
INVISIBLE_MS = 60_000


class Cluster:
    """Proxies that answer a poll when the test says so."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.clock = SystemClock()
        self.isolated: set[str] = set()
        self.open: defaultdict[str, list[asyncio.Future[PollBatch]]] = defaultdict(list)
        self.asked: Counter[str] = Counter()
        self.at_once: dict[str, PollBatch] = {}
        self.given_back: asyncio.Queue[str] = asyncio.Queue()
        self.changed = asyncio.Condition()
        self.polls = Polls(self.poll, self.give_back, self.isolated.__contains__, self.clock)

    async def poll(self, address: str, _wait_ms: int) -> PollBatch:
        """Wait for the test."""
        self.asked[address] += 1
        answer: asyncio.Future[PollBatch] = asyncio.get_running_loop().create_future()
        self.open[address].append(answer)
        async with self.changed:
            self.changed.notify_all()
        if address in self.at_once:
            answer.set_result(self.at_once[address])
        try:
            return await answer
        finally:
            self.open[address].remove(answer)

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Note what is given back."""
        for each in deliveries:
            self.given_back.put_nowait(each.message_id)

    def receive(self) -> asyncio.Task[Sequence[Delivery]]:
        """Begin a receive."""
        return asyncio.create_task(self.polls.receive(self.addresses, WAIT_MS))

    async def are_asked(self, **polls: int) -> None:
        """Return once each proxy has so many polls open."""
        async with self.changed:
            await self.changed.wait_for(lambda: all(len(self.open[each]) == count for each, count in polls.items()))

    def brings(self, address: str, message_id: str = "", *, invisible_ms: int = INVISIBLE_MS, age_s: float = 0) -> None:
        """Answer a poll of a proxy, with a message or nothing."""
        found = [a_delivery(message_id, invisible_ms)] if message_id else []
        self.open[address][0].set_result(PollBatch(found, self.clock.monotonic_s() - age_s))

    def fails(self, address: str, error: BrokerError) -> None:
        """Have a poll fail."""
        self.open[address][0].set_exception(error)


def a_delivery(message_id: str, invisible_ms: int) -> Delivery:
    """Return a delivery."""
    return Delivery("orders", message_id, b"", 0, 0, f"handle of {message_id}", 1, invisible_ms, 0, 0)


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    """Return what came."""
    return [each.message_id for each in deliveries]


def play(scenario: Coroutine[object, object, None]) -> None:
    """Run a scenario; none waits for long."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


def test_any_client_with_messages_answers() -> None:
    """Whichever was asked first."""

    async def scenario() -> None:
        for address in "ab":
            cluster = Cluster("a", "b")
            receiving = cluster.receive()
            await cluster.are_asked(a=1, b=1)
            cluster.brings(address, "m")
            assert ids(await receiving) == ["m"]
            await cluster.polls.close()

    play(scenario())


def test_one_that_answers_at_once_is_the_only_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others would have brought would only have to be kept."""
    monkeypatch.setattr(polls, "_SPREAD_S", WAIT_MS)  # a machine that stalls is no proxy without messages

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        for address in "ab":
            cluster.at_once[address] = PollBatch([a_delivery("m", INVISIBLE_MS)], cluster.clock.monotonic_s())
        for count in range(1, 5):
            assert ids(await cluster.receive()) == ["m"]
            assert cluster.asked.total() == count
        assert cluster.asked == {"a": 2, "b": 2}
        assert cluster.polls.is_idle

    play(scenario())


def test_messages_that_come_meanwhile_are_kept_for_the_next_receive() -> None:
    """It asks nobody then, and is told what is left of the invisible duration."""

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        receiving = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.brings("a", "first")
        assert ids(await receiving) == ["first"]
        cluster.brings("b", "second", age_s=2)
        await asyncio.sleep(0)
        (found,) = await cluster.receive()
        assert found.message_id == "second"
        assert INVISIBLE_MS - 15_000 < found.invisible_ms <= INVISIBLE_MS - 2_000
        assert cluster.asked.total() == 2
        assert cluster.polls.is_idle
        assert cluster.given_back.empty()

    play(scenario())


@pytest.mark.parametrize("age_s", [0, 30])
def test_an_unclaimed_message_is_returned(age_s: float) -> None:
    """After a quarter of its invisible duration; and it is handed out to nobody."""

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        receiving = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.brings("a", "first")
        await receiving
        cluster.brings("b", "second", invisible_ms=INVISIBLE_MS if age_s else 40, age_s=age_s)
        assert await cluster.given_back.get() == "second"
        receiving = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.brings("b", "third")
        assert ids(await receiving) == ["third"]
        await cluster.polls.close()

    play(scenario())


def test_a_cancelled_receive_passes_its_message_on() -> None:
    """In the very moment in which it is cancelled."""

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        first = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.brings("a", "m")
        while cluster.polls.is_awaited:  # noqa: ASYNC110 - until the answer is on its way to it
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert ids(await cluster.receive()) == ["m"]
        await cluster.polls.close()

    play(scenario())


def test_many_receives_have_no_more_polls_than_they_are() -> None:
    """And when they went away a few are left, until they end."""

    async def scenario() -> None:
        cluster = Cluster("a", "b", "c")
        receiving = [cluster.receive() for _ in range(30)]
        await cluster.are_asked(a=10, b=10, c=10)
        for each in receiving:
            each.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
        await asyncio.sleep(0)
        assert sum(map(len, cluster.open.values())) == 8
        for answer in [each for answers in cluster.open.values() for each in answers]:
            answer.set_result(PollBatch([], 0))
        while not cluster.polls.is_idle:  # noqa: ASYNC110 - its tasks are ending
            await asyncio.sleep(0)
        assert cluster.asked.total() == 30

    play(scenario())


def test_one_that_fails_hides_no_other() -> None:
    """Its failure is told only if nobody else can answer; a refusal is told at once."""

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        receiving = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.isolated.add("a")
        cluster.fails("a", BrokerUnavailable("a is away"))
        await asyncio.sleep(0)
        cluster.brings("b", "m")
        assert ids(await receiving) == ["m"]
        receiving = cluster.receive()
        await cluster.are_asked(a=0, b=1)
        cluster.isolated.add("b")
        cluster.fails("b", BrokerUnavailable("b is away"))
        with pytest.raises(BrokerUnavailable, match="b is away"):
            await receiving
        cluster.isolated.clear()
        receiving = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.fails("a", Refused(Rule.FORBIDDEN, "the key may not"))
        with pytest.raises(Refused, match="may not"):
            await receiving
        await cluster.polls.close()

    play(scenario())


def test_proxies_that_have_nothing_at_once_are_asked_once() -> None:
    """A receive does not go round in circles with them."""

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        cluster.at_once = {"a": PollBatch([], 0), "b": PollBatch([], 0)}
        assert ids(await cluster.receive()) == []
        assert cluster.asked == {"a": 1, "b": 1}
        assert cluster.polls.is_idle

    play(scenario())


def test_closing_returns_and_ends_waiting_messages() -> None:
    """Receives have nothing then, and polls are over."""

    async def scenario() -> None:
        cluster = Cluster("a", "b")
        first = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        cluster.brings("a", "first")
        await first
        cluster.brings("b", "second")
        await asyncio.sleep(0)
        await cluster.polls.close()
        assert cluster.given_back.get_nowait() == "second"
        waits = cluster.receive()
        await cluster.are_asked(a=1, b=1)
        await cluster.polls.close()
        assert ids(await waits) == []
        assert not any(cluster.open.values())

    play(scenario())
