"""Producers of ``broker_adapter``: the stored form of their sends, the verdicts on their errors, and their event loop.

The stored form is a JSON head and the unchanged body, joined by ``codecs.join``. The first attempt and every
repetition carry the same message id, derived from the uid if the message has none. They also carry the uid as the
property ``DMQ_UID``. Consumers and the audit detect a duplicate by the message id, applications by the uid.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from broker_adapter.contracts.errors import BrokerAway, BrokerError, BrokerUnavailable, Overloaded, Refused
from broker_adapter.contracts.message import BodyEncoding, Message
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.contracts.own_keys import own_key_of
from broker_adapter.runtime.clock import Clock
from retry.hook.producers.codecs import Arguments, Encoded, join, split
from retry.hook.producers.rocketmq import UID_PROPERTY
from retry.hook.verdicts import Permanent, Retry, Throttled, Unreadable, Verdict

THROTTLED_AFTER_S = 1.0

# Former modules of the producers: earlier builds used them in the names of kept calls.
PRODUCER_MODULES = ("broker_adapter.producer.producer", "broker_adapter.blocking")

_VERSION = 1
_TEXTS = ("topic", "message_id", "tag", "message_group", "born_host")
_NUMBERS = ("deliver_at_ms", "born_at_ms", "body_encoding")


def is_of_broker_adapter(producer: object) -> bool:
    """Return True if ``producer`` is a producer of ``broker_adapter``, blocking or not."""
    return any(
        kind.__module__.partition(".")[0] == "broker_adapter" and kind.__name__ in {"Producer", "BlockingProducer"}
        for kind in type(producer).__mro__
    )


def classify(error: BaseException) -> Verdict | None:
    """Return the verdict on an error of ``broker_adapter``, ``None`` for any other error.

    A producer makes several attempts and raises the error of the last one. The cause of that error is an attempt that
    may have succeeded, which makes the whole send uncertain. Missing permissions and topics are not properties of one
    message, so those errors are retried.
    """
    if not isinstance(error, BrokerError):
        return None
    text = f"{type(error).__name__}: {error}"
    verdict: Verdict
    if isinstance(error, Refused) and error.is_of_the_message:
        verdict = Permanent(text)
    elif isinstance(error, Overloaded):
        verdict = Throttled(text, after_s=THROTTLED_AFTER_S)
    else:
        verdict = Retry(text)
    verdict.is_uncertain = _is_in_doubt(error) or _is_in_doubt(error.__cause__)
    return verdict


def on_its_loop(producer: Any, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:  # noqa: ANN401
    """Return a ``send`` that any event loop may await: it runs on the loop on which the producer was started."""

    async def on_loop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - return type of send
        return await send(*args, **kwargs)

    async def repeat(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - types of send
        loop: asyncio.AbstractEventLoop | None = producer.loop
        if loop is None:
            raise Retry("the producer is not started")
        call = on_loop(args, kwargs)
        try:
            running = asyncio.run_coroutine_threadsafe(call, loop)
        except RuntimeError:
            call.close()
            raise Retry("the event loop of the producer is closed") from None
        return await asyncio.wrap_future(running)

    return repeat


class BrokerCodec:
    """Codec of ``send(message, delay_level=..., timeout_ms=...)``.

    A delay level counts from the first send, by the clock of the sink. A function that selects the queue cannot be
    kept: use a message group to keep messages in order.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def encode(self, uid: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
        message, how = _only_message(args, kwargs)
        now_ms = self._clock.now_ms()
        message = replace(
            message,
            message_id=message.message_id or new_message_id(now_ms, os.getpid(), uid[-10:]),
            born_at_ms=message.born_at_ms or now_ms,
            properties={**message.properties, UID_PROPERTY: uid.hex()},
        )
        head: dict[str, Any] = {"v": _VERSION}
        head |= {name: value for name in (*_TEXTS, *_NUMBERS) if (value := getattr(message, name))}
        head |= {"keys": list(message.keys), "properties": dict(message.properties)}
        head["how"] = {**how, "since_ms": now_ms} if how.get("delay_level") else how
        return Encoded(
            payload=join(head, message.body),
            key=message.message_group or own_key_of(message.properties),
            first=Arguments(args=(message,), kwargs=how),
        )

    def decode(self, uid: bytes, payload: bytes) -> Arguments:  # noqa: ARG002 - signature of Codec
        head, body = split(payload, _VERSION)
        try:
            fields = {name: head[name] for name in _TEXTS if name in head}
            fields |= {name: int(head[name]) for name in _NUMBERS if name in head}
            fields["body_encoding"] = BodyEncoding(fields.get("body_encoding", BodyEncoding.IDENTITY))
            message = Message(
                body=body, keys=tuple(map(str, head["keys"])), properties=dict(head["properties"]), **fields
            )
            return Arguments(args=(message,), kwargs={name: int(value) for name, value in head["how"].items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unreadable(f"a kept message cannot be read: {error!r:.200}") from error


def _only_message(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Message, dict[str, Any]]:
    given = dict(kwargs)
    message = args[0] if args else given.pop("message", None)
    if given.pop("choose", None) is not None:
        raise TypeError(
            "a function that chooses the queue cannot be kept: use a message_group, or send without the hook"
        )
    how = {name: value for name in ("delay_level", "timeout_ms") if (value := given.pop(name, None)) is not None}
    if not isinstance(message, Message) or len(args) > 1 or given:
        raise TypeError("durable() supports send(message, delay_level=..., timeout_ms=...) of this producer")
    if not message.topic or not message.body:
        raise ValueError("the message has no topic or no body")
    return message, how


def _is_in_doubt(error: BaseException | None) -> bool:
    return isinstance(error, BrokerUnavailable) and not isinstance(error, BrokerAway)
