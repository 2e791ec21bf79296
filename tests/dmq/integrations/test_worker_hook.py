"""The hook of processes that fork: each opens its own, and a process that failed to says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmq.integrations.worker_hook import WorkerHook
from retry import Delivered, HandlerExists, Redelivery
from retry.testing import MemorySink

_FORKS = """
import os, sys, threading
from dmq.integrations.worker_hook import WorkerHook
from retry import Spooled

hook = WorkerHook()

@hook.handler("order")
def away(payload):
    raise ConnectionError("away")

def in_child(look):
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 0 if look() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def keeps():
    is_kept = isinstance(hook.send("order", b"1"), Spooled) and hook.redelivery.metrics().waiting == 1
    hook.close()
    return is_kept

is_held = threading.Event()
def hold():
    with hook._lock:
        is_held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
is_held.wait()
print(in_child(keeps))
hook._lock = threading.Lock()
print(in_child(keeps))  # takes over what the one before it left, so two messages wait
hook.start()
print(in_child(lambda: not hook.readiness()[0]), hook.readiness()[0], hook.close())
def makes_none():
    before = sorted(os.listdir(os.environ["DMQ_SPOOL"]))
    return not any(hook.readiness()[0] for _ in range(3)) and sorted(os.listdir(os.environ["DMQ_SPOOL"])) == before
print(in_child(makes_none))
"""


def test_each_child_opens_its_own(tmp_path: Path) -> None:
    """Also if another thread held the lock at the fork.

    The child of a process that used a hook is not ready; it makes no directory, and calls none damaged.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        env=os.environ | {"DMQ_SPOOL": str(tmp_path / "spool")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[:2] == ["0", "1"], done.stderr
    assert done.stdout.splitlines()[2].startswith("0 True Closed(sent=0"), done.stderr
    assert done.stdout.splitlines()[3] == "0", done.stderr
    assert "StoreForked: this process is a fork of one that used a store" in done.stderr
    assert "damaged" not in done.stderr


def test_a_late_declaration_counts_too() -> None:
    """A handler that is added to an open hook; a second one of a type is refused."""
    hook = WorkerHook(lambda: Redelivery(MemorySink()))
    hook.start()
    hook.handler("late")(lambda payload: payload)
    assert isinstance(hook.send("late", b"1"), Delivered)
    with pytest.raises(HandlerExists, match="'late' has a handler already"):
        hook.add_handler("late", print)
    hook.close()


def test_it_is_opened_again_after_its_close() -> None:
    """As tests of an application do it; and a close of what is not open is nothing."""
    hook = WorkerHook(lambda: Redelivery(MemorySink()))
    hook.add_handler("order", lambda payload: payload)
    assert hook.close() is None
    hook.send("order", b"1")
    closed = hook.close()
    assert closed is not None
    assert closed.sent == 1
    assert isinstance(hook.send("order", b"2"), Delivered)
    hook.close()


def test_a_process_that_cannot_open_is_not_ready_and_tries_again() -> None:
    """An application goes on without a hook; its readiness says so, and so does a send."""
    failures = [ValueError("DMQ_HOOK_MODE is 'safe'")] * 3

    def open_hook() -> Redelivery:
        if failures:
            raise failures.pop()
        return Redelivery(MemorySink())

    hook = WorkerHook(open_hook)
    hook.begin()
    hook.begin()  # before the second request nothing is tried
    assert len(failures) == 2
    is_ready, text = hook.readiness()
    assert not is_ready
    assert json.loads(text) == {"ready": False, "status": "degraded", "reasons": ["ValueError"]}
    with pytest.raises(ValueError, match="DMQ_HOOK_MODE"):
        hook.send("order", b"1")
    assert hook.readiness()[0]
    hook.close()


def test_an_absent_destination_leaves_the_process_ready() -> None:
    """Else an outage of the broker would take the application down with it."""
    hook = WorkerHook(lambda: Redelivery(MemorySink(), autostart=False))

    @hook.handler("order")
    def away(payload: bytes) -> None:
        raise ConnectionError("away")

    for _ in range(6):
        hook.send("order", b"1")
    is_ready, text = hook.readiness()
    assert is_ready
    assert json.loads(text)["status"] == "degraded"
    assert "destination order is away" in json.loads(text)["reasons"]
    hook.close()


def test_a_scrape_of_one_process_has_the_figures_of_all_that_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its pid; what a dead one left is removed, and a hook that is closed leaves nothing."""
    monkeypatch.setenv("DMQ_HOOK_METRICS_DIR", str(tmp_path))
    hooks = [WorkerHook(lambda: Redelivery(MemorySink())) for _ in range(2)]
    for count, hook in enumerate(hooks, start=1):
        hook.add_handler("order", lambda payload: payload)
        hook.start()
        for _ in range(count):
            hook.send("order", b"1")
    (tmp_path / "1-dead.prom").write_text('retry_hook_waiting{pid="1"} 7\n', encoding="utf-8")
    (tmp_path / "1-dead.lock").touch()
    for written in tmp_path.glob(f"{os.getpid()}-*.prom"):  # as if the other one had another pid
        written.write_text(written.read_text(encoding="utf-8").replace(f'pid="{os.getpid()}"', 'pid="2"'), "utf-8")
    lines = hooks[1].render_prometheus().splitlines()
    sends = [line for line in lines if line.startswith("retry_hook_sends_total") and "delivered" in line]
    assert f'retry_hook_sends_total{{pid="{os.getpid()}",type="order",outcome="delivered"}} 2' in sends
    assert [line for line in sends if 'pid="2"' in line]
    assert lines.count("# TYPE retry_hook_waiting gauge") == 1
    assert not any('pid="1"' in line for line in lines if line.startswith("retry_hook_waiting{"))
    for hook in hooks:
        hook.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_figures_that_cannot_be_keeps_no_message_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook is opened without; its own figures are there."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DMQ_HOOK_METRICS_DIR", str(tmp_path / "file"))
    hook = WorkerHook(lambda: Redelivery(MemorySink()))
    hook.add_handler("order", lambda payload: payload)
    assert isinstance(hook.send("order", b"1"), Delivered)
    assert 'retry_hook_sends_total{type="order",outcome="delivered"} 1' in hook.render_prometheus()
    hook.close()
