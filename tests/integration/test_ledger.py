"""The ledger of a real daemon: verified under load and over kills, and convicted of what was planted."""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.crash_load import Load
from support.daemon import Daemon
from support.fake_admin_client import run_dmq
from support.stores import all_rows, put_batch

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient
from dmq.audit.events import EventKind
from dmq.store.rocks import RocksEngine
from dmq.store.schema.keys import META_LEDGER, Family
from dmq.store.schema.ledger import decode_ledger, encode_ledger, unpack_ledger_key

PATIENCE_S = 60.0


def verified(admin: AdminClient) -> wire.VerifyLedgerResponse:
    """Have the ledger verified."""
    found, until_s = admin.verify_ledger(), time.monotonic() + PATIENCE_S
    while not found.ended_at_ms:
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
        found = admin.verify_ledger(found.number)
    assert not found.error
    return found


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
    """While consumers fail and messages fall due; a wrong count is found by both commands, by name."""
    with Daemon(data) as daemon, AdminClient(daemon.address) as admin:
        load = Load(daemon.address, 1)
        try:
            with load.ledger.news:
                assert load.ledger.news.wait_for(lambda: load.ledger.nacked_total > 20, PATIENCE_S)
            assert not verified(admin).differences_total
            daemon.kill()
            daemon.start()
            assert not verified(admin).differences_total
            load.end_sending()
        finally:
            load.close()
        found = admin.ledger(with_groups=True)
        assert not found.differences_total
        assert any(group.acked for topic in found.topics for group in topic.groups)
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
