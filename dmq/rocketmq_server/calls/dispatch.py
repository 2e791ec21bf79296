"""The layer between a transport and the service: converts bytes to messages and back, and errors to statuses.

A refused call is a *successful* call with the reason in its ``status``. Only Telemetry ends with a transport status. No
request can make an exception leave this module, and no internal detail appears in an answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import structlog
from google.protobuf.message import DecodeError, Message

from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.errors import (
    BrokerAway,
    BrokerError,
    BrokerUnavailable,
    CallGivenUp,
    Overloaded,
    Refused,
    Rule,
)
from broker_adapter.contracts.limits import MESSAGES_PER_SEND_MAX
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp
from dmq.rocketmq_server.calls.call import CLIENT_ID_HEADER, Call
from dmq.rocketmq_server.calls.methods import METHODS
from dmq.rocketmq_server.codec.codes import status_of
from dmq.rocketmq_server.codec.elements import ELEMENTS_MAX, PACKED_BYTES, SEND_ELEMENTS_MAX, check_elements, shape_of

CLIENT_ID_CHARS_MAX = 512
_COMMAND = shape_of(wire.TelemetryCommand)
_ACCESS_CODES = {Rule.UNAUTHORIZED: "UNAUTHENTICATED", Rule.FORBIDDEN: "PERMISSION_DENIED"}

UnaryHandler = Callable[[bytes, Call], Awaitable[bytes]]  # a ``Deferred`` if the service returns one
StreamHandler = Callable[[bytes, Call], AsyncGenerator[list[bytes], None]]  # one list is sent at once
TelemetryHandler = Callable[[AsyncIterator[bytes], Call], AsyncGenerator[bytes, None]]

log = structlog.get_logger("dmq.rocketmq_server")


class Observer(Protocol):
    """A receiver of one notification per finished call.

    ``code`` is the protocol's. The event loop calls it, so it must be quick.
    """

    def call_done(self, rpc: str, code: int, seconds: float) -> None:
        """Count one call."""
        ...


class Served(Protocol):
    """The target of the dispatcher: handlers of unary RPCs, of streaming RPCs, and of the telemetry stream."""

    @property
    def unary(self) -> Mapping[str, Callable[[Any, Call], Awaitable[Any]]]:
        """Handlers of unary RPCs by name; a missing one is answered 50100."""
        ...

    @property
    def streaming(self) -> Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]]:
        """Handlers of streaming RPCs by name; each yields the pieces of an answer as lists of messages."""
        ...

    def telemetry(
        self, requests: AsyncIterator[wire.TelemetryCommand], call: Call
    ) -> AsyncGenerator[wire.TelemetryCommand, None]:
        """Serve one telemetry stream."""
        ...


class Logged(Exception):
    """A call failed by an internal fault, and the cause is already in the log."""


class StreamEnded(Exception):
    """Telemetry ends with a transport status; ``code`` is a gRPC name such as INVALID_ARGUMENT."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Dispatcher:
    """Factory of one handler of bytes per RPC. Cancelling a handler cancels the operation that it awaits."""

    def __init__(self, service: Served, *, clock: Clock, observer: Observer | None = None) -> None:
        self._service = service
        self._clock = clock
        self._observer = observer

    def uncounted(self) -> Dispatcher:
        """Return a dispatcher without an observer, for relayed calls: the process that relays them counts them."""
        return Dispatcher(self._service, clock=self._clock)

    def unary(self, rpc: str) -> UnaryHandler:
        """Return the handler of an RPC with a single answer."""
        method = METHODS[rpc]
        request_class, response_class = method.request_class, method.response_class
        parse, shape = request_class.FromString, shape_of(request_class)
        is_send = rpc == "SendMessage"
        bounds = (SEND_ELEMENTS_MAX, MESSAGES_PER_SEND_MAX) if is_send else (ELEMENTS_MAX, ELEMENTS_MAX)
        # Python and Java store the handle of any answer, also of an error: a refusal repeats the old one.
        echoes_handle = "receipt_handle" in response_class.DESCRIPTOR.fields_by_name
        serve = self._service.unary.get(rpc, _unserved)
        may_be_nobody = rpc == "Heartbeat"  # the Go client 5.1 probes health by an empty one, without headers
        observer, monotonic_s = self._observer, self._clock.monotonic_s

        def handle(body: bytes, call: Call) -> Awaitable[bytes]:
            started_s = monotonic_s()
            request: Any = None
            try:
                _check_call(call, may_be_nobody=may_be_nobody and not body)
                if len(body) > PACKED_BYTES:
                    check_elements(body, shape, call.packed_bytes, *bounds)
                request = parse(body)
                answer = serve(request, call)
            except Exception as error:  # noqa: BLE001 - each is answered, and logged if it is ours
                return Deferred.given(done(refusal(error, request, call), started_s))
            if not isinstance(answer, Deferred):
                return waited(answer, request, call, started_s)

            def answered(answer: Deferred[Any]) -> bytes:
                return done(answer.value if answer.error is None else refusal(answer.error, request, call), started_s)

            return answer.convert(answered)

        async def waited(answer: Awaitable[Any], request: object, call: Call, started_s: float) -> bytes:
            try:
                response = await answer
            except Exception as error:  # noqa: BLE001 - as above
                response = refusal(error, request, call)
            return done(response, started_s)

        def refusal(error: Exception, request: Any, call: Call) -> Any:  # noqa: ANN401 - one class per RPC
            response: Any = response_class(status=_answer_to(error, rpc, call))
            if echoes_handle and request is not None:
                response.receipt_handle = request.receipt_handle
            return response

        def done(response: Any, started_s: float) -> bytes:  # noqa: ANN401 - as above
            if observer is not None:
                observer.call_done(rpc, response.status.code, monotonic_s() - started_s)
            answer: bytes = response.SerializeToString()
            return answer

        return handle

    def streaming(self, rpc: str) -> StreamHandler:
        """Return the handler of an RPC with a stream of answers."""
        method = METHODS[rpc]
        parse, response_class = method.request_class.FromString, method.response_class
        serve, shape = self._service.streaming.get(rpc), shape_of(method.request_class)

        async def handle(body: bytes, call: Call) -> AsyncGenerator[list[bytes], None]:
            started_s = self._clock.monotonic_s()
            code = 0
            refusal: wire.Status | None = None
            try:
                _check_call(call)
                if len(body) > PACKED_BYTES:
                    check_elements(body, shape, call.packed_bytes, ELEMENTS_MAX)
                request: Any = parse(body)
                if serve is None:
                    raise _not_served()
                for frames in await serve(request, call):
                    code = code or frames[0].status.code
                    yield _encoded(frames)
            except Exception as error:  # noqa: BLE001 - as above
                refusal = _answer_to(error, rpc, call)
            if refusal is not None:  # after the except block: the error's traceback keeps the messages that were read
                code = refusal.code
                yield _encoded(self._refusal_frames(response_class, refusal))
            self._observe(rpc, code, started_s)

        return handle

    def telemetry(self) -> TelemetryHandler:
        """Return the handler of the telemetry stream; it raises ``StreamEnded`` if the stream ends with an error."""

        async def handle(bodies: AsyncIterator[bytes], call: Call) -> AsyncGenerator[bytes, None]:
            started_s = self._clock.monotonic_s()
            code: int = wire.OK
            try:
                _check_call(call)
                async with aclosing(self._service.telemetry(_parsed(bodies), call)) as frames:
                    async for frame in frames:
                        yield frame.SerializeToString()
            except Exception as error:
                status = _answer_to(error, "Telemetry", call)
                code = status.code
                if call.language != "RUST":  # a failure after a frame makes it reconnect without a pause
                    yield wire.TelemetryCommand(status=status).SerializeToString()
                raise StreamEnded(_transport_code(error), f"{int(status.code)} {status.message}") from error
            finally:
                self._observe("Telemetry", code, started_s)

        return handle

    def _refusal_frames(self, response_class: type[Message], status: wire.Status) -> list[Message]:
        frames: list[Message] = [response_class(status=status)]
        if response_class is wire.ReceiveMessageResponse:
            # The Python client drops the whole answer if this last frame is missing.
            last = wire.ReceiveMessageResponse()
            set_timestamp(last.delivery_timestamp, self._clock.now_ms())
            frames.append(last)
        return frames

    def _observe(self, rpc: str, code: int, started_s: float) -> None:
        if self._observer is not None:
            self._observer.call_done(rpc, code, self._clock.monotonic_s() - started_s)


