"""A run in front of the real cluster: its clients, what was accepted and what came, and what explains each copy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from support.effort import EFFORT
from support.models.trail.read import read_trail
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.cluster import cluster
from support.rigs.rocketmq.real_time import INVISIBLE_MS, REQUEST_MS, now_ms

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable
from broker_adapter.contracts.message import Envelope, unpack_id
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.runtime.clock import SystemClock
from dmq.admin.client import AdminClient

PATIENCE_S = 180.0 + 20 * EFFORT


@asynccontextmanager
async def client(*addresses: str) -> AsyncIterator[RocketMQBroker]:
    """A client of a daemon or of the cluster."""
    options = ClusterOptions(endpoints=addresses, request_timeout_ms=REQUEST_MS, sends_max=1)
    broker = RocketMQBroker(options, SystemClock())
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def readers(group: str) -> AsyncIterator[list[RocketMQBroker]]:
    """A client of each broker of the cluster: nobody waits at one for what lies at the other."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(client(each)) for each in cluster().endpoints]
        for each in found:
            await each.ensure_group(group)
        yield found


def in_front(data: Path, *options: str) -> Daemon:
    """A daemon in front of the cluster, not started."""
    return Daemon(data, "--broker", "rocketmq", "--endpoints", ";".join(cluster().endpoints), *options)


class Ledger:
    """What was accepted, and what came."""

    def __init__(self) -> None:
        self.due_ms: dict[str, int] = {}
        self.came: Counter[str] = Counter()
        self.copies: dict[str, set[tuple[str, int, int]]] = {}  # where in the cluster each was for the first time
        self.early: list[tuple[str, int]] = []
        self.late_ms: list[int] = []  # of the first copy of each

    async def send(self, broker: RocketMQBroker, envelope: Envelope, due_ms: int = 0) -> None:
        """Send until it is accepted, under one id."""
        while True:
            try:
                await broker.send([envelope])
            except BrokerUnavailable:
                await asyncio.sleep(0.05)
            else:
                self.due_ms[envelope.message_id] = due_ms or envelope.deliver_at_ms
                return

    async def receive(self, broker: RocketMQBroker, group: str, topic: str) -> None:
        """Receive and acknowledge, until cancelled."""
        while True:
            try:
                found = await broker.receive(
                    group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS * 3, wait_ms=5_000
                )
                at_ms = now_ms()
                for each in found:
                    self.came[each.message_id] += 1
                    if each.delivery_attempt == 1:
                        # not its queue's number, which a client that knows no route cannot tell
                        place = (each.receipt_handle.split()[0], each.queue_offset, each.stored_at_ms)
                        self.copies.setdefault(each.message_id, set()).add(place)
                    late_ms = at_ms - self.due_ms.get(each.message_id, 0)
                    if late_ms < 0:
                        self.early.append((each.message_id, -late_ms))
                    elif self.came[each.message_id] == 1 and each.message_id in self.due_ms:
                        self.late_ms.append(late_ms)
                await broker.ack(group, topic, [each.receipt_handle for each in found])
            except BrokerError:
                await asyncio.sleep(0.1)

    def missing(self) -> int:
        """How many have not come."""
        return sum(each not in self.came for each in self.due_ms)

    def repeated(self) -> dict[str, int]:
        """How often each is in the cluster that is there more than once."""
        return {each: len(places) for each, places in self.copies.items() if len(places) > 1}

    def lateness(self) -> str:
        """How late the first copies were, in words."""
        late_ms = sorted(self.late_ms)
        middle, far = (late_ms[len(late_ms) * percent // 100] for percent in (50, 99))
        return f"late by {middle} ms (p50), {far} ms (p99), {late_ms[-1]} ms (max)"


async def all_came(ledger: Ledger) -> None:
    """Return once all that was accepted has come."""
    async with asyncio.timeout(PATIENCE_S):
        while ledger.missing():  # noqa: ASYNC110 - the receivers count
            await asyncio.sleep(0.1)


async def all_left(daemon: Daemon) -> None:
    """Return once nothing of what is due is left in the daemon."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with AdminClient(daemon.address) as admin:
                if not admin.status().cluster.waiting:
                    return
            await asyncio.sleep(0.1)


def events(daemon: Daemon) -> list[dict[str, Any]]:
    """The trail of a daemon that ended."""
    trail = daemon.data / "trail"
    (cell,) = [path.stem for path in (trail / "cells").glob("*.json")]
    return read_trail(trail, cell)


def explained(*daemons: Daemon) -> Counter[str]:
    """How many further copies of each message the trails account for.

    One each time that a daemon sent it and knew no answer, and one for each daemon but the first that fetched it from
    the inner topic.
    """
    found: Counter[str] = Counter()
    fetched: Counter[str] = Counter()
    for daemon in daemons:
        trail = events(daemon)
        found.update(unpack_id(each["message_id"]) for each in trail if each["kind"] == "FORWARD_IN_DOUBT")
        fetched.update({unpack_id(each["message_id"]) for each in trail if each["kind"] == "FETCHED"})
    found.update({each: count - 1 for each, count in fetched.items() if count > 1})
    return found
