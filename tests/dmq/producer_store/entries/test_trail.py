"""The trail of a spool: its entries' lives under the id of their directory, also of one that was taken over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.trail.read import read_trail
from support.rigs.producer.spool import PATIENCE_S, an_entry

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.spool import Spool, SpoolOptions
from retry.sink import Death, Held

pytestmark = pytest.mark.integration
CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from support.rigs.producer.spool import an_entry
from dmq.producer_store.spool import Spool, SpoolOptions
spool = Spool(sys.argv[1], options=SpoolOptions(adopt_every_s=0, trail_path=sys.argv[2]))
for number in range(1, 21):
    spool.put(an_entry(number)).result(20)
    if number == 10:
        spool._trail.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def options(trail: Path, *, adopt_every_s: float = 0) -> SpoolOptions:
    """With a trail."""
    return SpoolOptions(adopt_every_s=adopt_every_s, trail_path=trail)


def cells(trail: Path) -> list[str]:
    """The cells of a trail, each of a spool."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (trail / "cells").glob("*.json")]
    assert {cell["role"] for cell in found} <= {"spool"}
    return sorted(cell["cell"] for cell in found)


def take(spool: Spool) -> Held:
    """What is due."""
    (held,) = spool.take("orders", 1, PATIENCE_S)
    return held


def test_a_life_in_the_trail(tmp_path: Path) -> None:
    """Each kind of a spool, by the name of its type; and each run begins and ends."""
    trail = tmp_path / "trail"
    with Spool(tmp_path / "spool", options=options(trail)) as spool:
        spool.put(an_entry(1)).result(PATIENCE_S)
        spool.again(take(spool), SystemClock().now_ms() - 1, is_counted=True).result(PATIENCE_S)
        spool.bury(take(spool), Death.EXHAUSTED, "no").result(PATIENCE_S)
        spool.requeue("orders", [an_entry(1).uid])
        spool.finish(take(spool)).result(PATIENCE_S)
    with Spool(tmp_path / "spool", options=options(trail)):
        pass
    (cell,) = cells(trail)
    told = read_trail(trail, cell)
    kinds = ["SCHEDULED", "SEND_FAILED", "SEND_DEAD", "REQUEUED", "SENT"]
    assert [event["kind"] for event in told] == [
        *("OPENED", "TOPIC_CREATED", *kinds, "CLOSED"),
        *("OPENED", "CLOSED"),
    ]
    assert [event["sequence"] for event in told] == list(range(1, len(told) + 1))
    of_entry = [event for event in told if event["kind"] in kinds]
    assert {(event["topic"], event["message_id"]) for event in of_entry} == {("orders", b"\1" + an_entry(1).uid)}
    assert [event["boot"] for event in told] == [1] * 8 + [2] * 2


def test_without_a_path_there_is_no_trail(tmp_path: Path) -> None:
    """Not a file, and the outbox is as it was."""
    with Spool(tmp_path / "spool", options=SpoolOptions(adopt_every_s=0)) as spool:
        spool.put(an_entry(1)).result(PATIENCE_S)
        assert spool.entries.store.outbox_state.next_sequence == 3
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_an_adopted_directory_is_exported_to_its_end(tmp_path: Path) -> None:
    """Under its own id, before it is removed; the heir tells its own life under another one."""
    root, trail = tmp_path / "spool", tmp_path / "trail"
    child = [sys.executable, "-c", CHILD, str(root), str(trail), str(Path(__file__).resolve().parents[3])]
    with Spool(root, options=options(trail)) as spool:
        heir = spool.entries.store.cell_id
        assert subprocess.run(child, check=False, timeout=60).returncode == -9
        (orphan,) = set(cells(trail)) - {heir}
        before = [event["kind"] for event in read_trail(trail, orphan)]
        assert before == ["OPENED", "TOPIC_CREATED", *["SCHEDULED"] * 10]
        assert spool._adopter.adopt() == 20
        assert len(list(root.glob("spool-*"))) == 1
        after = read_trail(trail, orphan)
        assert [event["sequence"] for event in after] == list(range(1, 23))
        assert [event["kind"] for event in after] == [*before, *["SCHEDULED"] * 10]
        for _ in range(20):
            spool.finish(take(spool)).result(PATIENCE_S)
    told = read_trail(trail, heir)
    assert [event["sequence"] for event in told] == list(range(1, len(told) + 1))
    assert {event["message_id"] for event in told if event["kind"] == "SENT"} == {
        event["message_id"] for event in after if event["kind"] == "SCHEDULED"
    }


def test_a_directory_stays_while_the_trail_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it tells would be gone with it."""
    root, trail = tmp_path / "spool", tmp_path / "trail"
    with Spool(root, options=SpoolOptions(adopt_every_s=0)) as own:
        with Spool(root, options=SpoolOptions(adopt_every_s=0)) as other:
            other.put(an_entry(1)).result(PATIENCE_S)
            path = other.path
        own._trail.path = trail
        trail.write_text("not a directory", encoding="utf-8")
        assert own._adopter.adopt() == 1
        assert path.exists()
        trail.unlink()
        assert own._adopter.adopt() == 0
        assert not path.exists()
    (cell,) = cells(trail)
    assert [event["kind"] for event in read_trail(trail, cell)] == ["TOPIC_CREATED", "SCHEDULED"]


def test_a_missing_library_is_named_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is opened."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow, which is missing: pip install 'rock-dmq\[server\]'"):
        Spool(tmp_path / "spool", options=options(tmp_path / "trail"))
    assert not (tmp_path / "spool").exists()
