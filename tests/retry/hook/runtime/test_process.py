"""The hook in processes that fork, get signals, and end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from broker_adapter.runtime.clock import ManualClock
from retry.hook.runtime import process

ROOT = Path(__file__).resolve().parents[4]


def run(script: str) -> str:
    """Run ``script`` in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_a_child_of_a_fork_sends_go_on_and_nothing_is_kept() -> None:
    """The handler is called, a failure is rejected; nothing hangs though locks were held at the fork."""
    printed = run(
        """
        import os, sys, threading
        from retry import Redelivery, RetryPolicy, Table
        from retry.testing import MemorySink

        is_away = False
        def handler(payload):
            if is_away:
                raise ConnectionError("away")
        async def other(payload):
            await __import__("asyncio").sleep(0)
        sink = MemorySink()
        hook = Redelivery(sink)
        hook.add_handler("t", handler)
        hook.add_handler("w", handler, mode="write_ahead")
        hook.add_handler("a", other)
        hook.send("t", b"1")
        # every lock of ours is held by a thread that the child does not have
        held = [hook._lock, hook._closing, hook._log._lock, hook._health._lock, hook._settler._changed, sink._changed,
                hook._drain._lock, *(h.tally.lock for h in hook._handlers.values()),
                *(d._lock for d in hook._destinations.values())]
        is_held, go = threading.Event(), threading.Event()
        def hold():
            for lock in held:
                lock.acquire()
            is_held.set()
            go.wait()
        threading.Thread(target=hold, daemon=True).start()
        is_held.wait()
        pid = os.fork()
        if pid == 0:
            import asyncio
            print(type(hook.send("t", b"2")).__name__)
            print(type(hook.send("w", b"2", key="k")).__name__)
            print(type(asyncio.run(hook.send_async("a", b"2"))).__name__)
            is_away = True
            print(hook.send("t", b"3").reason)
            print(hook.health().status, hook.metrics().waiting, hook.check().is_ok)
            hook.start()
            print(hook.close(1).sent)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        os._exit(0)
        """
    )
    lines = printed.splitlines()
    assert lines[:3] == ["Delivered"] * 3
    assert "ConnectionError: away" in lines[3]
    assert "opened before the fork: create Redelivery in the worker (post_fork)" in lines[3]
    assert lines[4:] == ["degraded None False", "0"]


def test_the_end_of_the_process_closes_the_hook() -> None:
    """Without a close of its own a program still waits for the message that is being sent."""
    printed = run(
        """
        import threading
        from retry import Entry, Redelivery
        from retry.testing import MemorySink

        sink = MemorySink()
        now_ms = sink.clock.now_ms()
        sink.put(Entry(type_name="t", uid=bytes(16), payload=b"1", created_at_ms=now_ms, due_at_ms=now_ms)).result()
        running = threading.Event()
        def handler(payload):
            running.set()
            threading.Event().wait(0.3)
            print("sent", flush=True)
        hook = Redelivery(sink)
        hook.add_handler("t", handler)
        running.wait()
        import atexit
        """
    )
    assert printed == "sent\n"


def test_the_end_of_the_process_waits_for_no_handler_that_hangs() -> None:
    """Not for one of a repetition, of a send, nor of a send on an event loop, which the interpreter would wait for."""
    printed = run(
        """
        import asyncio, threading
        from retry import Entry, Redelivery
        from retry.testing import MemorySink

        sink = MemorySink()
        now_ms = sink.clock.now_ms()
        sink.put(Entry(type_name="t", uid=bytes(16), payload=b"1", created_at_ms=now_ms, due_at_ms=now_ms)).result()
        running = threading.Semaphore(0)
        def hang(payload):
            running.release()
            threading.Event().wait()
        hook = Redelivery(sink, close_timeout_s=0.05)
        hook.add_handler("t", hang)
        other = Redelivery(MemorySink(), close_timeout_s=0.05)
        other.add_handler("o", hang)
        other.add_handler("a", hang)
        threading.Thread(target=other.send, args=("o", b"2"), daemon=True).start()
        async def main():
            sending = asyncio.create_task(other.send_async("a", b"3"))
            while not other.metrics().running >= 2:
                await asyncio.sleep(0.001)
        asyncio.run(main())
        for _ in range(3):
            running.acquire()
        print(other.metrics().waiting, flush=True)
        """
    )
    assert printed == "1\n"  # the send that was cancelled with its event loop was kept


def test_all_hooks_end_within_the_time_of_the_most_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """At exit each has what its own setting says, less what the others took; none begins anything meanwhile."""
    told: list[tuple[str, float]] = []
    clock = ManualClock()

    class Hook:
        def __init__(self, close_timeout_s: float) -> None:
            self.close_timeout_s = close_timeout_s

        def after_fork(self) -> None:
            raise AssertionError

        def begin_nothing(self) -> None:
            told.append(("begin nothing", 0.0))

        def close_at_exit(self, timeout_s: float) -> None:
            told.append(("close", timeout_s))
            clock.advance(1_500)

    hooks = [Hook(2.0), Hook(2.0), Hook(2.0)]
    monkeypatch.setattr(process, "_guarded", hooks)
    monkeypatch.setattr(process, "_REAL", clock)
    process._close_all()
    assert told == [("begin nothing", 0.0)] * 3 + [("close", 2.0), ("close", 0.5), ("close", 0.0)]


def test_sigterm_closes_and_then_has_its_former_effect() -> None:
    """Only when asked for: the handler installed earlier still runs, after the hook is closed."""
    printed = run(
        """
        import os, signal
        from retry import Redelivery
        from retry.testing import MemorySink

        signal.signal(signal.SIGTERM, lambda number, frame: print("before", sink.is_closed))
        sink = MemorySink()
        hook = Redelivery(sink, install_signal_handlers=True)
        hook.add_handler("t", lambda payload: None)
        hook.send("t", b"1")
        os.kill(os.getpid(), signal.SIGTERM)
        print(type(hook.send("t", b"2")).__name__)
        """
    )
    assert printed == "before True\nRejected\n"


def test_sigterm_still_ends_a_process_that_handled_it_in_no_other_way() -> None:
    """The default action follows, with its exit status."""
    script = """
        import os, signal
        from retry import Redelivery
        from retry.testing import MemorySink
        hook = Redelivery(MemorySink(), install_signal_handlers=True)
        os.kill(os.getpid(), signal.SIGTERM)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, timeout=50, check=False)
    assert done.returncode == -15


def test_importing_retry_loads_nothing_else() -> None:
    """Neither the hook nor structlog, and none of the libraries that retry must work without."""
    printed = run(
        """
        import sys
        import retry
        print(sorted(name for name in sys.modules if name.startswith(("retry.", "structlog", "asyncio"))))
        retry.Redelivery, retry.durable
        print(sorted({"grpc", "rocksdict", "dmq", "rocketmq"} & set(sys.modules)))
        print(all(hasattr(retry, name) for name in retry.__all__), hasattr(retry, "nothing"))
        """
    )
    assert printed == "[]\n[]\nTrue False\n"
