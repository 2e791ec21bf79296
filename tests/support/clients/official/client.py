"""Official RocketMQ clients, each in a process of its own: the one interface tests drive them by.

Never imported into the test process: the Python client registers its own protobuf files, starts a thread and opens a
log file at import. A program under ``tests/clients`` takes commands as JSON lines on stdin,

    {"id": 1, "do": "send", "name": "producer", "topic": "orders", "body": "hello"}

answers each with ``{"id": 1, "ok": ...}`` or ``{"id": 1, "error": ..., "type": ..., "code": ...}``, in any order, and
reports what a push consumer is given as ``{"event": "delivery", "client": ..., ...}``, and what a producer is asked for
as ``{"event": "check", ...}``.
"""

# ruff: noqa: ANN401 - commands and answers are JSON

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from support.clients.java.jvm import SHORT_LIVED
from support.clients.official.builds import BUILDS, Build, earlier_go, earlier_java, earlier_python, what_is_missing
from support.effort import CLIENTS, EFFORT, TLS
from support.trusted import of_client

from broker_adapter.wire import rocketmq_v2 as wire

_TESTS = Path(__file__).parents[3]
_NODE = _TESTS / "clients" / "node"
ANSWER_S_MAX = 40.0
START_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Language:
    """What tests must know about one client: how it is started, and where it differs from the others.

    ``receive_overhead_bytes``: grpc-js takes 4 MiB for a whole frame, so that a body of 4 MiB can be sent with the Node
    client and not be received with it. ``tells_of_acks``: whether an application hears that the server refused an
    acknowledgement. ``checks_times``: whether the client itself refuses a time that the protocol cannot say.
    ``tls``: whether it speaks TLS when nobody tells it what to speak, as in most of our tests. ``lacks``: what this
    client does not offer; a test that is about one of these is run ``having`` it. ``listener``: the kind of consumer
    that reports what it is given without being asked, for tests that do not care how. ``build``: what makes its
    program, where that is not a script around a client that is installed already.
    """

    name: str
    command: tuple[str, ...]
    deliver_at_unit_ms: int = 1
    receive_overhead_bytes: int = 0
    tells_of_acks: bool = True
    checks_times: bool = False
    tls: bool = False
    lacks: frozenset[str] = frozenset()
    listener: str = "push"
    build: Build | None = None


PYTHON = Language("python", (sys.executable, str(_TESTS / "clients" / "python" / "client.py")), deliver_at_unit_ms=1000)
NODE = Language("node", ("node", str(_NODE / "client.mjs")), receive_overhead_bytes=1024)
GO = Language("go", (str(BUILDS["go"].cache / "client"),), tells_of_acks=False, tls=True, build=BUILDS["go"])
_JVM = (*SHORT_LIVED, "-Xmx512m", "-Duser.home=.")  # its log goes where the test looks for it


def _java(build: Build) -> tuple[str, ...]:
    return ("java", *_JVM, "-cp", f"{build.cache}/classes:{build.cache}/lib/*", "Client")


JAVA = Language("java", _java(BUILDS["java"]), checks_times=True, tls=True, build=BUILDS["java"])
# It has neither push consumers nor recall, cannot change an invisible duration, and takes a transaction away with its
# end: nobody can write a second commit. In place of a push consumer its program has a loop around a simple one.
_RUST_LACKS = frozenset({"push", "recall", "change", "second end"})
RUST = Language(
    "rust",
    (str(BUILDS["rust"].cache / "debug" / "client"),),
    deliver_at_unit_ms=1000,
    receive_overhead_bytes=1024,
    lacks=_RUST_LACKS,
    listener="loop",
    build=BUILDS["rust"],
)
NEWEST = (PYTHON, NODE, GO, JAVA, RUST)


def _earlier(newest: Language, build: Build, command: tuple[str, ...], *lacks: str) -> Language:
    name = f"{newest.name}-{build.version.removeprefix('v').replace('.', '_')}"  # it is part of the names of topics
    listener = "loop" if "push" in lacks else newest.listener
    return replace(
        newest, name=name, build=build, command=command, lacks=newest.lacks | frozenset(lacks), listener=listener
    )


def _earlier_go(version: str, *lacks: str) -> Language:
    tags = [f"before_{since}" for feature, since in (("push", "5_1_3"), ("recall", "5_1_4")) if feature in lacks]
    build = earlier_go(version, *tags)
    # before 5.1.4 grpc-go's own bound of 4 MiB for a whole frame
    return replace(_earlier(GO, build, (str(build.cache / "client"),), *lacks), receive_overhead_bytes=1024)


def _earlier_java(version: str, *lacks: str) -> Language:
    build = earlier_java(version)
    return _earlier(JAVA, build, _java(build), *lacks)


def _earlier_python(version: str, *lacks: str) -> Language:
    build = earlier_python(version)
    return _earlier(PYTHON, build, (*PYTHON.command, str(build.cache / "lib")), "checks", *lacks)


