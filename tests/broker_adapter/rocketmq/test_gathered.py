"""Messages that are sent at the same time go together; few at a time wait for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

import pytest
from support.rigs.rocketmq.real_time import a_message

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import SendReceipt
from broker_adapter.rocketmq import gathered
from broker_adapter.rocketmq.gathered import Gathered, GatheredSend
from broker_adapter.wire import rocketmq_v2 as wire


class Cluster:
    """Answers a call when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], asyncio.Future[None]]] = []
        self.gathered = Gathered(self.take)
        self.changed = asyncio.Condition()
        self.refuses: set[str] = set()

    async def take(self, outgoing: Sequence[GatheredSend]) -> Sequence[SendReceipt]:
        """Wait for the test; refuse what is to be refused, and all that is with it."""
        ids = [each.envelope.message_id for each in outgoing]
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append((ids, answer))
        async with self.changed:
            self.changed.notify_all()
        if not self.refuses.isdisjoint(ids):
            raise Refused(Rule.BODY_EMPTY, "it is empty")
        await answer
        return [SendReceipt(each, -1, 7) for each in ids]

    def send(self, message_id: str, size: int = 4) -> asyncio.Task[SendReceipt]:
        """Begin a send."""
        envelope = a_message("orders", bytes(size), message_id=message_id)
        return asyncio.create_task(self.gathered.send(GatheredSend(envelope, wire.Message())))

    async def got(self, calls: int) -> list[list[str]]:
        """Return what the calls so far carried, once there are so many."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.calls) >= calls)
        return [ids for ids, _ in self.calls]

    def answer(self, error: BrokerError | None = None) -> None:
        """Answer all calls."""
        for _, answer in self.calls:
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(None)


def play(scenario: Coroutine[object, object, None]) -> None:
    """Run a scenario; none waits for long."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def _four_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many go alone."""
    monkeypatch.setattr(gathered, "_CALLS", 4)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes because of the time that passed."""
    monkeypatch.setattr(gathered, "_WAIT_S", 3600)


@pytest.mark.usefixtures("patient")
def test_messages_that_come_during_calls_go_together() -> None:
    """In the order it came, at most 32 and half a megabyte in a call; the first ones go alone."""

    async def scenario() -> None:
        cluster = Cluster()
        sending = [cluster.send(str(number)) for number in range(50)]
        assert await cluster.got(4) == [["0"], ["1"], ["2"], ["3"]]
        cluster.answer()
        assert (await cluster.got(6))[4:] == [[str(n) for n in range(4, 36)], [str(n) for n in range(36, 50)]]
        cluster.answer()
        assert [(await each).message_id for each in sending] == [str(number) for number in range(50)]
        assert cluster.gathered.is_idle
        large = [cluster.send(f"large {number}", 300 * 1024) for number in range(6)]
        await cluster.got(10)
        cluster.answer()
        assert (await cluster.got(12))[10:] == [["large 4"], ["large 5"]]
        cluster.answer()
        await asyncio.gather(*large)

    play(scenario())


def test_a_call_that_hangs_holds_up_no_other() -> None:
    """What waits goes after a moment, whatever became of the calls before."""

    async def scenario() -> None:
        cluster = Cluster()
        sending = [cluster.send(str(number)) for number in range(6)]
        assert (await cluster.got(5))[4] == ["4", "5"]
        cluster.answer()
        await asyncio.gather(*sending)

    play(scenario())


@pytest.mark.usefixtures("patient")
def test_a_refusal_meets_only_the_message_that_is_refused() -> None:
    """The others of its call are sent alone."""

    async def scenario() -> None:
        cluster = Cluster()
        cluster.refuses = {"5"}
        sending = [cluster.send(str(number)) for number in range(7)]
        await cluster.got(4)
        cluster.answer()
        assert (await cluster.got(8))[4:] == [["4", "5", "6"], ["4"], ["5"], ["6"]]
        cluster.answer()
        results = await asyncio.gather(*sending, return_exceptions=True)
        assert [isinstance(each, Refused) for each in results] == [number == 5 for number in range(7)]

    play(scenario())


@pytest.mark.usefixtures("patient")
def test_a_call_without_an_answer_leaves_all_its_messages_in_doubt() -> None:
    """And those only."""

    async def scenario() -> None:
        cluster = Cluster()
        sending = [cluster.send(str(number)) for number in range(6)]
        await cluster.got(4)
        cluster.answer()
        await cluster.got(5)
        cluster.answer(BrokerUnavailable("no answer"))
        results = await asyncio.gather(*sending, return_exceptions=True)
        assert [isinstance(each, BrokerUnavailable) for each in results] == [*[False] * 4, True, True]

    play(scenario())


@pytest.mark.usefixtures("patient")
def test_a_send_cancelled_before_it_left_is_not_sent() -> None:
    """And what goes on without it is answered."""

    async def scenario() -> None:
        cluster = Cluster()
        sending = [cluster.send(str(number)) for number in range(6)]
        await cluster.got(4)
        sending[4].cancel()
        await asyncio.gather(sending[4], return_exceptions=True)
        cluster.answer()
        assert (await cluster.got(5))[4] == ["5"]
        cluster.answer()
        assert (await sending[5]).message_id == "5"

    play(scenario())


@pytest.mark.usefixtures("patient")
def test_closing_leaves_no_call_without_an_answer() -> None:
    """What waits for one is told that it is in doubt."""

    async def scenario() -> None:
        cluster = Cluster()
        sending = [cluster.send(str(number)) for number in range(6)]
        await cluster.got(4)
        await cluster.gathered.close()
        results = await asyncio.gather(*sending[4:], return_exceptions=True)
        assert all(isinstance(each, BrokerUnavailable) for each in results)
        cluster.answer()
        await asyncio.gather(*sending[:4])

    play(scenario())
