"""Real Apache RocketMQ for tests, once per run: two brokers, each with its proxy, behind one name server; and of the
line before, RocketMQ 4, a broker and a name server.

Maven brings it at its first use. Where it cannot, tests that need it are skipped by name; in CI they fail.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from support.clients.java.jvm import SHORT_LIVED

from bench.rocketmq import VERSION_4, PeerMissing, RocketMQ, artifacts
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.delay import INNER_GROUP, INNER_TOPIC
from dmq.rocketmq_server.transport.tls import self_signed

_HEAP_MB = 384
_HEAP_4_MB = 256
# An index of messages that is small, because its files are made whole; a timer wheel that is compared with its file,
# byte for byte, every minute and not every second, which takes a third of a processor; and a broker that refuses
# nothing because the machine stalled: by itself it does so after 0.2 s in its queue, for which it looks every 10 ms.
_BROKER = (
    "messageIndexEnable=true\nmaxHashSlotNum=5000\nmaxIndexNum=20000\ntimerFlushIntervalMs=60000\n"
    "waitTimeMillsInSendQueue=60000\nosPageCacheBusyTimeOutMills=60000\nbrokerFastFailureEnable=false\n"
)
_GROUPS = itertools.count()
BROKERS = ("east@broker-a", "west@broker-b")  # each in a machine room, as RocketMQ's own names have it
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
        rocketmq.make_group(INNER_GROUP)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses of its proxies."""
        return self.rocketmq.endpoints

    def topic(self, kind: str = "NORMAL") -> str:
        """Return an unused topic of a type."""
        number = next(self._topics[kind])
        assert number < _TOPICS[kind], f"more topics of type {kind} are needed than are made"
        return _name(kind, number)

    def group(self, *, attempts: int = 17, is_fifo: bool = False) -> str:
        """Make a consumer group."""
        name = f"group-{next(_GROUPS)}"
        self.rocketmq.make_group(name, attempts=attempts, is_fifo=is_fifo)
        return name


def _name(kind: str, number: int) -> str:
    return f"{kind.lower()}-{number}"


@cache
def cluster() -> Cluster:
    """Return the cluster of this run; it ends with this process at the latest."""
    with _skipped_if_missing():
        folder = _folder("dmq-cluster-")
        certificate, key = self_signed(folder, SystemClock().now_ms())
        tls = {"tlsTestModeEnable": False, "tlsCertPath": str(certificate), "tlsKeyPath": str(key)}
        topics = {_name(kind, number): kind for kind, count in _TOPICS.items() for number in range(count)}
        started = RocketMQ(
            folder,
            artifacts(),
            brokers=BROKERS,
            heap_mb=_HEAP_MB,
            proxy=tls,
            broker=_BROKER,
            jvm=SHORT_LIVED,
            topics={INNER_TOPIC: "NORMAL", ORDERS: "NORMAL", **topics},
        )
    _ending.callback(cluster.cache_clear)
    _ending.callback(started.close)
    return Cluster(started, certificate)


@cache
def cluster_4() -> RocketMQ:
    """Return the cluster of RocketMQ 4 of this run."""
    with _skipped_if_missing():
        folder = _folder("dmq-cluster-4-")
        lib = artifacts(VERSION_4)
        started = RocketMQ(folder, lib, heap_mb=_HEAP_4_MB, version=VERSION_4, broker=_BROKER, jvm=SHORT_LIVED)
    _ending.callback(cluster_4.cache_clear)
    _ending.callback(started.close)
    started.make_topics({ORDERS: "NORMAL"})  # the name server knows it then
    return started


def _folder(prefix: str) -> Path:
    """Make a folder that is removed after what runs in it has ended."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    _ending.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _skipped_if_missing() -> Iterator[None]:
    try:
        yield
    except PeerMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Apache RocketMQ: {error}")


def end() -> None:
    """End the clusters, if there are any."""
    _ending.close()
