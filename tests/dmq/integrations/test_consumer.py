"""What ``consume`` refuses before anything is opened, and what a consumer is that was never started."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from broker_adapter.contracts.errors import Refused
from dmq.integrations.consumer import Ending, consume
from dmq.integrations.runners import Loop
from retry import EnvironmentInvalid


def handle(message: object) -> str:
    """Return what it was given."""
    return f"got {message}"


@pytest.mark.parametrize(
    ("topics", "options", "error", "said"),
    [
        ((), {"group": "g"}, ValueError, "consume needs a topic"),
        ((handle,), {"group": "g"}, TypeError, "consume is called with topics and a group"),
        (("no topic",), {"group": "g"}, Refused, "topic"),
        (("t",), {"group": "no group"}, Refused, "group"),
        (("t",), {"group": "g", "parallelism": 0}, ValueError, "parallelism is 0, allowed is 1 to 256"),
        (("t",), {"group": "g", "timeout_s": 0.0}, ValueError, "timeout_s is 0.0, allowed is more than 0 and up to"),
        (("t",), {"group": "g", "timeout_s": float("nan")}, ValueError, "timeout_s is nan"),
    ],
)
def test_invalid_input_is_refused(
    topics: tuple[Any, ...], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """Where the decorator stands, not when the first message comes."""
    with pytest.raises(error, match=said):
        consume(*topics, **options)


def test_a_function_stays_callable_and_nothing_is_opened() -> None:
    """As a test of it calls it; the consumer says that it was not started, and can be stopped all the same."""
    consumer = consume("t", group="g", environ={})(handle)
    assert consumer("it") == "got it"
    assert consumer.__doc__ == handle.__doc__
    assert consumer.health().reasons == ("it is not started",)
    assert consumer.stop().running == 0
    with pytest.raises(
        RuntimeError,
        match="the consumer of g was started or stopped before; create another one",
    ):
        consumer.start()


_START = """
import sys
from dmq.integrations.consumer import consume
if sys.argv[1] == "without":
    sys.modules["rocketmq"] = None
try:
    consume("t", group="g", environ={"DMQ_ADDRESS": "127.0.0.1:1", "DMQ_TLS_CA": sys.argv[2]})(print).start()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("without", ""), "ExtraMissing consume needs the official client: pip install 'rocketmq-python-client"),
        (("with", "/ca.pem"), f"{EnvironmentInvalid.__name__} the official Python client does not support certificat"),
    ],
)
def test_missing_parts_are_named(words: tuple[str, str], said: str) -> None:
    """The client itself, and what it cannot be told."""
    done = subprocess.run(
        [sys.executable, "-c", _START, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(said)


_STOPPED = """
from dmq.integrations.consumer import consume, run
stopped = consume("t", group="g", environ={})(print)
stopped.stop()
run(stopped)
"""


def test_a_consumer_that_was_stopped_is_not_run() -> None:
    """Danger: no later try could start it, and ``run`` tried again for ever."""
    done = subprocess.run([sys.executable, "-c", _STOPPED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the consumer of g was started or stopped before; create another one" in done.stderr


def test_a_coroutine_that_was_given_up_before_it_began_is_over() -> None:
    """Danger: behind a handler that blocked the loop it began after all, with a message that somebody else may have."""
    loop, may_go_on, is_over = Loop(), threading.Event(), threading.Event()
    begun: list[object] = []

    async def handle(message: threading.Event) -> None:
        begun.append(message)
        message.set()
        may_go_on.wait()
        await asyncio.sleep(0)

    blocking, waiting, behind = threading.Event(), threading.Event(), threading.Event()
    try:
        first: Future[None] = Future()
        loop.run(handle, blocking, first)
        blocking.wait()
        loop.run(handle, waiting, Future())(is_over.set)
        loop.run(handle, behind, Future())
        may_go_on.set()
        behind.wait()
        first.result()
        is_over.wait()
        assert begun == [blocking, behind]
    finally:
        may_go_on.set()
        loop.close()


def test_a_signal_that_interrupts_the_wait_ends_it() -> None:
    """Danger: an event's lock may be held by the thread that the handler runs in, and both wait for ever.

    The end is told from within the wait, in front of each line that it runs.
    """
    at, is_reached = 0, True
    while is_reached:
        at, lines = at + 1, 0
        with Ending() as ending:

            def trace(frame: FrameType, event: str, argument: object, at: int = at, ending: Ending = ending) -> Any:  # noqa: ANN401 - as ``settrace`` has it
                nonlocal lines
                lines += event == "line"
                if lines == at and not ending.is_told:
                    ending.tell()
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                ending.wait(0.05)
            finally:
                sys.settrace(before)
            is_reached = ending.is_told
    assert at > 3


_SIGNALLED = """
import signal, sys, threading, time
from pathlib import Path
from dmq.integrations.consumer import run

def waits() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident]
    stat = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text()
    return frame.f_code.co_name == "wait" and stat.rpartition(")")[2].split()[0] == "S"

def tell() -> None:
    while not waits():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=tell, daemon=True).start()
run()
print("ended")
"""


def test_a_signal_that_the_kernel_gives_to_another_thread_ends_the_wait() -> None:
    """Danger: the main thread sleeps on, for Python runs its handlers there alone: kubernetes had to kill it."""
    done = subprocess.run([sys.executable, "-c", _SIGNALLED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"


_FORKED = """
import multiprocessing, os, signal, threading
from dmq.integrations.consumer import run

def fork() -> None:
    codes = set()
    for _ in range(100):
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
        child.start()
        child.terminate()
        child.join(10)
        codes.add(child.exitcode)
        child.kill()
    print(codes)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Timer(0.1, fork).start()
run()
"""


def test_children_that_a_handler_forked_end_as_others_do() -> None:
    """Danger: they had the handler of the consumer, or lost a signal at their first moment: a pool waited for ever."""
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{-15}\n"
