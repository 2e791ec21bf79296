"""One line around an existing producer: messages that it cannot send are kept and sent later.

    producer = durable(Producer(...), Spool("var/spool"))
    producer.send(message)      # the receipt, or Spooled; raises only if the message is neither sent nor kept

Nothing is patched and no client is imported. A proxy wraps the producer and forwards every attribute except the one
method.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, Self

from retry.hook.producers import broker_producers, rocketmq
from retry.hook.producers.codecs import Arguments, Codec, Encoded, PlainCodec
from retry.hook.redelivery import Redelivery
from retry.hook.sending import Attempt, OutgoingMessage, is_async
from retry.hook.verdicts import Classifier
from retry.outcome import Delivered, Outcome, Rejected, SendRejected
from retry.policy import RetryPolicy
from retry.sink import DelaySink, SinkError

_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]+")
_PRODUCER_MODULES = {
    "rocketmq": rocketmq.PRODUCER_MODULES,
    "broker_adapter": broker_producers.PRODUCER_MODULES,
}


class DurableSend:
    """Calls ``send``, and keeps the call if it fails. Created by ``durable``."""

    def __init__(
        self,
        send: Callable[..., Any],
        redelivery: Redelivery,
        type_name: str,
        codec: Codec,
        key: Callable[..., str] | None,
        *,
        again: Callable[..., Any] | None = None,
    ) -> None:
        """Wrap ``send``; ``again``, if given, sends kept calls in its place."""
        self.redelivery = redelivery
        self.type_name = type_name
        self._send = send
        self._again = again or send
        self._codec = codec
        self._key = key
        update_wrapper(self, send, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - types of the producer
        """Return the producer's receipt, or ``Spooled``; otherwise raise the producer's error or ``SendRejected``."""
        outcome = self.redelivery.send_message(self.type_name, self._message(args, kwargs))
        return _result(outcome)

    def repeat(self, payload: bytes, attempt: Attempt) -> Any:  # noqa: ANN401 - return type of the producer
        """Send a kept call; this is the handler of the type."""
        arguments: Arguments = self._codec.decode(attempt.uid, payload)
        return self._again(*arguments.args, **arguments.kwargs)

    def _message(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutgoingMessage:
        # The uid comes first: the codec may write it into the message. Encoding precedes the first attempt, so a call
        # that cannot be kept fails during development and not in an outage.
        message = self.redelivery.message(b"", call=partial(self._send, *args, **kwargs))
        encoded: Encoded = self._codec.encode(message.uid, args, kwargs)
        key = encoded.key if self._key is None else self._key(*args, **kwargs)
        first = encoded.first
        call = message.call if first is None else partial(self._send, *first.args, **first.kwargs)
        return self.redelivery.message(encoded.payload, key, message.uid, call)


class DurableSendAsync(DurableSend):
    """``DurableSend`` for a coroutine function."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - types of the producer
        """Return the producer's receipt, or ``Spooled``; otherwise raise the producer's error or ``SendRejected``."""
        outcome = await self.redelivery.send_message_async(self.type_name, self._message(args, kwargs))
        return _result(outcome)

    async def repeat(self, payload: bytes, attempt: Attempt) -> Any:  # noqa: ANN401 - return type of the producer
        """Send a kept call; this is the handler of the type."""
        arguments = self._codec.decode(attempt.uid, payload)
        return await self._again(*arguments.args, **arguments.kwargs)


class DurableProducer:
    """Proxy of a producer. Only the wrapped method is its own; ``redelivery`` is its hook.

    As a context manager it first closes the hook, if ``durable`` created it, and then exits the producer's own context.
    """

    __slots__ = ("_method", "_owns", "_producer", "_send", "redelivery")

    def __init__(self, producer: Any, method: str, send: DurableSend, *, owns: bool) -> None:  # noqa: ANN401
        put = partial(object.__setattr__, self)
        put("_producer", producer)
        put("_method", method)
        put("_send", send)
        put("_owns", owns)
        put("redelivery", send.redelivery)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the producer
        return self._send if name == self._method else getattr(self._producer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._producer, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._producer), "redelivery"})

    def __repr__(self) -> str:
        return f"durable({self._producer!r})"

    def __enter__(self) -> Self:
        if isinstance(self._producer, AbstractContextManager):
            self._producer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._owns:
                self.redelivery.close()
        finally:
            if isinstance(self._producer, AbstractContextManager):
                self._producer.__exit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        if isinstance(self._producer, AbstractAsyncContextManager):
            await self._producer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._owns:
                await self.redelivery.__aexit__(kind, error, trace)
        finally:
            if isinstance(self._producer, AbstractAsyncContextManager):
                await self._producer.__aexit__(kind, error, trace)


