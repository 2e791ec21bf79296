"""Consumers made by ``consume``, in a process of their own: a handler does what the first words of a body say.

Reports as JSON lines what it is given and how it ends; each line on stdin lets one ``wait`` return.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any

from dmq.integrations.consumer import consume, run
from retry import Permanent

_lock = threading.Lock()
_go = threading.Semaphore(0)
_settings = json.loads(sys.argv[1])


def say(line: dict[str, Any]) -> None:
    """Write one line."""
    with _lock:
        print(json.dumps(line), flush=True)


def begin(message: Any) -> list[str]:  # noqa: ANN401 - the client has no types
    """Report a message, fail it if it says so, and return its words."""
    words: list[str] = message.body.decode().split()
    body, attempt = message.body.decode(), message.delivery_attempt
    say({"event": "given", "body": body, "attempt": attempt, "topic": message.topic})
    if words[0] == "bad":
        raise Permanent("it says so")
    if words[0] == "exit":
        sys.exit(3)
    if words[0] == "fail" and message.delivery_attempt <= int(words[1]):
        raise RuntimeError("it says so")
    return words


def handle(message: Any) -> None:  # noqa: ANN401 - the client has no types
    """Do what the body says."""
    words = begin(message)
    if words[0] == "wait":
        _go.acquire()
    elif words[0] == "hang" and message.delivery_attempt == 1:
        threading.Event().wait()
    say({"event": "done", "body": " ".join(words)})


async def handle_async(message: Any) -> None:  # noqa: ANN401 - the client has no types
    """Do what the body says, on the event loop."""
    words = begin(message)
    if words[0] == "wait":
        await asyncio.to_thread(_go.acquire)
    elif words[0] == "hang" and message.delivery_attempt == 1:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            say({"event": "cancelled", "body": " ".join(words)})
            raise
    say({"event": "done", "body": " ".join(words)})


def listen() -> None:
    """Let a handler go on for each line."""
    for _ in sys.stdin:
        _go.release()


threading.Thread(target=listen, daemon=True).start()
consumers = [
    consume(
        f"{_settings['topic']}{name}",
        group=f"{_settings['topic']}{name}",
        parallelism=_settings.get("parallelism", 4),
        timeout_s=_settings.get("timeout_s", 900.0),
    )(function)
    for name, function in (("", handle), ("-async", handle_async))
    if not name or _settings.get("has_async")
]
run(*consumers, stop_s=_settings.get("stop_s", 30.0), listen=os.environ.get("LISTEN", ""))
say({"event": "ended", "threads": sorted(each.name for each in threading.enumerate() if not each.daemon)})
