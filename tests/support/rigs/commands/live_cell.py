"""A daemon's parts in this process, for tests of commands: the real broker in memory, served on loopback by a thread.

Its clock stands at ``NOW`` unless a test moves it. Nothing is a double but the clock; faults are made in the client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar
from unittest.mock import patch

import structlog
from google.protobuf.message import Message
from support.rigs.broker.rig import PATIENCE_S, EmbeddedRig
from support.rigs.commands.fake_admin_client import run_dmq
from typer.testing import Result

from broker_adapter.wire.pool import Method
from dmq.acl.quotas import Quotas
from dmq.admin import admin_v1 as wire
from dmq.admin.api import AdminService
from dmq.admin.client import client
from dmq.admin.operations.daemon import RunningDaemon
from dmq.admin.operations.objects import QuotaCalls
from dmq.config.settings import DaemonConfig
from dmq.config.units import Address
from dmq.daemon.server import ServerOptions, Transport, WatchedFiles, transport_of
from dmq.metrics.registry import Metrics

NOW = 1_700_000_000_000  # 2023-11-14T22:13:20Z

_Answer = TypeVar("_Answer")


class WatchedClient(client.AdminClient):
    """The real client. It notes calls, with deadlines in seconds; ``before_call`` hears of each, and may fail it."""

    deadlines: ClassVar[list[tuple[str, float]]]
    before_call: ClassVar[Callable[[str], None]]

    def _call(self, method: Method, request: Message) -> Any:  # noqa: ANN401 - the response of the method
        self.deadlines.append((method.name, self._deadline_s(method, request)))
        WatchedClient.before_call(method.name)
        return super()._call(method, request)


class LiveCell:
    """The broker, what answers operators and clients about it, and a thread that serves both."""

    def __init__(self, path: Path, *, acl: Path | None, transport: Literal["http2", "grpcio"]) -> None:
        self.rig = EmbeddedRig(path, on_disk=False, queues=3)
        self.cell: RunningDaemon
        self._config = DaemonConfig(
            listen=Address("127.0.0.1", 0),
            data=path,
            tls_certificate="off",
            queues_per_topic=self.rig.queues,
            acl=acl,
            transport=transport,
        )
        self._server: Transport
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)  # of a test that failed to open it
        self._thread.start()
        self.do(self._open())

    async def _open(self) -> None:
        rig, config = self.rig, self._config
        await rig.open()
        metrics = Metrics(process=False)
        self.cell = RunningDaemon(config, rig.store, rig.broker, metrics, "1.2.3", NOW, wire.SERVING)
        quotas = Quotas(rig.store.clock)
        self.admin = AdminService(
            self.cell,
            quotas=QuotaCalls(quotas, _keep_nothing),
        )
        files = WatchedFiles.of(config, rig.store.clock)
        own = rig.store.clock, rig.broker, metrics, self.admin, quotas
        self._server = transport_of(config, *own, files=files, options=ServerOptions(16, "1.2.3"))
        self.cell.listen = str(Address("127.0.0.1", await self._server.start()))

    def do(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Do something to the broker, where it runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * PATIENCE_S)

    def ask(self, request: Message) -> Any:  # noqa: ANN401 - the response of its RPC
        """Return the answer of the admin service to a request, without a transport; raise what it raises."""
        return self.do(self._answer(request))

    async def _answer(self, request: Message) -> Message:
        return await self.admin.handler(type(request).__name__.removesuffix("Request"))(request)

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin something where the broker runs, and do not wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, *arguments: str, stdin: bytes = b"") -> Result:
        """Run a command that asks this daemon."""
        return run_dmq("--address", self.cell.listen, *arguments, stdin=stdin)

    @property
    def calls(self) -> list[str]:
        """The names of the calls that commands made."""
        return [name for name, _ in WatchedClient.deadlines]

    @property
    def deadlines(self) -> list[tuple[str, float]]:
        """The calls that commands made, with the deadline of each in seconds."""
        return WatchedClient.deadlines

    def before_call(self, hear: Callable[[str], None]) -> None:
        """Have ``hear`` called with the name of each call from here on, which may raise instead of it."""
        WatchedClient.before_call = staticmethod(hear)

    def close(self) -> None:
        """End it."""
        self.do(self._server.stop(0))
        self.do(self.rig.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _keep_nothing(encoded: bytes) -> None:
    """Let the limits go with this process."""


@contextmanager
def live_cell(
    path: Path, *, acl: Path | None = None, transport: Literal["http2", "grpcio"] = "http2"
) -> Iterator[LiveCell]:
    """Give a daemon that commands find; it ends with the context. With ``acl`` it wants an access key of that file."""
    WatchedClient.deadlines = []
    WatchedClient.before_call = staticmethod(lambda name: None)
    was = structlog.get_config()  # what the broker logs has no place among what commands print
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    try:
        with patch("dmq.admin.client.AdminClient", WatchedClient):
            live = LiveCell(path, acl=acl, transport=transport)
            try:
                yield live
            finally:
                live.close()
    finally:
        structlog.configure(**was)
