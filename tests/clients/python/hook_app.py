"""Application of the hook on the official Python client, driven by JSON lines (``support.clients.official.hook_app``).

It has one lane per way of sending, named as the type of its messages is. A lane is a thread: it sends in the order of
its commands, and says what became of each send as soon as that is known, and not before.
"""

# ruff: noqa: ANN401 - the client has no types

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

# Only protocol lines on stdout; whatever the client prints goes to stderr.
_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

from rocketmq import ClientConfiguration, Credentials, Message, Producer  # noqa: E402 - it may print

from broker_adapter.runtime.clock import SystemClock  # noqa: E402
from dmq import Spool  # noqa: E402
from retry import Attempt, Delivered, Redelivery, Spooled, durable  # noqa: E402
from retry.hook import MODES  # noqa: E402
from retry.hook.producers.rocketmq import UID_PROPERTY, RocketMqCodec, classify  # noqa: E402

faulthandler.register(signal.SIGUSR1)  # for a test that finds it stuck

REQUEST_TIMEOUT_S = 1
_out_lock = threading.Lock()


def say(line: dict[str, Any]) -> None:
    """Write one line, and see that it has left."""
    with _out_lock:
        _out.write(json.dumps(line) + "\n")
        _out.flush()


class FastClock:
    """Both clocks run ``speed`` times as fast from ``since_ms`` on, so that a later process goes on where one ended."""

    def __init__(self, speed: float, since_ms: int) -> None:
        self._speed, self._since_ms, self._real = speed, since_ms, SystemClock()

    def now_ms(self) -> int:
        return self._since_ms + int((self._real.now_ms() - self._since_ms) * self._speed)

    def monotonic_s(self) -> float:
        return self._real.monotonic_s() * self._speed

    def boot_ms(self) -> int:
        return int(self._real.boot_ms() * self._speed)

    def boot_id(self) -> str:
        return self._real.boot_id()


class TellingProducer(Producer):  # type: ignore[misc]  # the client has no types
    """The client's producer; it says which attempts failed, and with what."""

    def send(self, message: Any, transaction: Any = None) -> Any:
        try:
            return super().send(message, transaction)
        except Exception as error:
            errors: list[str] = []
            cause: BaseException | None = error
            while cause is not None:  # the client's own attempts, the last one first
                errors.append(f"{type(cause).__name__}: {cause}")
                cause = cause.__context__
            _say_failed(message, errors)
            raise

    def send_async(self, message: Any) -> Any:
        def told(sending: Future[Any]) -> None:
            # A repetition on the application's loop is cancelled where that ends, and may have got through.
            error = CancelledError() if sending.cancelled() else sending.exception()
            if error is not None:
                _say_failed(message, [f"{type(error).__name__}: {error}", "of its earlier attempts nothing is known"])

        sending = super().send_async(message)
        sending.add_done_callback(told)
        return sending


def _say_failed(message: Any, errors: list[str]) -> None:
    uid, is_first = message.properties.get(UID_PROPERTY, ""), getattr(message, "is_first", False)
    say({"event": "failed", "uid": uid, "is_first": is_first, "errors": errors})


def make_message(fields: dict[str, Any]) -> Any:
    """Make a message of the client; a field that is not there is not set."""
    message = Message()
    # What the hook sends again it makes anew.
    message.is_first = not threading.current_thread().name.startswith("retry-")
    if "topic" in fields:
        message.topic = fields["topic"]
    message.body = b"x" * fields["body_bytes"] if "body_bytes" in fields else bytes.fromhex(fields["body"])
    for name in ("tag", "message_group", "delivery_timestamp"):
        if name in fields:
            setattr(message, name, fields[name])
    for key in fields.get("keys", ()):
        message.keys = key
    for name, value in fields.get("properties", {}).items():
        message.add_property(name, value)
    return message


Sender = Callable[[dict[str, Any]], dict[str, Any]]


