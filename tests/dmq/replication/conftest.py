"""An S3 server that the tests of a module share, and a proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rigs.faults.fault_proxy import FaultProxy
from support.rigs.services.object_server import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests; each test has a prefix of its own."""
    running = S3Server(tmp_path_factory.mktemp("s3"))
    yield running
    running.kill()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of the server, without faults."""
    running = FaultProxy(server.port)
    yield running
    running.refuse()
