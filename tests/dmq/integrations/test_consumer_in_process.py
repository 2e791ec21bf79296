"""Consumers made by ``consume`` in processes of their own, over the official client, against a real daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from support.clients.official.hook_app import Consumer
from support.rigs.daemon.process import Daemon, free_port, run_command

pytestmark = pytest.mark.integration
_PROGRAM = Path(__file__).parents[2] / "clients" / "python" / "consume_app.py"
_SOON_S = 60.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that each test leaves running."""
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as served:
        yield served


class App:
    """One process with one consumer; leaving the context kills it."""

    def __init__(self, home: Path, daemon: Daemon, topic: str, **settings: str | float) -> None:
        home.mkdir(exist_ok=True)
        self.port = free_port()
        self._errors = home / "stderr.txt"
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), json.dumps({"topic": topic, **settings})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"HOME": str(home), "DMQ_ADDRESS": daemon.address, "LISTEN": f"127.0.0.1:{self.port}"},
            )
        self.lines: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        print(f"--- {self.lines}\n{self.errors()[-8000:]}---")

    def errors(self) -> str:
        return self._errors.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, event: str, body: str = "", attempt: int = 0) -> dict[str, Any]:
        """Return the line that says so, once it was said."""

        def found() -> dict[str, Any]:
            wanted = {"event": event, **({"body": body} if body else {}), **({"attempt": attempt} if attempt else {})}
            return next((line for line in self.lines if wanted.items() <= line.items()), {})

        with self._news:
            assert self._news.wait_for(found, _SOON_S), (event, body, self.lines, self.errors())
            return found()

    def go(self) -> None:
        """Let one handler that waits return."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_until_stopping(self) -> None:
        """Return once it has heard that it is to end."""
        until_s = time.monotonic() + _SOON_S
        while "it is stopping" not in self.page("/health")[1]:
            assert time.monotonic() < until_s, self.errors()
            threading.Event().wait(0.05)  # each look is a thread there, and takes its main thread's turn

    def ended(self) -> int:
        """Return the exit code of a process that is to end in order, once all that it said was read."""
        code = self.process.wait(_SOON_S)
        self._reader.join(10)
        assert self.lines[-1] == {"event": "ended", "threads": ["MainThread"]}, self.errors()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._news:
                    self.lines.append(json.loads(line))
                    self._news.notify_all()


def _dmq(daemon: Daemon, *words: str) -> str:
    done = run_command(*words, "--address", daemon.address)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _send(daemon: Daemon, topic: str, body: str, *options: str) -> str:
    return _dmq(daemon, "msg", "send", topic, body, *options)


def _left(daemon: Daemon, topic: str, count: int) -> set[str]:
    """Return the bodies of ``count`` messages that the group gets, each on its first attempt."""
    with Consumer(daemon.address, topic, topic) as consumer:
        consumer.receive_until(lambda: len(consumer.messages) >= count, within_s=_SOON_S)
        return {each.body.decode() for each in consumer.messages}


def test_a_message_is_acknowledged_tried_again_or_dead(daemon: Daemon, tmp_path: Path) -> None:
    """By what the handler does: it returns, it raises (sys.exit too), it raises ``Permanent``, it hangs. Functions and
    coroutine functions alike, both consumers in one process.
    """
    topics = ("kinds", "kinds-async")
    sent: dict[str, str] = {}
    for topic in topics:  # before the client is told: what it asks for counts if it is longer
        _dmq(daemon, "group", "set-policy", topic, "--fixed", "1s", "--max-attempts", "3")
    with App(tmp_path, daemon, topics[0], has_async=True, timeout_s=1.0) as app:
        for topic in topics:
            bodies = [f"{word} {topic}" for word in ("bad", "exit", "fine")] + [f"fail 1 {topic}", f"hang 1 {topic}"]
            sent |= {body: _send(daemon, topic, body) for body in bodies}
        for topic in topics:
            app.wait_for("done", f"fine {topic}")
            app.wait_for("given", f"fail 1 {topic}", attempt=2)
            app.wait_for("done", f"hang 1 {topic}")
            app.wait_for("given", f"exit {topic}", attempt=3)
            wanted = {sent[f"bad {topic}"]: ("FORWARDED", 1), sent[f"exit {topic}"]: ("EXHAUSTED", 3)}
            until_s = time.monotonic() + _SOON_S
            while (letters := _dead(daemon, topic)).keys() < wanted.keys():
                assert time.monotonic() < until_s, letters
                threading.Event().wait(0.5)  # each look is a command
            assert letters == wanted
            assert f'dmq_consumer_messages_total{{group="{topic}",outcome="dead"}} 1' in app.page("/metrics")[1]
        app.wait_for("cancelled", f"hang 1 {topics[1]}")
        status, health = app.page("/health")  # a function that hangs cannot be ended, a coroutine can
        assert (status, json.loads(health)) == (
            503,
            {topics[0]: ["1 handlers have not returned within 1 s"], topics[1]: []},
        )
        app.term()
        assert app.ended() == 0


def _dead(daemon: Daemon, group: str) -> dict[str, tuple[str, int]]:
    letters = json.loads(_dmq(daemon, "dead", "ls", group, "-o", "json"))
    return {each["message_id"]: (each["reason"], each["attempts"]) for each in letters}


def test_sigterm_finishes_running_messages_and_returns_the_rest(daemon: Daemon, tmp_path: Path) -> None:
    """What was fetched and not begun comes to another consumer at once, on its first attempt."""
    topic = "rest"
    for number in range(5):
        _send(daemon, topic, f"wait {number}")
    with App(tmp_path, daemon, topic, parallelism=1) as app:
        begun = app.wait_for("given")["body"]
        app.term()
        app.wait_until_stopping()  # its main thread hears of a signal when it has its turn
        app.go()
        app.wait_for("done", begun)
        assert app.ended() == 0
        assert len([line for line in app.lines if line["event"] == "given"]) == 1
    assert _left(daemon, topic, 4) == {f"wait {number}" for number in range(5)} - {begun}


def test_a_handler_that_hangs_holds_up_no_end(daemon: Daemon, tmp_path: Path) -> None:
    """The process ends once the bound is over, and the message comes again as one that failed."""
    topic = "hanging"
    _dmq(daemon, "group", "set-policy", topic, "--fixed", "1h")
    _send(daemon, topic, "hang 1")
    with App(tmp_path, daemon, topic, stop_s=0.2) as app:
        app.wait_for("given", "hang 1")
        app.term()
        assert app.ended() == 0
        assert "handlers_abandoned" in app.errors()
    assert len(json.loads(_dmq(daemon, "retry", "ls", topic, "-o", "json"))) == 1


_ONE_THAT_CANNOT_START = """
import os
from dmq.integrations.consumer import consume, run