class App:
    """A spool, a producer, and the lanes in front of them."""

    def __init__(self, address: str, root: str, topic: str, speed: float, since_ms: int, reconnect_ms: int) -> None:
        if reconnect_ms:
            _wait_between_connections(reconnect_ms)
        configuration = ClientConfiguration(address, Credentials(), request_timeout=REQUEST_TIMEOUT_S)
        self.producer = TellingProducer(configuration, (topic,))
        self.producer.startup()
        self.spool = Spool(root, clock=FastClock(speed, since_ms))
        self.hooks = [Redelivery(self.spool, mode=mode, owns_sink=False) for mode in MODES]
        self.lanes: dict[str, Sender] = {}
        for mode, hook in zip(MODES, self.hooks, strict=True):
            self._add_durable(f"durable-{mode}", hook)
            self._add_handler(f"handler-{mode}", hook, self.producer.send, classify=classify)
        self._add_handler("plain-futures", self.hooks[0], self.producer.send_async)
        self._add_futures("futures", self.hooks[0])
        self._add_asyncio("asyncio", self.hooks[0])
        self._threads = {lane: ThreadPoolExecutor(1, thread_name_prefix=lane) for lane in self.lanes}

    def _add_durable(self, lane: str, hook: Redelivery) -> None:
        """``durable(producer).send``: the one line of the guide."""
        producer = durable(self.producer, hook, type_name=lane)
        self.lanes[lane] = lambda fields: _sent(make_message(fields), producer.send)

    def _add_handler(self, lane: str, hook: Redelivery, send_message: Callable[[Any], Any], **options: Any) -> None:
        """A handler of the application, which keeps what it needs to make the message."""

        @hook.handler(lane, **options)
        def send_order(payload: bytes, attempt: Attempt) -> Any:
            message = make_message(json.loads(payload))
            message.add_property(UID_PROPERTY, attempt.uid.hex())
            return send_message(message)

        def send(fields: dict[str, Any]) -> dict[str, Any]:
            outcome = hook.send(lane, json.dumps(fields).encode(), key=fields.get("message_group", ""))
            if isinstance(outcome, Delivered):
                return _delivered(outcome.uid.hex(), outcome.receipt)
            return _spooled(outcome) if isinstance(outcome, Spooled) else _rejected(outcome.uid.hex(), outcome.error)

        self.lanes[lane] = send

    def _add_futures(self, lane: str, hook: Redelivery) -> None:
        """``send_async`` of the client, whose futures the hook waits for."""
        producer = durable(self.producer, hook, type_name=lane, method="send_async")
        self.lanes[lane] = lambda fields: _sent(make_message(fields), producer.send_async)

    def _add_asyncio(self, lane: str, hook: Redelivery) -> None:
        """A coroutine function around ``send_async``, as applications on asyncio have one."""

        async def send_message(message: Any) -> Any:
            try:
                return await asyncio.wrap_future(self.producer.send_async(message))
            except (asyncio.CancelledError, GeneratorExit) as error:  # its loop ended, perhaps before the answer
                _say_failed(message, [f"{type(error).__name__}: the loop of the application ended"])
                raise

        protected = durable(send_message, hook, type_name=lane, codec=RocketMqCodec(), classify=classify)
        self.lanes[lane] = lambda fields: _sent(
            make_message(fields), lambda message: asyncio.run(_await(protected, message))
        )

    def send(self, number: int, lane: str, fields: dict[str, Any]) -> None:
        """Let the lane send, and answer when it has."""
        self._threads[lane].submit(_answer, number, lambda: self.lanes[lane](fields))

    def stats(self) -> dict[str, int]:
        """Return what the spool holds."""
        stats = self.spool.stats()
        return {"waiting": stats.waiting, "held": stats.held, "dead": stats.dead}

    def dead(self, lane: str) -> list[dict[str, Any]]:
        """Return the dead set of a lane."""
        return [
            {"uid": each.entry.uid.hex(), "death": each.death.name, "error": each.entry.error}
            for each in self.spool.dead(lane)
        ]

    def close(self) -> dict[str, Any]:
        """Close the hooks and the spool; return what they say."""
        closed = [hook.close() for hook in self.hooks]
        self.spool.close()
        return {
            "sent": sum(each.sent for each in closed),
            "running": sum(each.running for each in closed),
            "unsettled": sum(each.unsettled for each in closed),
            "still_waiting": closed[-1].still_waiting,
            "dead": closed[-1].dead,
        }


def _wait_between_connections(ms: int) -> None:
    """Let the client's connections wait that long after a failure, at once, as they do after a long outage."""
    from grpc import aio

    options = [(f"grpc.{which}_reconnect_backoff_ms", ms) for which in ("initial", "max")]
    opened: Callable[..., Any] = aio.insecure_channel

    def insecure_channel(target: str, given: list[tuple[str, int]]) -> Any:
        return opened(target, [*given, *options])

    aio.__dict__["insecure_channel"] = insecure_channel


async def _await(send: Callable[[Any], Any], message: Any) -> Any:
    return await send(message)


def _sent(message: Any, send: Callable[[Any], Any]) -> dict[str, Any]:
    """Send through ``durable``: it returns the receipt or ``Spooled``, and raises for what is neither."""
    try:
        returned = send(message)
    except Exception as error:  # noqa: BLE001 - the test decides
        return _rejected(message.properties.get(UID_PROPERTY, ""), error)
    if isinstance(returned, Spooled):
        return _spooled(returned)
    return _delivered(message.properties[UID_PROPERTY], returned)


def _delivered(uid: str, receipt: Any) -> dict[str, Any]:
    kind = f"{type(receipt).__module__}.{type(receipt).__qualname__}"
    return {"outcome": "delivered", "uid": uid, "receipt": kind, "message_id": receipt.message_id}


def _spooled(spooled: Spooled) -> dict[str, Any]:
    return {
        "outcome": "spooled",
        "uid": spooled.uid.hex(),
        "is_uncertain": spooled.is_uncertain,
        "reason": spooled.reason,
    }


def _rejected(uid: str, error: BaseException | None) -> dict[str, Any]:
    return {"outcome": "rejected", "uid": uid, "error": type(error).__name__, "reason": str(error)}


def _answer(number: int, call: Callable[[], Any]) -> None:
    try:
        say({"id": number, "ok": call()})
    except BaseException as error:  # noqa: BLE001 - the test decides, and waits for an answer
        say({"id": number, "error": repr(error)})


def main() -> None:
    """Serve until stdin ends; then leave like a process that is killed."""
    app = App(**json.loads(sys.argv[1]))
    say({"event": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        number, command = request.pop("id"), request.pop("do")
        if command == "send":
            app.send(number, **request)
        else:
            _answer(number, partial(getattr(app, command), **request))
    os._exit(0)


if __name__ == "__main__":
    main()
