"""Calls to a daemon with callbacks for their answers, and the thread that runs the callbacks.

No call waits for an unavailable daemon: it fails at once or at its deadline. The channel reconnects on its own.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.failure_reports import REFUSED_S, REPORT, TIMEOUT_S, report_of
from broker_adapter.wire.signature import Signer
from dmq.client.admin import open_channel, told_of_tls
from dmq.config.contexts import ClientTls
from retry.sink import SinkError, SinkFull, SinkUnavailable

log = structlog.get_logger("dmq.client")

_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_CLOSE_S = 2.0
_clock = SystemClock()

Told = Callable[[Any, SinkError | None], None]  # the answer, or the error


class HoldLost(SinkError):
    """The receipt handle is no longer valid: the message is finished, or another consumer now holds it."""


class DaemonCalls:
    """One connection. ``told`` callbacks run one after another in their own thread, and must not block."""

    def __init__(
        self, address: str, *, timeout_s: float, signer: Signer | None = None, tls: ClientTls | None = None
    ) -> None:
        self.address = address
        self.tls = tls
        self.timeout_s = timeout_s
        self.signer = signer
        self._channel = open_channel(address, tls, _OPTIONS)
        self._own_metadata = (
            ("x-mq-client-id", f"{socket.gethostname()}@{os.getpid()}@redelivery-{secrets.token_hex(4)}"),
            ("x-mq-language", "PYTHON"),
            ("x-mq-protocol", "v2"),
            ("x-mq-client-version", "5.0.0"),
        )
        self._calls = {
            name: self._channel.unary_unary(
                method.path,
                request_serializer=method.request_class.SerializeToString,
                response_deserializer=method.response_class.FromString,
            )
            for name, method in wire.METHODS.items()
            if not method.client_streaming and not method.server_streaming
        }
        self._report = self._channel.unary_unary(
            REPORT.path,
            request_serializer=REPORT.request_class.SerializeToString,
            response_deserializer=REPORT.response_class.FromString,
        )
        self._reports_again_s = 0.0  # monotonic time of the next report to a daemon that does not store reasons
        receive = wire.METHODS["ReceiveMessage"]
        self._receive = self._channel.unary_stream(
            receive.path,
            request_serializer=receive.request_class.SerializeToString,
            response_deserializer=wire.ReceiveMessageResponse.FromString,
        )
        self._changed = threading.Condition()
        self._in_flight = 0
        self._is_closing = False
        self._is_over = False
        self._polls: set[Any] = set()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="dmq-sidecar-teller", daemon=True)
        self._teller.start()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._own_metadata if self.signer is None else (*self._own_metadata, *self.signer.metadata())

    def ask(self, rpc: str, request: Message, told: Told) -> None:
        """Start a call and return; ``told`` is called exactly once, also after an error.

        It runs in the callback thread, or at once in the caller's if the connection is closed.
        """
        with self._changed:
            is_over = self._is_over
            self._in_flight += not is_over
        if is_over:
            told(None, SinkUnavailable(f"the connection to {self.address} is closed"))
            return
        try:
            call = self._calls[rpc].future(request, timeout=self.timeout_s, metadata=self._metadata)
        except (ValueError, grpc.RpcError) as error:  # a channel that is closed
            failure = SinkUnavailable(f"the connection to {self.address} is closed: {error}")
            self._queue.put(lambda: self._answer(told, None, failure))
            return
        call.add_done_callback(lambda done: self._queue.put(lambda: self._settle(done, told)))

    def report(self, group: str, receipt_handle: str, error: str) -> None:
        """Report the reason of a failure ahead of the failure itself on this connection; the answer is not awaited."""
        if not error or self._is_over or _clock.monotonic_s() < self._reports_again_s:
            return

        def told(done: Any) -> None:  # noqa: ANN401 - grpc.Future has no useful type
            try:
                is_refused = done.result().status.code == wire.NOT_IMPLEMENTED
            except (grpc.RpcError, grpc.FutureCancelledError):
                is_refused = done.code() is grpc.StatusCode.UNIMPLEMENTED
            if is_refused:
                self._reports_again_s = _clock.monotonic_s() + REFUSED_S

        with suppress(ValueError, grpc.RpcError):  # a channel that is closed
            request = report_of(group, receipt_handle, error)
            self._report.future(request, timeout=TIMEOUT_S, metadata=self._metadata).add_done_callback(told)

    def ask_now(self, rpc: str, request: Message) -> Any:  # noqa: ANN401 - one class of answers per RPC
        """Make a call and return its answer, or raise its error."""
        try:
            answer = self._calls[rpc](request, timeout=self.timeout_s, metadata=self._metadata)
        except (ValueError, grpc.RpcError) as error:
            raise self._unavailable(error) from None
        check(answer)
        return answer

    def poll(self, request: wire.ReceiveMessageRequest, wait_s: float) -> Iterator[wire.ReceiveMessageResponse]:
        """Make a long poll and yield its frames as they arrive; ``end_polls`` ends it early."""
        with self._changed:
            if self._is_closing:
                return
            call = self._receive(request, timeout=wait_s + self.timeout_s, metadata=self._metadata)
            self._polls.add(call)
        try:
            yield from call
        except (ValueError, grpc.RpcError) as error:
            if not self._is_closing:
                raise self._unavailable(error) from None
        finally:
            call.cancel()
            with self._changed:
                self._polls.discard(call)

    def end_polls(self) -> None:
        """End all long polls now; later ones return at once."""
        with self._changed:
            self._is_closing = True
            polls = list(self._polls)
        for call in polls:
            call.cancel()

    def close(self) -> None:
        """Wait for calls in flight, up to their deadline, and close the connection."""
        self.end_polls()
        self._drain(self.timeout_s)
        self._channel.close()  # cancels the calls in flight; their callbacks get an error
        self._drain(_CLOSE_S)
        with self._changed:
            self._is_over = True
        self._queue.put(None)
        if threading.current_thread() is not self._teller:
            self._teller.join(_CLOSE_S)

    def _drain(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._teller:
            with self._changed:
                self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def _tell(self) -> None:
        while not self._is_over or self._in_flight or not self._queue.empty():
            work = self._queue.get()
            if work is None:
                continue
            try:
                work()
            except Exception:  # no error may end the thread, or no callback runs any more
                log.exception("answer_callback_failed")

    def _settle(self, done: Any, told: Told) -> None:  # noqa: ANN401 - grpc.Future has no useful type
        try:
            answer = done.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._answer(told, None, self._unavailable(error))
            return
        self._answer(told, answer, failure_of(answer))

    def _answer(self, told: Told, answer: Any, failure: SinkError | None) -> None:  # noqa: ANN401 - as above
        try:
            told(answer, failure)
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def _unavailable(self, error: Exception) -> SinkError:
        if isinstance(error, grpc.Call):
            code, details = error.code(), " ".join((error.details() or "").split())
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return SinkUnavailable(f"no answer from the daemon at {self.address} in time")
            told = told_of_tls(self.address, self.tls, details) if code is grpc.StatusCode.UNAVAILABLE else ""
            said = f"the daemon at {self.address} is unavailable: {details} ({code.name.lower()})"
            return SinkUnavailable(told or said)
        return SinkUnavailable(f"the call to {self.address} was given up: {type(error).__name__} {error}")


def failure_of(answer: Any) -> SinkError | None:  # noqa: ANN401 - one class of answers per RPC
    """Return the error in an answer of the public protocol; ``None`` if it succeeded."""
    status: wire.Status = answer.status
    code = int(status.code)
    if code in {wire.OK, wire.MESSAGE_NOT_FOUND}:
        return None
    text = f"the daemon answered {code}: {status.message}"
    if 42900 <= code < 43000:
        return SinkFull(text, limit="daemon")
    if 41300 <= code < 41400:
        return SinkFull(text, limit="body_bytes_max")
    if code == wire.INVALID_RECEIPT_HANDLE:
        return HoldLost(text)
    return SinkUnavailable(text) if code >= 50000 else SinkError(text)


def check(answer: Any) -> None:  # noqa: ANN401 - one class of answers per RPC
    """Raise the error in an answer, if there is one."""
    failure = failure_of(answer)
    if failure is not None:
        raise failure
