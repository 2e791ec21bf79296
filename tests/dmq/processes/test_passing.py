"""Accepted connections on their way to a front."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dmq.processes import passing

PATIENCE_S = 60.0
PASSED_MAX = 100_000
ADDRESSES = {"IPv4": (socket.AF_INET, "127.0.0.1"), "IPv6": (socket.AF_INET6, "::1")}


def _has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


class Taker:
    """A front, as far as it takes connections."""

    def __init__(self) -> None:
        self.taken: list[tuple[socket.socket, object]] = []
        self.news = asyncio.Event()

    async def take(self, accepted: socket.socket, peer: object) -> None:
        self.taken.append((accepted, peer))
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.taken) < count:
                self.news.clear()
                await self.news.wait()

    def close(self) -> None:
        for accepted, _ in self.taken:
            accepted.close()


@contextmanager
def connected(
    family: int = socket.AF_INET, host: str = "127.0.0.1"
) -> Iterator[tuple[socket.socket, socket.socket, object]]:
    """A client, what was accepted of it, and where from."""
    with socket.socket(family) as listening:
        listening.bind((host, 0))
        listening.listen()
        with socket.socket(family) as client:
            client.connect(listening.getsockname())
            accepted, peer = listening.accept()
            with accepted:
                yield client, accepted, peer


@contextmanager
def nothing_left() -> Iterator[None]:
    """As many descriptors are open behind it as before."""

    def sockets() -> set[str]:
        found = set[str]()
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # of the listing itself
                found.add(str(each.readlink()))
        return {each for each in found if each.startswith("socket:")}

    before = sockets()
    yield
    assert sockets() == before


def play(scenario: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run a scenario on both ends of what connections are passed by."""

    async def run() -> None:
        here, there = passing.pair()
        with here, there:
            await scenario(here, there)

    with nothing_left():
        asyncio.run(run())


@pytest.mark.parametrize(
    "family", ["IPv4", pytest.param("IPv6", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here"))]
)
def test_a_connection_continues_at_the_other_end(family: str) -> None:
    """With the address that it came from, and nobody else holds it: when the other end closes it, its client hears."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        taker = Taker()
        end = passing.receive(there, taker.take)
        with connected(*ADDRESSES[family]) as (client, accepted, peer):
            passing.pass_on(here, accepted, peer)
            accepted.close()
            await taker.until(1)
            ((taken, name),) = taker.taken
            assert name == peer == client.getsockname()
            client.sendall(b"hello")
            assert await asyncio.get_running_loop().sock_recv(taken, 100) == b"hello"
            assert not taken.getblocking()
            taken.close()
            client.settimeout(PATIENCE_S)
            assert client.recv(100) == b""
        end()

    play(scenario)


def test_connections_come_in_their_order() -> None:
    """All that were passed on before anybody looked."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        taker = Taker()
        for number in range(8):
            with connected() as (_, accepted, _):
                passing.pass_on(here, accepted, ("192.0.2.7", number))
        end = passing.receive(there, taker.take)
        await taker.until(8)
        end()
        assert [name for _, name in taker.taken] == [("192.0.2.7", number) for number in range(8)]
        taker.close()

    play(scenario)


def test_an_end_that_accepts_nothing_is_distinguished() -> None:
    """When as many wait as fit; those are taken later, and the one that did not fit is still its owner's."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        taker, passed = Taker(), 0
        with connected() as (client, accepted, peer):
            with suppress(BlockingIOError):
                while passed < PASSED_MAX:
                    passing.pass_on(here, accepted, peer)
                    passed += 1
            assert 0 < passed < PASSED_MAX
            accepted.send(b"still here")
            assert client.recv(100) == b"still here"
            end = passing.receive(there, taker.take)
            await taker.until(passed)
            passing.pass_on(here, accepted, peer)
            await taker.until(passed + 1)
            end()
            taker.close()

    play(scenario)


def test_a_closed_end_is_distinguished() -> None:
    """The connection is still its owner's."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        there.close()
        with connected() as (client, accepted, peer):
            with pytest.raises(OSError, match="Broken pipe"):
                passing.pass_on(here, accepted, peer)
            accepted.send(b"still here")
            assert client.recv(100) == b"still here"

    play(scenario)


def test_connections_on_their_way_to_a_closed_end_are_closed() -> None:
    """Its client hears of it, and can come again."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        with connected() as (client, accepted, peer):
            passing.pass_on(here, accepted, peer)
            accepted.close()
            there.close()
            client.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                assert client.recv(100) == b""

    play(scenario)


def test_receiving_ends_when_the_other_end_is_gone() -> None:
    """By itself: a loop that is told again and again that there is something to read would do nothing else."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        taker = Taker()
        end = passing.receive(there, taker.take)
        with connected() as (_, accepted, peer):
            passing.pass_on(here, accepted, peer)
        here.close()
        await taker.until(1)
        for _ in range(5):  # a readable socket is found in each turn
            await asyncio.sleep(0)
        assert not asyncio.get_running_loop().remove_reader(there.fileno())
        end()
        taker.close()

    play(scenario)


def test_a_front_without_descriptors_takes_connections_later() -> None:
    """It says why it does not; the client hears that its connection is lost, and the next one is served."""

    async def scenario(here: socket.socket, there: socket.socket) -> None:
        taker = Taker()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with connected() as (client, accepted, peer), connected() as (_, other, other_peer):
            end = passing.receive(there, taker.take)
            free = os.dup(0)  # the lowest number that is not taken
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            os.close(free)
            try:
                with capture_logs() as logs:
                    passing.pass_on(here, accepted, peer)
                    async with asyncio.timeout(PATIENCE_S):
                        while not logs:  # noqa: ASYNC110 - a turn of the loop
                            await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert [each["event"] for each in logs] == ["connection_handover_failed"]
            accepted.close()
            client.settimeout(PATIENCE_S)
            assert client.recv(100) == b"", "the other end keeps no copy of it"
            passing.pass_on(here, other, other_peer)
            await taker.until(1)
            assert taker.taken[0][1] == other_peer
            end()
            taker.close()

    play(scenario)