well = consume("begun", group="begun")(print)
bad = consume("begun", group="bad", environ=os.environ | {"DMQ_TLS_CA": "/ca.pem"})(print)
try:
    run(well, bad)
except Exception as error:
    print(type(error).__name__, well.health().reasons)
"""


def test_a_consumer_that_cannot_be_started_ends_the_others(daemon: Daemon, tmp_path: Path) -> None:
    """Danger: the process lived on, and half of its consumers consumed."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE_THAT_CANNOT_START],
        env=os.environ | {"HOME": str(tmp_path), "DMQ_ADDRESS": daemon.address},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "EnvironmentInvalid ('it is stopping',)\n", done.stderr


def test_a_daemon_that_is_away_holds_up_no_end(daemon: Daemon, tmp_path: Path) -> None:
    """What was consumed cannot be acknowledged: the process ends all the same, and the message comes again."""
    topic = "away"
    _send(daemon, topic, "wait 1")
    with App(tmp_path, daemon, topic) as app:
        app.wait_for("given", "wait 1")
        daemon.stop()
        try:
            app.go()
            app.wait_for("done", "wait 1")
            app.term()
            assert app.ended() == 0
        finally:
            daemon.restart()
    assert _left(daemon, topic, 1) == {"wait 1"}


def test_a_kill_loses_nothing(daemon: Daemon, tmp_path: Path) -> None:
    """Of the consumer with messages in hand, and of the daemon before anybody noticed; one that waits for the daemon
    at its start gets them.
    """
    topic = "killed"
    for number in range(3):
        _send(daemon, topic, f"wait {number}")
    with App(tmp_path, daemon, topic, parallelism=2) as app:
        app.wait_for("given")
        app.kill()
    daemon.kill()
    with App(tmp_path, daemon, topic) as app:
        daemon.restart()
        for number in range(3):
            app.wait_for("given", f"wait {number}")
            app.go()
        for number in range(3):
            app.wait_for("done", f"wait {number}")
        app.term()
        assert app.ended() == 0


def test_the_messages_of_a_message_group_keep_their_order(daemon: Daemon, tmp_path: Path) -> None:
    """Also behind one that fails, and behind one that is given up, with many handlers at a time."""
    topic = "in-order"
    _dmq(daemon, "topic", "create", topic, "--type", "fifo")
    _dmq(daemon, "group", "set-policy", topic, "--fixed", "300ms")
    bodies = ["fine 1", "fail 1 2", "bad 3", "fine 4"]
    for body in bodies:
        _send(daemon, topic, body, "--group", "alice")
    with App(tmp_path, daemon, topic, parallelism=8) as app:
        app.wait_for("done", "fine 4")
        given = [(line["body"], line["attempt"]) for line in app.lines if line["event"] == "given"]
    assert given == [("fine 1", 1), ("fail 1 2", 1), ("fail 1 2", 2), ("bad 3", 1), ("fine 4", 1)]