def _check_call(call: Call, *, may_be_nobody: bool = False) -> None:
    admission, client_id = call.admission, call.client_id
    if admission is not None and admission.refusal is not None:
        raise admission.refusal
    if not client_id and not may_be_nobody:
        raise Refused(Rule.CLIENT_ID, f"client id cannot be empty: the metadata entry {CLIENT_ID_HEADER} is missing")
    if len(client_id) > CLIENT_ID_CHARS_MAX:
        limit = f"{CLIENT_ID_CHARS_MAX} characters"
        raise Refused(Rule.CLIENT_ID, f"{CLIENT_ID_HEADER} is too long", value=client_id, limit=limit)


def _encoded(frames: list[Any]) -> list[bytes]:
    """Encode a piece of an answer and clear the list, so that only the bytes stay in memory until the client reads
    them.
    """
    encoded = [frame.SerializeToString() for frame in frames]
    frames.clear()
    return encoded


async def _unserved(request: Message, call: Call) -> Message:  # noqa: ARG001
    raise _not_served()


def _not_served() -> Refused:
    return Refused(Rule.UNSUPPORTED, "this call is not served yet")


async def _parsed(bodies: AsyncIterator[bytes]) -> AsyncIterator[wire.TelemetryCommand]:
    async for body in bodies:
        if len(body) > PACKED_BYTES:
            check_elements(body, _COMMAND, 0, ELEMENTS_MAX)
        yield wire.TelemetryCommand.FromString(body)


def _answer_to(error: Exception, rpc: str, call: Call) -> wire.Status:
    """Return the status that answers ``error``; log errors that the client did not cause."""
    if isinstance(error, DecodeError):
        error = Refused(Rule.REQUEST, f"the bytes are not a valid {METHODS[rpc].request_class.__name__}")
    elif isinstance(error, BrokerAway | CallGivenUp):
        log.debug("call_not_served", rpc=rpc, client_id=call.client_id, error=str(error))
    elif isinstance(error, BrokerUnavailable):
        log.error("broker_unavailable", rpc=rpc, client_id=call.client_id, error=str(error))
    elif not isinstance(error, BrokerError | Logged):
        log.error("call_failed", rpc=rpc, client_id=call.client_id, exc_info=error)
    return status_of(error, call.language)


def _transport_code(error: Exception) -> str:
    if isinstance(error, Refused) and error.rule in _ACCESS_CODES:
        return _ACCESS_CODES[error.rule]
    if isinstance(error, Refused | DecodeError):
        return "INVALID_ARGUMENT"
    if isinstance(error, Overloaded):
        return "RESOURCE_EXHAUSTED"
    if isinstance(error, BrokerUnavailable):
        return "UNAVAILABLE"
    return "INTERNAL"