# Every earlier version since 5.0.0 that the registries have; of Node and Rust they have one. Without "plain" it speaks
# TLS only; without "keys" or "properties" it cannot send them, or forgets those of a message it was given; without
# "digest" it takes every message for corrupted, since it spells MD5 otherwise; without "reasons" its log has none;
# without "restart" its goroutines wait for each other's locks, and for ever, once its server was away; without "end
# status" its commit of what was rolled back seems to succeed; without "sql" it asks for SQL and receives by tag;
# without "refusal" it says of a refused start no more than that it failed; without "refused start" it never returns
# from one: it waits for settings, which a server that refuses its telemetry stream does not send; without "handles" it
# goes on with the first receipt handle of a message whose invisible duration it changed; without "checks" its
# transactions may never be checked: two of its threads can write to its telemetry stream at once, at which grpcio ends
# the stream, and the client does not read the one it opens next.
EARLIER = (
    _earlier_java("5.0.0", "recall", "plain", "refusal", "refused start"),
    _earlier_java("5.0.2", "recall", "plain", "refusal"),
    _earlier_java("5.0.3", "recall", "plain", "refusal"),
    _earlier_java("5.0.4", "recall", "plain", "refusal"),
    _earlier_java("5.0.5", "recall", "refusal"),
    _earlier_java("5.0.6", "recall", "refusal"),
    _earlier_java("5.0.7", "recall", "refusal"),
    _earlier_java("5.0.8", "refusal"),
    _earlier_java("5.1.0"),
    _earlier_go("v5.0.1-rc.2", "digest", "recall", "push", "plain", "properties", "end status", "sql"),
    _earlier_go("v5.0.1-rc.4", "digest", "recall", "push", "plain", "restart", "end status", "sql"),
    _earlier_go("v5.0.1-rc.5", "digest", "recall", "push", "plain", "end status"),
    _earlier_go("v5.1.0-rc.1", "digest", "recall", "push", "plain", "end status"),
    _earlier_go("v5.1.1-rc1", "digest", "recall", "push", "plain", "end status"),
    _earlier_go("v5.1.2", "digest", "recall", "push", "plain", "end status"),
    _earlier_go("v5.1.3", "recall", "end status", "refused start"),
    _earlier_python("5.0.1", "recall", "push", "handles"),
    _earlier_python("5.0.2", "recall", "push", "handles"),
    _earlier_python("5.0.3", "recall", "push", "handles", "reasons"),
    _earlier_python("5.0.5", "recall", "push", "reasons"),
    _earlier_python("5.0.6", "recall", "push", "reasons"),
    _earlier_python(
        "5.0.9", "reasons", "push", "keys", "properties"
    ),  # its push consumer does not survive metrics that are off
    _earlier_python("5.1.1", "refused start"),
)
# The oldest of each language; in a long run one from the middle too, of Java that one whose heartbeats do not say
# what it is.
_FEW = {"java-5_0_0", "go-5_0_1-rc_2", "python-5_0_1"}
if EFFORT > 1:
    _FEW |= {"java-5_0_3", "go-5_1_2", "python-5_0_6"}
LANGUAGES = NEWEST if CLIENTS == "newest" else (*NEWEST, *EARLIER)
VERSIONS = (*NEWEST, *(each for each in EARLIER if CLIENTS == "all" or each.name in _FEW))


def those_with(*features: str) -> tuple[Language, ...]:
    """Return the clients that lack none of the ``features``."""
    return tuple(language for language in LANGUAGES if language.lacks.isdisjoint(features))


def having(*features: str) -> pytest.MarkDecorator:
    """Run a test with the ``process`` of each client that lacks none of the ``features``."""
    return pytest.mark.parametrize("process", those_with(*features), indirect=True, ids=lambda language: language.name)


class ClientError(Exception):
    """The client raised; ``type`` is its exception's name, ``code`` the protocol's code where the client tells it."""

    def __init__(self, text: str, kind: str, code: int | None) -> None:
        super().__init__(text)
        self.type = kind
        self.code = code


def require(language: Language) -> None:
    """Skip the test, by name, where the client cannot run; in CI that is a failure, unless it may be missing there."""
    if missing := _missing(language):
        is_required = language.build is None or language.build.is_required
        assert not (is_required and os.environ.get("CI")), f"required in CI: {missing}"
        pytest.skip(missing)


def can_run(language: Language) -> bool:
    """Say whether the client can run, for what is done for all of them before their tests; those ``require`` it."""
    return not _missing(language)


def _missing(language: Language) -> str:
    if language.build is not None:
        return what_is_missing(language.build)
    if language is NODE and shutil.which("node") is None:
        return "node is not installed"
    if language is NODE and not (_NODE / "node_modules" / "rocketmq-client-nodejs").is_dir():
        return "the official Node client is not installed: make node-client"
    return ""