def durable(
    producer: Any,  # noqa: ANN401 - any producer
    sink: DelaySink | Redelivery,
    *,
    codec: Codec | None = None,
    type_name: str | None = None,
    method: str = "send",
    key: Callable[..., str] | None = None,
    classify: Classifier | None = None,
    policy: RetryPolicy | None = None,
    earlier_names: Sequence[str] = (),
    **options: Any,  # noqa: ANN401 - options of Redelivery
) -> Any:  # noqa: ANN401 - proxy of the producer
    """Return a proxy of ``producer`` whose ``send`` keeps messages that it cannot send.

    ``producer`` may also be a function: ``send = durable(producer.send, sink)``. For a coroutine function the result is
    one too. Only ``method`` is protected; all other attributes are the producer's own. The method must raise if the
    message was not sent: a method that only queues in memory cannot be protected.

    ``codec`` turns the arguments into bytes. The default supports plain values, and the messages of the official
    RocketMQ client and of ``broker_adapter``. ``type_name`` names the calls in the sink, and must be the same in every
    run. The default consists of the package and class that the application imports, wherever the package defines the
    class. Two producers of one class on one sink need explicit names.

    Calls kept under ``earlier_names``, or under the default names of earlier builds, are sent too. ``key`` returns a
    message's key from the arguments. ``options`` are those of ``Redelivery``, allowed only if ``sink`` is not one.
    """
    has_method = hasattr(producer, method)
    if not has_method and not callable(producer):
        raise TypeError(f"{producer!r:.80} has no {method}(), and cannot be called itself")
    send = getattr(producer, method) if has_method else producer
    owner = producer if has_method else getattr(producer, "__self__", None)
    again = None
    if isinstance(sink, Redelivery) and options:
        raise TypeError(f"options of Redelivery ({', '.join(sorted(options))}) have no effect on one that exists")
    redelivery = sink if isinstance(sink, Redelivery) else Redelivery(sink, **options)
    if rocketmq.is_rocketmq(owner):
        codec = codec or rocketmq.RocketMqCodec()
        classify = classify or rocketmq.classify
        again = rocketmq.over_fresh_connections(owner, send)
    elif broker_producers.is_of_broker_adapter(owner):
        codec = codec or broker_producers.BrokerCodec(redelivery.clock)
        classify = classify or broker_producers.classify
        again = broker_producers.on_its_loop(owner, send) if is_async(send) else None
    names = _Names(send, owner, method if has_method else "")
    earlier = earlier_names if type_name else (*earlier_names, *names.earlier)
    name = type_name or names.default
    kind = DurableSendAsync if is_async(send) else DurableSend
    wrapped = kind(send, redelivery, name, codec or PlainCodec(), key, again=again)
    redelivery.add_handler(name, wrapped.repeat, classify=classify, policy=policy, earlier_names=earlier)
    if not has_method:
        return wrapped
    return DurableProducer(producer, method, wrapped, owns=redelivery is not sink)


class _Names:
    """Default names of calls in a sink: the current name, and the names that earlier builds used."""

    def __init__(self, send: Callable[..., Any], owner: object, method: str) -> None:
        named: Any = send if owner is None or inspect.ismodule(owner) else type(owner)
        name: str = getattr(named, "__qualname__", type(named).__qualname__)
        rest = () if named is send else (method or getattr(send, "__name__", "send"),)
        module = getattr(named, "__module__", "")
        package = module.partition(".")[0]
        modules: tuple[str, ...] = (module,)
        if package in _PRODUCER_MODULES:  # known packages need no search for the public path
            modules = (*_PRODUCER_MODULES[package], module)
            module = package
        self.default = _fitting(_public(named, module, name), name, *rest)
        self.earlier = [_fitting(each, name, *rest) for each in modules]


def _public(named: object, module: str, name: str) -> str:
    """Return the shortest path from which ``named`` can be imported: a package may move the definition without changing
    it.
    """
    parts = module.split(".")
    for end in range(1, len(parts)):
        place = sys.modules.get(".".join(parts[:end]))
        with suppress(Exception):  # a module's __getattr__ may raise any error
            if getattr(place, name, None) is named:
                return ".".join(parts[:end])
    return module


def _fitting(*parts: str) -> str:
    return _NO_NAME.sub("-", ".".join(parts)).strip("-")[-120:]


def _result(outcome: Outcome) -> Any:  # noqa: ANN401 - the receipt, or Spooled
    if isinstance(outcome, Delivered):
        return outcome.receipt
    if not isinstance(outcome, Rejected):
        return outcome
    error = outcome.error
    if error is None or isinstance(error, SinkError):  # no attempt was made
        raise SendRejected(outcome) from error
    error.add_note(outcome.reason)  # the application's `except` clauses match the producer's errors, not the hook's
    raise error
