"""What fronts and the store process may have together is what one process may; and a part of it is of use."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from functools import partial
from pathlib import Path

import pytest
from support.rigs.broker.memory_broker import MemoryBroker
from support.rigs.broker.rig import until

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.runtime.clock import ManualClock, SystemClock
from dmq.acl.quotas import ADDRESS, KEY, RESERVE_PART, Holder, Quota, QuotaBounds, Quotas
from dmq.broker.deliveries.dispatch import RECEIVE_BYTES_MAX
from dmq.config.settings import PROCESS_HELD_BYTES_MIN, PROCESSES_MAX, ConfigError, DaemonConfig, fronts_max, load
from dmq.daemon.server import fronts as daemon_fronts
from dmq.daemon.server.fronts import front_settings, fronts_of
from dmq.http2 import LOOPBACK, Limits
from dmq.processes import passing
from dmq.processes.front import http2_limits
from dmq.processes.settings import Settings, part_of
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_methods import with_bounds
from dmq.rocketmq_server.transport.http2_server import Port

MIB = 2**20
COUNTS = [2, 3, 4, 7, 15, 32, PROCESSES_MAX]


def settings_of(count: int, bounds: QuotaBounds, *, connections_max: int = 4096) -> Settings:
    return Settings(
        log_level="info",
        log_format="json",
        delay_levels_ms=(),
        delay_max_ms=None,
        broker_name="b",
        sends_in_flight_max=1,
        sends_busy=1,
        connections=-(-connections_max // count),
        connections_per_address=None,
        idle_s=None,
        request_s=30.0,
        bytes_held=bounds.bytes_held,
        bytes_reserve=bounds.bytes_reserve,
        limits=b"",
        shares=count + 1,
        acl=None,
        tls=None,
        plain_served_to="all",
        host="127.0.0.1",
        relayed=[],
        wall_less_boot_ms=0,
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("held_bytes_max", [64 * MIB, 256 * MIB, 2048 * MIB])
def test_parts_are_no_more_than_the_whole_and_each_is_of_use(count: int, held_bytes_max: int) -> None:
    """Bytes that wait, and lists of headers; one connection has room for the largest answer wherever it lands."""
    held_bytes_max = max(held_bytes_max, PROCESS_HELD_BYTES_MIN * (count + 1))
    bounds = QuotaBounds(bytes_held=held_bytes_max, bytes_reserve=held_bytes_max // RESERVE_PART)
    quotas = Quotas(ManualClock(), bounds)
    shares = count + 1
    limits = with_bounds(http2_limits(settings_of(count, bounds)), bounds, shares)
    whole = with_bounds(Limits(), bounds)
    assert shares * limits.held_in_all <= whole.held_in_all
    assert limits.held_per_connection <= limits.held_in_all - limits.held_reserve
    assert count * limits.lists_in_all <= whole.lists_in_all
    assert count * limits.lists_per_address <= whole.lists_per_address
    assert limits.lists_per_connection <= limits.lists_per_address
    assert limits.header_list_max <= limits.lists_per_connection
    assert whole.connections_reserved <= count * limits.connections_reserved < whole.connections_reserved + count
    answer = RECEIVE_BYTES_MAX + BODY_BYTES_MAX + 128 * 1024
    for holder in (Holder(ADDRESS, LOOPBACK), Holder(ADDRESS, "10.0.0.7"), Holder(KEY, "shop")):
        part = part_of(quotas.limit(Quota.BYTES, holder), shares)
        assert part is not None
        assert answer <= min(part, limits.held_per_connection)


def test_a_part_of_a_limit_is_never_more_than_the_limit() -> None:
    """Nor less than an equal part of it; no limit has no parts."""
    assert part_of(None, 3) is None
    assert part_of(300 * MIB, 3) == 100 * MIB
    assert part_of(30 * MIB, 3) == 13 * MIB
    assert part_of(MIB, 3) == MIB
    assert part_of(0, 3) == 0


def test_processes_that_would_have_too_little_each_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text says what each would have, and what to set; the most that the least allows is taken."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load({"processes": 4, "held_bytes_max": "64MiB"})
    (problem,) = caught.value.problems
    assert "processes = 4 leaves less than 16MiB of held_bytes_max = 64MiB" in problem
    assert "set held_bytes_max = 80MiB or more, or fewer processes" in problem
    assert load({"processes": 4, "held_bytes_max": "80MiB"}).processes == 4
    assert load({"processes": fronts_max(64 * MIB), "held_bytes_max": "64MiB"}).processes == 3
    assert load({"processes": PROCESSES_MAX, "held_bytes_max": "1040MiB"}).processes == PROCESSES_MAX
    assert load({"processes": 1, "held_bytes_max": "64MiB"}).processes == 1


def test_as_many_fronts_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` on a large machine with little memory for what waits starts fewer of them."""
    monkeypatch.setattr(daemon_fronts, "processors", lambda: 64)
    assert fronts_of("auto", 256 * MIB) == 4
    assert fronts_of("auto", 64 * MIB) == 3


def test_a_connection_without_a_descriptor_is_reported() -> None:
    """Danger: it was closed without a word, and counted for its front for ever."""

    async def scenario() -> None:
        here, there = passing.pair()
        taken: list[object] = []
        lost: list[object] = []

        async def take(accepted: socket.socket, peer: object) -> None:
            accepted.close()
            taken.append(peer)

        listening = socket.create_server(("127.0.0.1", 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with here, there, listening:
            passing.receive(there, take, lost.append)
            for number in range(2):
                with socket.create_connection(listening.getsockname()) as _:
                    accepted, _peer = listening.accept()
                    with accepted:
                        passing.pass_on(here, accepted, ("10.0.0.7", number))
                    if number == 0:  # the next descriptor there would be is beyond what there may be
                        with socket.socket() as free:
                            lowest = free.fileno()
                        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
                    try:
                        await until(partial(lambda count: len(taken) + len(lost) > count, number))
                    finally:
                        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert lost == [("10.0.0.7", 0)]
        assert taken == [("10.0.0.7", 1)]

    asyncio.run(scenario())


def test_a_front_that_starts_later_has_the_same_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Danger: processors were counted anew for each, so that one taken away meanwhile was a division by nothing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    config = DaemonConfig(data=tmp_path, processes="auto", tls_certificate="off")
    assert fronts_of(config.processes, config.held_bytes_max) == 0
    clock = SystemClock()
    service = MessagingService(MemoryBroker(clock), clock, Sessions(clock), SidecarConfig())
    served = Port(service, Dispatcher(service, clock=clock))
    settings = front_settings(config, served, SidecarConfig(), clock, count=3, connections_max=90)
    assert (settings.connections, settings.shares) == (30, 4)
