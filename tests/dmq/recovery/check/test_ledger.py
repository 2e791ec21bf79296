"""The ledger of a real daemon: verified under load and over kills, and convicted of what was planted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from support.clients.load.crash import Load
from support.rigs.broker.audits import hasten_verification
from support.rigs.commands.fake_admin_client import run_dmq
from support.rigs.daemon.process import Daemon
from support.rigs.store.driver import row, row_key
from support.rigs.store.rows import all_rows, put_batch

from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.errors import StoreError
from dmq.recovery.check.ledger import LedgerVerifier, Verification
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.schema.accounting.ledger import decode_ledger, encode_ledger, unpack_ledger_key
from dmq.store.schema.keys import META_LEDGER, Family
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import EventKind, gap_event
from dmq.trail.ledger import LEDGER_KINDS

pytestmark = pytest.mark.integration
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run counting processes at the priority of the test: at the lowest one they make no progress on a busy machine."""
    monkeypatch.setattr(
        "dmq.recovery.check.ledger.background", lambda module, *each: [sys.executable, "-m", module, *map(str, each)]
    )


def verified(admin: AdminClient, data: Path) -> wire.VerifyLedgerResponse:
    """Have the ledger verified."""
    number = admin.verify_ledger().number
    hasten_verification(admin, number, data)
    found = admin.verify_ledger(number)
    assert not found.error
    return found


def scraped(daemon: Daemon) -> dict[tuple[str, str], dict[str, float]]:
    """What metrics tell of each topic and group."""
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
        if sample.name.startswith("dmq_group_"):
            pair = sample.labels["messaging_destination_name"], sample.labels["messaging_consumer_group_name"]
            found.setdefault(pair, {})[sample.name] = sample.value
    return found


def books(ledger: wire.GetLedgerResponse) -> list[wire.LedgerGroup]:
    """The books of all groups, topic by topic."""
    return [group for topic in ledger.topics for group in topic.groups]


def miscount(data: Path, kind: EventKind, by: int) -> None:
    """Let the ledger of a stopped daemon be wrong by so many events of a kind, of the first group that has one."""
    engine = RocksEngine(data / "rocksdb")
    for key, value in all_rows(engine, Family.META, META_LEDGER):
        counts = decode_ledger(value) if key[:1] == META_LEDGER else {}
        if counts.get(kind) and unpack_ledger_key(key)[1]:
            engine.write(put_batch((Family.META, key, encode_ledger(counts | {kind: counts[kind] + by}))))
            break
    else:
        raise AssertionError(kind)
    engine.close()


def test_it_balances_under_load_and_over_a_kill(data: Path) -> None:
    """While consumers fail and messages fall due, and metrics say the same; a wrong count is found by both commands."""
    with Daemon(data, metrics="127.0.0.1:0") as daemon, AdminClient(daemon.address) as admin:
        load = Load(daemon.address, 1)
        try:
            with load.ledger.news:  # a group has no books of a topic before a message came there: here, a dead letter
                assert load.ledger.news.wait_for(lambda: load.ledger.nacked_total > 20 and load.ledger.dead, PATIENCE_S)
            assert not verified(admin, data).differences_total
            daemon.kill()
            daemon.start()
            assert not verified(admin, data).differences_total
            load.end_sending()
        finally:
            load.close()
        found = admin.ledger(with_groups=True)
        assert not found.differences_total
        assert any(group.acked for topic in found.topics for group in topic.groups)
        told, later = scraped(daemon), admin.ledger(with_groups=True)  # nobody consumes; what falls due is unread
        groups = [(topic.topic, group.group) for topic in found.topics for group in topic.groups]
        assert sorted(told) == sorted(groups)
        for pair, before, after in zip(groups, books(found), books(later), strict=True):
            to_do = told[pair]["dmq_group_unread_messages"] + told[pair]["dmq_group_in_retry_messages"]
            assert before.unread + before.in_retry <= to_do <= after.unread + after.in_retry
            # Leases of the load that has ended still end, and the last attempt of one makes a dead letter.
            assert before.dead <= told[pair]["dmq_group_dead_messages"] <= after.dead
            assert told[pair]["dmq_group_oldest_unread_age_seconds"] >= 0
        daemon.kill()
        left = data / ".ledger-of-a-killed-run"
        left.mkdir()
        miscount(data, EventKind.ACKED, 3)
        checked = run_dmq("store", "check", str(data))
        assert checked.exit_code == 4
        assert "ledger: 1 findings" in checked.stdout
        daemon.start()
        assert not left.exists()
        answer = run_dmq("--address", daemon.address, "ledger", "--verify", "-o", "json")
        assert answer.exit_code == 4
        (difference,) = json.loads(answer.stdout)["differences"]
        assert difference["term"] == "unread"
        assert difference["topic"]
        assert difference["group"]
        assert difference["found"] - difference["counted"] == 3
        said = run_dmq("--address", daemon.address, "ledger", "--verify")
        assert said.exit_code == 4
        assert "the ledger does not balance: 1 terms differ" in said.stderr
        assert not list(data.glob(".ledger-*"))


