"""A daemon that makes backups by itself is killed again and again: what has a backup's name is whole, always."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support.clients.wire.client import WireClient, a_message
from support.effort import EFFORT, SEED
from support.rigs.daemon.process import Daemon

from dmq import AdminClient
from dmq.recovery import check_store

KILLS, PATIENCE_S, FAR_MS = 2 * EFFORT, 60.0, 4_000_000_000_000
BETWEEN_S = (0.0, 0.8)  # the first backup begins at once, and is looked through for about half a second
pytestmark = [pytest.mark.fault, pytest.mark.timeout(180 + 30 * KILLS)]


def test_a_kill_at_any_moment_leaves_whole_backups_only(tmp_path: Path) -> None:
    """Nothing half done has the name of one; the run that comes to its end has swept the rest, and kept so many."""
    rng, folder = random.Random(SEED), tmp_path / "backups"
    folder.mkdir()
    env = {"DMQ_BACKUP_EVERY": "1h", "DMQ_BACKUP_DIR": str(folder), "DMQ_BACKUPS_KEPT": "1"}
    with Daemon(tmp_path / "data", env={**os.environ, **env}) as daemon:
        with WireClient(daemon.address) as client:
            client.send(a_message("orders", "m-1", deliver_at_ms=FAR_MS))
        for _ in range(KILLS):
            time.sleep(rng.uniform(*BETWEEN_S))  # a kill at any moment
            daemon.kill()
            for path in folder.glob("dmq-*Z"):
                assert not check_store(path, lambda _: None).findings.count
            daemon.restart()
        until_s = time.monotonic() + PATIENCE_S
        with AdminClient(daemon.address) as admin:
            while not admin.status().backups.last_at_ms:
                assert time.monotonic() < until_s
                time.sleep(0.05)
        daemon.stop()
    (path,) = folder.iterdir()
    assert path.name.endswith("Z")
    assert not check_store(path, lambda _: None).findings.count
