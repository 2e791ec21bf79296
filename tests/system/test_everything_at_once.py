"""Features crossed with each other, with operators, kills, restored and salvaged stores and a set clock, all by chance.

Processes are stopped and go on, too. ``DMQ_TEST_EFFORT=20`` makes a long run of it, ``DMQ_TEST_SEED`` repeats the
choices of one (not its timing).
"""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
from support.clients.load.turmoil import Turmoil
from support.clients.load.turmoil_books import Books
from support.effort import EFFORT, SEED
from support.rigs.daemon.acl import OPERATOR, write_acl
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.faults.wall_shim import WallShim

pytestmark = pytest.mark.fault
LASTS_S = 5 if EFFORT == 1 else 8 * EFFORT
_MEANT = ('"event": "clock_held"', '"event": "front_ended"')


@pytest.mark.timeout(300 + 3 * LASTS_S)
def test_accepted_messages_are_where_the_daemon_shows_them(tmp_path: Path) -> None:
    """Each message that was accepted came to each group, or ended as somebody asked; ledger, store and audit agree."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    shim = WallShim(tmp_path) if rng.random() < 0.5 else None
    is_guarded = rng.random() < 0.5
    options = ("--acl", str(write_acl(tmp_path))) if is_guarded else ()
    trail = tmp_path / "trail"
    env = {**os.environ, **(shim.environment if shim else {}), "DMQ_TRAIL": str(trail), "DMQ_TRAIL_EVERY": "1s"}
    signer = OPERATOR.signer() if is_guarded else None
    with Daemon(tmp_path / "data", *options, env=env) as daemon:
        with Turmoil(daemon, SEED, tmp_path, shim=shim, signer=signer) as turmoil:
            threading.Event().wait(LASTS_S)
            turmoil.calm()
            unexplained = turmoil.unexplained()
        books = turmoil.books
        print(f"{len(books.sent)} messages; done: {dict(books.done)}; refused: {dict(books.refused)}")
        assert not unexplained, "\n".join(unexplained)
        daemon.stop()
        assert not (errors := errors_of(daemon)), "\n".join(errors)
    checked = run_command("store", "check", str(tmp_path / "data"), timeout_s=120)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    audit = ("audit", "run", "--trail", str(trail), "--out", str(tmp_path / "audit"), "--late-max", "1000000")
    audited = run_command(*audit, timeout_s=120)  # what a kill or a clock made late is not lost
    said = audited.stdout + audited.stderr
    assert audited.returncode in ({0, 30} if books.done["restore"] else {0}), said
    assert not (found := unexpected(tmp_path / "audit" / "findings.jsonl", books)), said + "\n".join(found)
    assert len(books.owed()) > 5 * LASTS_S, "too little load to mean anything"


def unexpected(findings: Path, books: Books) -> list[str]:
    """Return what an audit found, but for what was late or put back, and what nobody is owed since that."""
    owed = {message_id for _, message_id in books.owed()}
    found = [(line, json.loads(line)) for line in findings.read_text("utf-8").splitlines()]
    return [
        line
        for line, each in found
        if each["kind"] not in {"LATE", "PUT_BACK"}
        if each["kind"] != "INCONCLUSIVE" or each["message_id"] in {None, *owed}
    ]


def errors_of(daemon: Daemon) -> list[str]:
    """Return what its log has of errors, but for those that the test meant to make."""
    lines = [line for line in daemon.log().splitlines() if '"level": "error"' in line or "Traceback" in line]
    return [line for line in lines if not any(meant in line for meant in _MEANT)]
