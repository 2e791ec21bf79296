"""The official Python client in a process of its own, controlled by JSON lines (``support.clients.official.client``).

The version that is installed, or the one in the folder that is its argument. Push consumers came with 5.0.9, recall
with 5.1.
"""

# ruff: noqa: ANN401 - the client has no types

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

# Only protocol lines on stdout; whatever the client prints goes to stderr.
_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
sys.path[:0] = sys.argv[1:]

import rocketmq  # noqa: E402 - it may print
from rocketmq import (  # noqa: E402
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType  # noqa: E402

faulthandler.register(signal.SIGUSR1)  # for a test that finds it stuck

_TLS = os.environ.get("CLIENT_TLS") == "on"
_REQUEST_S_MAX = 10  # a push consumer whose first one does not end in time, by default 3 s, does not start
_out_lock = threading.Lock()
_clients: dict[str, Any] = {}
_listeners: dict[str, Listener] = {}
_messages: dict[int, Any] = {}
_transactions: dict[str, Any] = {}  # by the message id
_tokens = count(1)


def say(line: dict[str, Any]) -> None:
    """Write one line."""
    with _out_lock:
        _out.write(json.dumps(line) + "\n")
        _out.flush()


def _id(received: str) -> str:
    """Return the id as it was sent: early versions leave its first two digits out of what they received."""
    return f"01{received}" if len(received) == 32 else received


def _ms(at: Any) -> int:
    """Return a delivery timestamp in ms, which early versions hand on as the protocol's own."""
    return at.seconds * 1000 + at.nanos // 1_000_000 if hasattr(at, "seconds") else at or 0


def describe(message: Any) -> dict[str, Any]:
    """Return what a test looks at; ``token`` names the message in later commands."""
    token = next(_tokens)
    _messages[token] = message
    return {
        "token": token,
        "topic": message.topic,
        "message_id": _id(message.message_id),
        "body": message.body.decode(),
        "tag": message.tag or "",
        "keys": sorted(message.keys),
        "properties": dict(message.properties),
        "message_group": message.message_group or "",
        "deliver_at_ms": _ms(message.delivery_timestamp),
        "attempt": message.delivery_attempt,
        "is_corrupted": bool(getattr(message, "corrupted", False)),
        "at_ms": int(time.time() * 1000),
    }


class Listener(getattr(rocketmq, "MessageListener", object)):  # type: ignore[misc]  # the client has no types
    """Reports every message; fails those whose body says so, as often as it says (``fail 2 times``), until mended.

    A body that begins with ``hang`` keeps it on the first attempt.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_mended = False

    def consume(self, message: Any) -> Any:
        seen = describe(message)
        say({"event": "delivery", "client": self._name, **seen})
        words = seen["body"].split()
        if words[:1] == ["hang"] and seen["attempt"] == 1:
            threading.Event().wait()
        if words[:1] == ["fail"] and seen["attempt"] <= int(words[1]) and not self.is_mended:
            return rocketmq.ConsumeResult.FAILURE
        return rocketmq.ConsumeResult.SUCCESS


class Checker(TransactionChecker):  # type: ignore[misc]  # the client has no types
    """Reports every check and decides by the first word of the body: ``commit``, ``rollback``, or anything else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def check(self, message: Any) -> Any:
        seen = describe(message)
        say({"event": "check", "client": self._name, **seen})
        decisions = {"commit": TransactionResolution.COMMIT, "rollback": TransactionResolution.ROLLBACK}
        return decisions.get(seen["body"].split()[0], TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED)


def start(
    name: str,
    kind: str,
    address: str,
    topic: str,
    group: str = "",
    tags: str = "*",
    sql: str = "",
    wait_s: int = 20,
    access_key: str = "",
    secret_key: str = "",
) -> None:
    """Start a producer, also of transactions, a consumer, or a loop around one; ``sql`` takes the place of ``tags``."""
    expression = FilterExpression(sql, FilterType.SQL) if sql else FilterExpression(tags)
    configuration = ClientConfiguration(address, Credentials(access_key, secret_key), request_timeout=_REQUEST_S_MAX)
    client: Any
    if kind == "producer":
        client = Producer(configuration, (topic,), tls_enable=_TLS)
    elif kind == "transactional":
        client = Producer(configuration, (topic,), Checker(name), tls_enable=_TLS)
    elif kind in {"simple", "loop"}:
        tls = {"tls_enable": True} if _TLS else {}  # since 5.0.6
        client = SimpleConsumer(configuration, group, {topic: expression}, await_duration=wait_s, **tls)
    else:
        listener = _listeners[name] = Listener(name)
        client = rocketmq.PushConsumer(configuration, group, listener, {topic: expression}, tls_enable=_TLS)
    # Where the route is there before the client asks to be told, it opens its telemetry stream in this thread, which
    # needs the loop of its calls for that.
    asyncio.set_event_loop(client.rpc_client.get_channel_io_loop())
    client.startup()
    _clients[name] = client
    if kind == "loop":
        threading.Thread(target=listen, args=(name,), daemon=True).start()


def listen(name: str) -> None:
    """Receive, report and acknowledge for ever: what an application writes whose client has no push consumer."""
    while name in _clients:
        try:
            for seen in receive(name):
                say({"event": "delivery", "client": name, **seen})
                ack(name, seen["token"])
        except Exception as error:  # noqa: BLE001 - it goes on
            print(f"{name}: not received: {error!r}", file=sys.stderr)
            time.sleep(0.1)


def send(
    name: str,
    topic: str,
    body: str = "body",
    body_bytes: int = 0,
    tag: str = "",
    key: str = "",
    properties: dict[str, str] | None = None,
    message_group: str = "",
    deliver_at: int = 0,
    is_half: bool = False,
) -> dict[str, Any]:
    """Send a message; ``deliver_at`` goes to the client as it is (it wants seconds).

    A half message begins a transaction, which ``commit`` and ``rollback`` end.
    """
    message = Message()
    message.topic = topic
    message.body = body.encode() if not body_bytes else b"x" * body_bytes
    if tag:
        message.tag = tag
    if key:
        message.keys = key
    for property_name, value in (properties or {}).items():
        message.add_property(property_name, value)
    if message_group:
        message.message_group = message_group
    if deliver_at:
        message.delivery_timestamp = deliver_at
    transaction = _clients[name].begin_transaction() if is_half else None
    receipt = _clients[name].send(message, transaction)
    if is_half:
        _transactions[receipt.message_id] = transaction
    handle = getattr(receipt, "recall_handle", None)
    return {"message_id": receipt.message_id, "offset": receipt.offset, "recall_handle": handle or ""}


def recall(name: str, topic: str, handle: str) -> str:
    """Recall a message and return its id."""
    return str(_clients[name].recall_message(topic, handle))


def commit(message_id: str) -> None:
    """Commit the transaction of a half message."""
    _transactions[message_id].commit()


def rollback(message_id: str) -> None:
    """Roll the transaction of a half message back."""
    _transactions[message_id].rollback()


def receive(name: str, batch: int = 32, invisible_s: int = 10) -> list[dict[str, Any]]:
    """Receive once."""
    return [describe(message) for message in _clients[name].receive(batch, invisible_s)]


def ack(name: str, token: int) -> None:
    """Acknowledge a received message."""
    _clients[name].ack(_messages[token])


def change(name: str, token: int, invisible_s: int) -> None:
    """Change the invisible duration of a received message."""
    _clients[name].change_invisible_duration(_messages[token], invisible_s)


def mend(name: str) -> None:
    """Let the listener of a push consumer fail no more."""
    _listeners[name].is_mended = True


def shutdown(name: str) -> None:
    """Shut a client down."""
    _clients.pop(name).shutdown()


_COMMANDS = {
    call.__name__: call for call in (start, send, commit, rollback, recall, receive, ack, change, mend, shutdown)
}


def serve(request: dict[str, Any]) -> None:
    """Do one command and say how it went."""
    number, command = request.pop("id"), request.pop("do")
    try:
        say({"id": number, "ok": _COMMANDS[command](**request)})
    except Exception as error:  # noqa: BLE001 - the test decides
        code = getattr(error, "code", None)  # a method where the error is grpc's own
        code = int(code) if isinstance(code, int) else None
        if code is None and (told := re.match(r"response code:(\d+)", str(error))):  # early versions only say it
            code = int(told[1])
        say({"id": number, "error": str(error) or repr(error), "type": type(error).__name__, "code": code})


def main() -> None:
    """Serve until stdin ends; then leave without the client's own shutdown, like a process that is killed."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        say({"event": "ready"})
        for line in sys.stdin:
            pool.submit(serve, json.loads(line))
        os._exit(0)


if __name__ == "__main__":
    main()
