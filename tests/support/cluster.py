"""A real Apache RocketMQ for tests, once per run: two brokers, each with its proxy, behind one name server.

Maven brings it at its first use. Where it cannot, tests that need it are skipped by name; in CI they fail.
"""

from __future__ import annotations

import atexit
import itertools
import os
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from bench.rocketmq import PeerMissing, RocketMQ, artifacts
from broker_adapter.clock import SystemClock
from broker_adapter.delay import INNER_GROUP, INNER_TOPIC
from dmq.sidecar.tls import self_signed

_HEAP_MB = 384
_GROUPS = itertools.count()
ORDERS = "orders"  # the topic of the documentation's examples
_TOPICS = {
    "NORMAL": 60,
    "FIFO": 30,
    "DELAY": 20,
    "TRANSACTION": 20,
}  # known everywhere after seconds: made at the start


_ending = ExitStack()
atexit.register(_ending.close)


class Cluster:
    """A running cluster, and names in it that nobody used yet."""

    def __init__(self, rocketmq: RocketMQ, certificate: Path) -> None:
        self.rocketmq = rocketmq
        self.certificate = certificate  # its proxies take TLS and plain text on one port
        self._topics = {kind: itertools.count() for kind in _TOPICS}
        topics = {self._name(kind, number): kind for kind, count in _TOPICS.items() for number in range(count)}
        rocketmq.make_topics({INNER_TOPIC: "NORMAL", ORDERS: "NORMAL", **topics})
        rocketmq.make_group(INNER_GROUP)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses of its proxies."""
        return self.rocketmq.endpoints

    def topic(self, kind: str = "NORMAL") -> str:
        """Return an unused topic of a type."""
        number = next(self._topics[kind])
        assert number < _TOPICS[kind], f"more topics of type {kind} are needed than are made"
        return self._name(kind, number)

    def group(self, *, attempts: int = 17, is_fifo: bool = False) -> str:
        """Make a consumer group."""
        name = f"group-{next(_GROUPS)}"
        self.rocketmq.make_group(name, attempts=attempts, is_fifo=is_fifo)
        return name

    @staticmethod
    def _name(kind: str, number: int) -> str:
        return f"{kind.lower()}-{number}"


@cache
def cluster() -> Cluster:
    """Return the cluster of this run; it ends with this process at the latest."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="dmq-cluster-")
        certificate, key = self_signed(Path(folder.name), SystemClock().now_ms())
        tls = {"tlsTestModeEnable": False, "tlsCertPath": str(certificate), "tlsKeyPath": str(key)}
        started = RocketMQ(Path(folder.name), artifacts(), brokers=2, heap_mb=_HEAP_MB, proxy=tls)
    except PeerMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Apache RocketMQ: {error}")
    _ending.callback(cluster.cache_clear)
    _ending.callback(folder.cleanup)
    _ending.callback(started.close)
    return Cluster(started, certificate)


def end() -> None:
    """End the cluster, if there is one."""
    _ending.close()
