"""What retention removes, the disk gets back; and closing does not wait for it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from support.rigs.broker.rig import TOPIC, EmbeddedRig, an_envelope, play

from dmq.broker.operations import retention
from dmq.broker.topics.settings import KeepChange
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family, pack_queue_key

pytestmark = pytest.mark.integration
_MIB = 1024 * 1024


def tables_bytes(path: Path) -> int:
    """The size of all tables below a directory."""
    return sum(each.stat().st_size for each in path.rglob("*.sst"))


def test_the_disk_gets_its_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 MiB that lie in tables nine tenths are removed: what is left takes little more than its size."""
    monkeypatch.setattr(retention, "_BUSY_PAUSE_S", 0)

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.broker.operator.create_topic(TOPIC, queues=2, message_type=None, keep=KeepChange(1_000))
        for number in range(40):
            if number == 36:
                rig.clock.advance(1_000)
            body = [os.urandom(_MIB // 16) for _ in range(16)]
            await rig.broker.send([an_envelope(f"m-{number}-{n}", payload=each) for n, each in enumerate(body)])
        rig.store.checkpoint(tmp_path / "written")  # has all of it in tables
        before = tables_bytes(tmp_path / "run-0")
        assert before > 39 * _MIB
        while (await rig.broker.retention.turn()).messages:
            pass
        assert rig.broker.retention.total.messages == 36 * 16
        await rig.broker.retention.reclaim()
        for _ in range(100):  # RocksDB deletes files that are no longer needed a moment later
            if tables_bytes(tmp_path / "run-0") < 6 * _MIB:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{tables_bytes(tmp_path / 'run-0')} bytes of tables")

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=True), scenario))


def test_closing_does_not_wait_for_space(tmp_path: Path) -> None:
    """An engine that is closed while it gives space back ends that early, and opens again with all that was kept."""
    engine = RocksEngine(tmp_path / "db")
    for first in range(0, 64, 16):
        batch = Batch()
        rows = range(first, first + 16)
        batch.puts += [(Family.QUEUE, pack_queue_key(1, n % 2, n), os.urandom(_MIB)) for n in rows]
        engine.write(batch)
    for queue_id in (0, 1):
        batch = Batch()
        batch.ranges.append((Family.QUEUE, pack_queue_key(1, queue_id, 0), pack_queue_key(1, queue_id, 40)))
        engine.write(batch)
    begun = threading.Event()
    failures: list[Exception] = []

    def reclaim() -> None:
        begun.set()
        try:
            for _ in range(1_000):
                engine.reclaim(Family.QUEUE, [(pack_queue_key(1, n, 0), pack_queue_key(1, n, 40)) for n in (0, 1)])
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=reclaim)
    thread.start()
    assert begun.wait(10)
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error).__name__ for error in failures] == ["StoreClosed"]
    again = RocksEngine(tmp_path / "db")
    assert len(again.scan(Family.QUEUE, b"", b"\xff" * 20, limit=100).rows) == 24
    again.close()
