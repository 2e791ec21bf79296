"""Who waits while a server is busy, and who is read from next; pure but for the turns of the loop."""

from __future__ import annotations

import asyncio

from dmq.http2.admission.backpressure import MUCH, Backpressure


class Client:
    """One that brings ten calls each time it is read from."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_read = True
        self.reads = 0

    def pause(self) -> None:
        self.is_read = False

    def resume(self) -> None:
        self.is_read = True
        asyncio.get_running_loop().call_soon(self.read)

    def read(self, in_flight: int = MUCH) -> None:
        if self.is_read:
            self.reads += 1
            self.server.in_flight += 10
            self.server.turns.heard(self, in_flight)


class Server:
    """Busy from 30 calls on."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.turns = Backpressure(lambda: self.in_flight >= 30)

    async def serve(self, count: int) -> None:
        """Finish calls, and read on."""
        self.in_flight -= count
        self.turns.go_on()
        for _ in range(20):
            await asyncio.sleep(0)


def test_those_that_send_much_wait_and_take_turns() -> None:
    """Nobody reads more than there is room for, and each is read from as often as the others."""

    async def scenario() -> None:
        server = Server()
        clients = [Client(server) for _ in range(5)]
        for client in clients * 2:
            client.read()
        assert server.in_flight == 70, "who was read from before it was busy is known by the next read"
        assert not any(client.is_read for client in clients)
        for _ in range(10):
            await server.serve(server.in_flight - 5)
            assert 30 <= server.in_flight < 40
        assert max(client.reads for client in clients) - min(client.reads for client in clients) <= 1

    asyncio.run(scenario())


def test_a_client_with_little_in_flight_never_waits() -> None:
    """Consumers and small producers are read from, however busy the server is; so is everybody while it is not."""

    async def scenario() -> None:
        server = Server()
        small, large = Client(server), Client(server)
        large.read()
        assert large.is_read
        server.in_flight = 100
        small.read(in_flight=MUCH - 1)
        assert small.is_read
        large.read()
        assert not large.is_read

    asyncio.run(scenario())


def test_a_closed_session_is_not_resumed() -> None:
    """A connection that is gone takes nobody's turn."""

    async def scenario() -> None:
        server = Server()
        gone, there = Client(server), Client(server)
        server.in_flight = 30
        gone.read()
        there.read()
        server.turns.left(gone)
        await server.serve(server.in_flight)
        assert (gone.is_read, there.is_read) == (False, True)

    asyncio.run(scenario())


def test_no_client_is_read_from_without_room() -> None:
    """Whoever says anything waits, also with a single call in flight; then all are read from again, in order."""

    async def scenario() -> None:
        server, is_full = Server(), True
        server.turns = Backpressure(lambda: server.in_flight >= 1000, lambda: is_full)
        clients = [Client(server) for _ in range(3)]
        for client in clients:
            client.read(in_flight=1)
        assert not any(client.is_read for client in clients)
        await server.serve(0)
        assert not any(client.is_read for client in clients)
        is_full = False
        await server.serve(0)
        assert all(client.is_read for client in clients)
        clients[0].read(in_flight=1)
        assert clients[0].is_read

    asyncio.run(scenario())
