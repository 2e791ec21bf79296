"""The audit of real spools: whatever the hook does with an entry, a sound trail accuses nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.rigs.producer.spool import PATIENCE_S

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.spool import Spool, SpoolOptions
from dmq.trail.export.exporter import export_all
from dmq.trail.snapshots.taking import snapshot_of
from retry.sink import Death
from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options

pytestmark = pytest.mark.spark
# Writes ahead, with keys, and is killed in the middle of an attempt.
_KILLED = """
import os, signal, sys, threading
from dmq.producer_store.spool import Spool, SpoolOptions
from retry import Redelivery
spool = Spool(sys.argv[1], options=SpoolOptions(adopt_every_s=0, trail_path=sys.argv[2], trail_every_s=0.05))
hook = Redelivery(spool, mode="write_ahead")
calls = 0

@hook.handler("orders")
def send(payload, attempt):
    global calls
    calls += 1
    if payload == b"last":
        spool._trail.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if calls % 5 == 0:
        raise ConnectionError("away")

for number in range(60):
    hook.send("orders", b"%d" % number, key=f"key {number % 7}" if number % 2 else "")
hook.send("orders", b"last")
"""


def test_of_a_spool_that_writes_ahead_and_is_killed(engine: TableEngine, tmp_path: Path) -> None:
    """Sent, failed, parked behind its key, dead, requeued, held when the process was killed: all well."""
    root, trail = tmp_path / "spool", tmp_path / "trail"
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(root), str(trail)], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    with Spool(root, options=SpoolOptions(adopt_every_s=0, trail_path=trail)) as spool:
        taken = spool.take("orders", 100, PATIENCE_S)
        for held in taken[:-2]:
            spool.finish(held).result(PATIENCE_S)
        for held in taken[-2:]:
            spool.bury(held, Death.EXHAUSTED, "no").result(PATIENCE_S)
        spool.requeue("orders", [taken[-1].entry.uid])
    for data in root.glob("spool-*"):
        reached = export_all(data, trail, role="spool")
        snapshot_of(data, trail, SystemClock(), reached=reached)
    outcome = run_audit(engine, str(trail), Options())
    assert [(each["kind"], each["rule"], each["detail"]) for each in outcome.findings] == []
    assert outcome.exit_code == 0
    rows = outcome.report["spooled"]
    assert sum(row["spooled"] for row in rows) == 61 == sum(row["sent"] + row["dead"] + row["pending"] for row in rows)
    exact = run_audit(engine, str(trail), Options(exact=True))
    assert exact.report == outcome.report
