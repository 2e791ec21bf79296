"""Loss of a machine under load: every acknowledged operation is in the second copy."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest
from support.clients.load.crash import Load
from support.effort import EFFORT, SEED
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.replica.pair import assert_kept

from dmq.replication.following import last_segment
from dmq.replication.objects import open_objects
from dmq.replication.restore import check
from dmq.replication.segment import SegmentHead, encode_batch, encode_segment, segment_name
from dmq.store.engines.engine import Batch

pytestmark = pytest.mark.fault
ROUNDS = 3 * EFFORT
_DRAIN_S_MAX = 90.0


class Machine:
    """Daemon with a second copy. ``lose`` kills it, deletes its directory, and serves the restored store."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._copies = 0
        self.env = {**os.environ, "DMQ_TRAIL": "off", "DMQ_REPLICA": mode}
        self._point()
        self.daemon = Daemon(self.data, env=self.env)

    @property
    def url(self) -> str:
        """URL of the current log; each store has one of its own."""
        return f"file://{self.folder}/copy-{self._copies}"

    def _point(self) -> None:
        (self.folder / f"copy-{self._copies}").mkdir()
        self.env["DMQ_REPLICA_URL"] = self.url

    def restart(self) -> None:
        """Kill the daemon and start it again on its directory."""
        self.daemon.kill()
        self.daemon.restart()

    def lose(self) -> None:
        """Kill the daemon, delete its directory, restore the store, and serve it."""
        self.daemon.kill()
        shutil.rmtree(self.data)
        done = run_command("replica", "restore", "--replica-url", self.url, "--data", str(self.data))
        assert done.returncode == 0, done.stderr
        assert check(open_objects(self.url)).faults == ()
        self._copies += 1
        self._point()
        self.daemon.spawn().wait_until_serving()


@pytest.mark.timeout(180 + 60 * ROUNDS)
def test_no_acknowledged_message_is_lost_with_the_disk(tmp_path: Path) -> None:
    """In synchronous mode kills, and kills with the deletion of the directory, lose nothing that was answered OK."""
    print(f"DMQ_TEST_SEED={SEED} rounds={ROUNDS}")
    rng = random.Random(SEED)
    machine = Machine(tmp_path, "sync")
    with machine.daemon as daemon, closing(Load(daemon.address, SEED)) as load:
        for number in range(ROUNDS):
            load.ledger.wait_for_sends(rng.randint(50, 300))
            if number % 3 == 1:
                machine.restart()
            else:
                machine.lose()
        load.end_sending()
        machine.restart()  # leases end here
        load.drain(_DRAIN_S_MAX)
        daemon.stop()
        assert_kept(load, machine.data)


def test_a_replaced_daemon_answers_no_write(tmp_path: Path) -> None:
    """A daemon that meets the segment of another one ends with exit code 8, and answers OK to no write after it."""
    machine = Machine(tmp_path, "sync")
    with machine.daemon as daemon:
        status = run_command("replica", "status", "--address", daemon.address, "--json")
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["lag_batches"] in {0, "0"}
        objects = open_objects(machine.url)
        last = last_segment(objects)
        assert last is not None
        daemon.signal(signal.SIGSTOP)
        head = SegmentHead(
            last.head.store,
            last.head.epoch + 1,
            last.head.number + 1,
            last.last_batch + 1,
            last.head.time_ms,
            b"another daemon..",
            last.checksum,
        )
        assert objects.create(segment_name(head.number), encode_segment(head, [encode_batch(Batch())])[0])
        daemon.signal(signal.SIGCONT)
        sent = run_command("topic", "create", "orders", "--address", daemon.address)
        assert sent.returncode != 0
        assert daemon.wait(30) == 8
        assert daemon.event("fenced")["error"].startswith("another daemon holds log/")
    last = last_segment(objects)
    assert last is not None
    assert last.head.epoch == head.epoch


@pytest.mark.parametrize("command", ["check", "promote", "restore --data restored"])
def test_an_unreachable_object_store_ends_a_command(tmp_path: Path, command: str) -> None:
    """A check, a promotion and a restore exit with 6 if the object store does not answer."""
    env = {"AWS_ENDPOINT": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x"}
    env |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = run_command("replica", *command.split(), "--replica-url", "s3://bucket/orders", cwd=tmp_path, env=env)
    assert done.returncode == 6, done.stderr
    assert not (tmp_path / "restored").exists()
