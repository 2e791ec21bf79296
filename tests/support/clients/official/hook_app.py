"""An application that uses the hook, as a process of its own, and a consumer that sees all that a message carries.

The program is ``tests/clients/python/hook_app.py``; commands and answers are JSON lines. An answer that was read is an
outcome the application knew; a command without one was under way when the process ended.
"""

# ruff: noqa: ANN401 - commands and answers are JSON

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.clients.wire.client import WireClient, a_receive

from broker_adapter.wire import rocketmq_v2 as wire

_PROGRAM = Path(__file__).parents[3] / "clients" / "python" / "hook_app.py"
UID_PROPERTY = "DMQ_UID"
ANSWER_S_MAX = 30.0
START_S_MAX = 30.0


class AppEnded(Exception):
    """The process is gone, and the command has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An attempt that the client's producer gave up. ``errors`` are of its own attempts, the last one first."""

    uid: str
    is_first: bool  # of the send itself, not of a repetition
    errors: tuple[str, ...]

    @property
    def is_certain(self) -> bool:
        """Whether none of its attempts can have reached the server: there was no connection for any."""
        return all("failed to connect" in error or "failed to fetch topic" in error for error in self.errors)


class HookApp:
    """One process. ``speed``: how fast its clock runs from ``since_ms`` on. Leaving the context kills it.

    ``reconnect_ms``: how long the client's connections wait between attempts from the first failure on; 0: as they do.
    """

    def __init__(
        self,
        home: Path,
        address: str,
        root: Path,
        topic: str,
        *,
        speed: float = 1.0,
        since_ms: int | None = None,
        reconnect_ms: int = 0,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._stderr = (home / "stderr.txt").open("ab")
        settings = {
            "address": address,
            "root": str(root),
            "topic": topic,
            "speed": speed,
            "since_ms": time.time_ns() // 1_000_000 if since_ms is None else since_ms,
            "reconnect_ms": reconnect_ms,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=home,
            env={**environment, "HOME": str(home)},
        )
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._has_ended = False
        self.failed: list[Failed] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_ready.wait(START_S_MAX) or self._has_ended:
            self.close()
            raise AssertionError("the application did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def begin(self, command: str, **arguments: Any) -> Future[Any]:
        """Start a command; the future is its answer, or ``AppEnded``."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._has_ended:
                raise AppEnded
            self._number += 1
            self._waiting[self._number] = answer
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": self._number, "do": command, **arguments}) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise AppEnded from None
        return answer

    def do(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its answer."""
        return self.begin(command, **arguments).result(ANSWER_S_MAX)

    def send(self, lane: str, body: bytes = b"body", **fields: Any) -> dict[str, Any]:
        """Send on a lane; return what the application knows of it then."""
        answer: dict[str, Any] = self.do("send", lane=lane, fields={"body": body.hex(), **fields})
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone and all it said was read."""
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)

    def close(self) -> None:
        """End the process, and print what it said: pytest shows it where a test failed."""
        self.kill()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a command that nobody read
            self._process.stdin.close()
        self._stderr.close()
        print(f"--- application at {self._home}\n{(self._home / 'stderr.txt').read_text(errors='replace')[-8000:]}---")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break  # killed while it wrote: it did not get to say that
                said = json.loads(line)
                match said.get("event"):
                    case "ready":
                        self._is_ready.set()
                    case "failed":
                        errors = tuple(said["errors"])
                        self.failed.append(Failed(uid=said["uid"], is_first=said["is_first"], errors=errors))
                    case _:
                        self._answer(said)
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(AppEnded())
        self._is_ready.set()

    def _answer(self, said: dict[str, Any]) -> None:
        with self._lock:
            answer = self._waiting.pop(said["id"])
        if "error" in said:
            answer.set_exception(AssertionError(said["error"]))
        else:
            answer.set_result(said["ok"])


class Consumer:
    """Receives and acknowledges all of a topic, and keeps the messages as they came over the wire."""

    def __init__(self, address: str, topic: str, group: str) -> None:
        self._client = WireClient(address, client_id=f"consumer-{group}")
        self._topic, self._group = topic, group
        self.messages: list[wire.Message] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.channel.close()

    def receive_until(self, is_enough: Callable[[], bool], *, within_s: float) -> None:
        """Go on until ``is_enough``, or time is up."""
        until_s = time.monotonic() + within_s
        while not is_enough() and time.monotonic() < until_s:
            self.receive(wait_s=1)

    def receive(self, *, wait_s: float) -> int:
        """Receive once, waiting up to ``wait_s`` for a first message; return how many came."""
        request = a_receive(self._topic, self._group, wait_s=wait_s)
        frames = self._client.frames("ReceiveMessage", request, deadline_s=wait_s + 10)
        found = [frame.message for frame in frames if frame.HasField("message")]
        acks = wire.AckMessageRequest(topic=wire.Resource(name=self._topic), group=wire.Resource(name=self._group))
        for message in found:
            system = message.system_properties
            assert system.delivery_attempt == 1, "it was not acknowledged in time"
            acks.entries.add(message_id=system.message_id, receipt_handle=system.receipt_handle)
        if found:
            assert self._client.ask("AckMessage", acks).status.code == wire.OK
        self.messages += found
        return len(found)

    def with_uid(self, uid: str) -> list[wire.Message]:
        """Return what came with this uid."""
        return [message for message in self.messages if message.user_properties.get(UID_PROPERTY) == uid]
