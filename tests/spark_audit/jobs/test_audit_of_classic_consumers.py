"""The trail of an embedded broker whose consumers divide queues: clean, through kills of the process too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest
from support.effort import at_length
from support.rigs.rocketmq.real_time import new_id

from broker_adapter.contracts.classic import ReceivedMessage, Start
from broker_adapter.contracts.message import Message
from broker_adapter.queue_client.client import connect
from broker_adapter.queue_client.consumer import ConsumerOptions, Later
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options

pytestmark = [pytest.mark.spark, at_length]
_MESSAGES = 60


def _consume(path: str, done: str, *, is_killed: bool) -> None:
    """Send, and consume with failures: every third message once, every tenth always; or die amid that."""

    async def run() -> None:
        ended: set[bytes] = set()
        async with await connect(f"embedded:{path}") as broker:
            producer = await broker.producer("producers")

            @broker.consumer("workers", {"orders": "*"}, ConsumerOptions(start=Start.FIRST_OFFSET, retries_max=1))
            async def handle(batch: Sequence[ReceivedMessage]) -> Later | None:
                (each,) = batch
                number = int(each.message.body)
                fails = number % 10 == 0 or (number % 3 == 0 and not each.attempts_failed)
                if is_killed and number == _MESSAGES // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not fails or each.attempts_failed:
                    ended.add(each.message.body)
                return Later(delay_level=1) if fails else None

            sent = [b"%d" % number for number in range(_MESSAGES)]
            for body in sent:
                await producer.send(Message(topic="orders", message_id=new_id(), body=body))
            async with asyncio.timeout(120):
                while not ended.issuperset(sent):  # noqa: ASYNC110 - for handlers
                    await asyncio.sleep(0.05)

    asyncio.run(run())
    Path(done).touch()


def test_the_trail_of_classic_consumers_is_clean(engine: TableEngine, tmp_path: Path) -> None:
    """Copies in the retry topic are fired once each, letters are the group's, and a killed run loses nothing."""
    path, done = tmp_path / "dmq", tmp_path / "done"
    for is_killed in (True, False):
        process = get_context("spawn").Process(
            target=_consume, args=(str(path), str(done)), kwargs={"is_killed": is_killed}
        )
        process.start()
        process.join(200)
        assert process.exitcode == (-signal.SIGKILL if is_killed else 0)
    assert done.exists()
    outcome = run_audit(engine, str(path / "trail"), Options())
    assert (outcome.exit_code, outcome.report["verdict"]) == (0, "clean")
    (dead,) = (row for row in outcome.report["dead"] if row["group"] == "workers")
    assert dead["topic"] == "orders"