class OfficialClient:
    """One process that holds any number of clients, each under a name of its own.

    ``tls``: ``on``, ``off``, or what this run says, or else what the clients of the language do by themselves.
    """

    def __init__(self, language: Language, home: Path, address: str, *, tls: str = "") -> None:
        self.language = language
        self.address = address
        self._home = home
        self._stderr = (home / "stderr.txt").open("ab")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            language.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=home,
            env={**environment, **({} if tls else of_client()), "HOME": str(home), "CLIENT_TLS": tls or TLS},
        )
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._deliveries: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_ready.wait(START_S_MAX):
            self.close()
            raise AssertionError(f"the {language.name} client did not start\n{self.stderr()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and print what it said: pytest shows it where a test failed."""
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._stderr.close()
        print(f"--- {self.language.name} client\n{self.stderr()}\n{self.client_log()[-8000:]}---")

    def stderr(self) -> str:
        """Return what the process said."""
        return (self._home / "stderr.txt").read_text(errors="replace")

    def client_log(self) -> str:
        """Return the client's own log file."""
        return "".join(file.read_text(errors="replace") for file in sorted(self._home.glob("logs/**/*.log")))

    # -- commands -----------------------------------------------------------------------------------------------------

    def begin(self, command: str, **arguments: Any) -> Future[Any]:
        """Start a command; the future is its answer, ``ClientError`` if the client raised."""
        answer: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = answer
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "do": command, **arguments}) + "\n")
            self._process.stdin.flush()
        return answer

    def do(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its answer."""
        return self.begin(command, **arguments).result(ANSWER_S_MAX)

    def begin_start(self, name: str, kind: str, topic: str, **arguments: Any) -> Future[Any]:
        """Begin to start a ``producer`` or ``transactional`` one, a ``simple`` or a ``push`` consumer."""
        return self.begin("start", name=name, kind=kind, address=self.address, topic=topic, **arguments)

    def start(self, name: str, kind: str, topic: str, **arguments: Any) -> None:
        """Start a client, as ``begin_start``, and wait until it has."""
        self.begin_start(name, kind, topic, **arguments).result(ANSWER_S_MAX)

    def send(self, name: str, topic: str, **arguments: Any) -> str:
        """Send and return the message id. ``deliver_at_ms`` is turned into the client's unit, rounded up."""
        deliver_at_ms = arguments.pop("deliver_at_ms", 0)
        if deliver_at_ms:
            arguments["deliver_at"] = -(-deliver_at_ms // self.language.deliver_at_unit_ms)
        return str(self.do("send", name=name, topic=topic, **arguments)["message_id"])

    def mend(self, name: str) -> None:
        """Let the listener of a push consumer fail no more."""
        self.do("mend", name=name)

    def receive_until(
        self, name: str, count: int, *, within_s: float = 30.0, invisible_s: int = 10, acks: bool = True
    ) -> list[dict[str, Any]]:
        """Receive, and acknowledge unless told otherwise, until ``count`` messages came or time is up."""
        found: list[dict[str, Any]] = []
        until_s = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < until_s:
            for delivery in self.do("receive", name=name, invisible_s=invisible_s):
                found.append(delivery)
                if acks:
                    self.do("ack", name=name, token=delivery["token"])
        return found

    def deliveries(self, name: str) -> list[dict[str, Any]]:
        """Return what the push consumer was given so far, or the producer was asked."""
        with self._news:
            return [delivery for delivery in self._deliveries if delivery["client"] == name]

    def wait_for_deliveries(self, name: str, count: int, *, within_s: float = 30.0) -> list[dict[str, Any]]:
        """Wait until the push consumer was given ``count`` messages, and return all so far, also if fewer came."""
        return self._wait_for(name, lambda found: len(found) >= count, within_s)

    def wait_for_messages(self, name: str, ids: Collection[str], *, within_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait until it was given all of these, some perhaps more than once; return all so far, also if some miss."""
        return self._wait_for(name, lambda found: set(ids) <= {each["message_id"] for each in found}, within_s)

    def _wait_for(
        self, name: str, is_enough: Callable[[list[dict[str, Any]]], bool], within_s: float
    ) -> list[dict[str, Any]]:
        until_s = time.monotonic() + within_s
        with self._news:
            while not is_enough(found := [each for each in self._deliveries if each["client"] == name]):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not self._news.wait(left_s):
                    break
            return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                match said.get("event"):
                    case "ready":
                        self._is_ready.set()
                    case "delivery" | "check":
                        with self._news:
                            self._deliveries.append(said)
                            self._news.notify_all()
                    case _:
                        self._answer(said)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ClientError("the client's process ended", "ProcessEnded", None))

    def _answer(self, said: dict[str, Any]) -> None:
        answer = self._waiting.pop(said["id"])
        if "error" in said:
            code = said["code"]  # the Rust client tells its name
            answer.set_exception(
                ClientError(said["error"], said["type"], wire.Code.Value(code) if isinstance(code, str) else code)
            )
        else:
            answer.set_result(said["ok"])
