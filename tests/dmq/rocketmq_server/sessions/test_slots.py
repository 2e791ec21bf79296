"""What one client may hold open, and what that leaves for the others."""

from __future__ import annotations

import asyncio

import pytest

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.runtime.clock import ManualClock
from dmq.acl.quotas import Quotas
from dmq.rocketmq_server.sessions.slots import PollSlots, Slots


def test_one_client_cannot_take_every_place() -> None:
    """It is refused at its own bound; another one is served until all places are taken."""
    places = Slots("things", in_all=3, per_client=2)
    places.take("greedy")
    places.take("greedy")
    with pytest.raises(Overloaded, match=r"things of one client \(limit 2\)"):
        places.take("greedy")
    places.take("modest")
    with pytest.raises(Overloaded, match=r"things \(limit 3\)"):
        places.take("late")
    assert (len(places), places.held_by("greedy"), places.held_by("late")) == (3, 2, 0)
    places.free("greedy")
    places.take("late")
    assert (len(places), places.held_by("greedy")) == (3, 1)


def test_places_leave_nothing_behind() -> None:
    """Clients come and go under ever new ids."""
    places = Slots("things", in_all=3, per_client=2)
    for number in range(100):
        places.take(f"c-{number}")
        places.free(f"c-{number}")
    assert not places._by_client


async def forever(_: int) -> str:
    """A poll that finds nothing."""
    return str(await asyncio.Event().wait())


async def hold(polls: PollSlots, client_id: str) -> str:
    """Wait until the wait is ended."""
    return await polls.run(client_id, (), forever, 1_000, nothing="ended")


async def told(left_ms: int) -> str:
    """A poll that finds how long it may wait."""
    return str(left_ms)


def test_a_goodbye_ends_the_waits_of_one_client() -> None:
    """And of nobody else; closing ends all. Twice is fine, and nothing is left behind."""

    async def scenario() -> None:
        polls = PollSlots(in_all=10, per_client=10, quotas=Quotas(ManualClock()))
        goes = [asyncio.create_task(hold(polls, "goes")) for _ in range(3)]
        stays = asyncio.create_task(hold(polls, "stays"))
        await asyncio.sleep(0)
        polls.end("goes")
        polls.end("goes")
        assert await asyncio.gather(*goes) == ["ended"] * 3
        assert not stays.done()
        assert await polls.run("stays", (), told, 1_000, nothing="") == "1000"
        polls.close()
        polls.close()
        assert await stays == "ended"
        assert await polls.run("stays", (), told, 1_000, nothing="") == "0"
        assert polls._waits == {}

    asyncio.run(scenario())