class Moving:
    """A store whose log goes on while another process opens it, so many times."""

    def __init__(self, store: Store, times: int) -> None:
        self._store = store
        self._looks_left = 2 * times
        self.looks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_beside(self) -> tuple[Path, int]:
        """Return another number at each look, for the first ones."""
        self.looks += 1
        database, oldest_log = self._store.read_beside()
        return database, oldest_log + min(self.looks, self._looks_left)


async def verification(store: object, data: Path) -> Verification:
    """Run one to its end."""
    async with LedgerVerifier(store, data) as verifier:  # type: ignore[arg-type]
        made = await verifier.verify()
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "dmq-verify-ledger"))
    return made


@pytest.mark.parametrize(("times", "error"), [(2, ""), (1_000, "the store changes too fast")])
def test_a_database_with_a_possibly_lost_log_is_opened_again(
    data: Path, monkeypatch: pytest.MonkeyPatch, times: int, error: str
) -> None:
    """A log that was removed while the other process opened the database is no difference, and no verdict either."""
    monkeypatch.setattr("dmq.recovery.check.ledger._TRIES", 3)
    store = Store.open(data, SystemClock(), StoreOptions(gap_event=gap_event, ledger_kinds=LEDGER_KINDS))
    try:
        moving = Moving(store, times)
        made = asyncio.run(verification(moving, data))
    finally:
        store.close()
    assert made.error.startswith(error)
    assert not made.differences
    assert moving.looks == 6
    assert not list(data.glob(".ledger-*"))


class Stopping:
    """A store whose daemon stops at the moment in which the other process is started."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ends = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_beside(self) -> tuple[Path, int]:
        """Wait until the verifier has been told to end."""
        self.loop.call_soon_threadsafe(self.ends.set)
        while not self.verifier._is_closing:
            time.sleep(0.001)
        return self._store.read_beside()

    async def verification(self, data: Path) -> Verification:
        """Begin one, and stop in the middle of it."""
        self.loop = asyncio.get_running_loop()
        async with LedgerVerifier(self, data) as self.verifier:  # type: ignore[arg-type]
            made = await self.verifier.verify()
            await self.ends.wait()
        return made


@pytest.mark.timeout(60)
def test_a_stop_in_the_middle_is_no_error(data: Path) -> None:
    """Danger: it waited for a process that waited for it; and an orderly stop left an error in the log."""
    store = Store.open(data, SystemClock(), StoreOptions(gap_event=gap_event, ledger_kinds=LEDGER_KINDS))
    try:
        with capture_logs() as logs:
            made = asyncio.run(Stopping(store).verification(data))
    finally:
        store.close()
    assert made.error == "the daemon stopped meanwhile"
    (line,) = (each for each in logs if each["event"].startswith("ledger"))
    assert (line["event"], line["log_level"]) == ("ledger_not_verified", "info")
    assert not list(data.glob(".ledger-*"))


READER = """
import sys
from pathlib import Path
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.schema.keys import Family
engine = RocksEngine(Path(sys.argv[1]), RocksOptions(secondary=Path(sys.argv[2]), open_files_max=-1))
print("open", flush=True)
sys.stdin.readline()
print(len(engine.scan(Family.TIMELINE, b"", b"\\xff" * 17, limit=10**6).rows), flush=True)
"""


def test_another_process_reads_the_rows_from_before_it_opened(tmp_path: Path) -> None:
    """Rows in tables and in the flushed log; it keeps them when the tables and the log are gone."""
    engine = RocksEngine(tmp_path / "db")
    engine.write(put_batch(*((Family.TIMELINE, row_key(number), row(number)) for number in range(500))))
    engine.reclaim(Family.TIMELINE, [])  # into a table
    first = engine.oldest_log()
    engine.write(put_batch(*((Family.TIMELINE, row_key(number), row(number)) for number in range(500, 700))))
    engine.flush()
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "db"), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        assert engine.oldest_log() == first
        tables = set((tmp_path / "db").glob("*.sst"))
        engine.write(put_batch(*((Family.TIMELINE, row_key(number), b"new") for number in range(900))))
        engine.reclaim(Family.TIMELINE, [(b"", b"\xff" * 17)])
        assert not tables & set((tmp_path / "db").glob("*.sst"))
        assert engine.oldest_log() > first
        assert reader.communicate("\n")[0] == "700\n"
    finally:
        reader.kill()
        reader.wait()
        engine.close()


def test_a_secondary_writes_nothing(tmp_path: Path) -> None:
    """Who reads what another process writes cannot change it."""
    RocksEngine(tmp_path / "db").close()
    reader = RocksEngine(tmp_path / "db", RocksOptions(secondary=tmp_path / "log", open_files_max=-1))
    with pytest.raises(StoreError):
        reader.write(put_batch((Family.META, b"n", b"1")))
    reader.close()
