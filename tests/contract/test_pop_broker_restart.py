"""What a durable ``PopBroker`` promises beyond one run, and about leases that the broker renews by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.rigs import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    Rig,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    on_memory,
    on_rocksdb,
    play,
    receive,
    receive_one,
    send,
    until,
)

from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX
from dmq.embedded import group_queue
from dmq.store.engine import Engine, EngineStats, Rows
from dmq.store.memory import MemoryEngine
from dmq.store.ops import Batch, Family

SOON_MS = 5_000
ENDS = [
    pytest.param(on_rocksdb, End.CLOSE, id="rocksdb-close"),
    pytest.param(on_rocksdb, End.KILL, id="rocksdb-kill"),
    pytest.param(on_memory, End.CLOSE, id="memory-close"),
    pytest.param(on_memory, End.KILL, id="memory-kill"),
    pytest.param(on_memory, End.POWER_LOSS, id="memory-power-loss"),
]
Life = Callable[[Rig, Callable[[], object]], object]


def every_end(scenario: Callable[..., object]) -> Callable[..., None]:
    """Run a scenario for each way a run can end; it calls ``await restart()``."""

    def test(make: Callable[[Path, int], Rig], end: End, tmp_path: Path) -> None:
        async def with_end(rig: Rig) -> None:
            await scenario(rig, lambda: rig.restart(end))  # type: ignore[misc]  # an async scenario

        asyncio.run(play(make(tmp_path, 4), with_end))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return pytest.mark.parametrize(("make", "end"), ENDS)(test)
