"""Admin client of the command line: synchronous, one deadline per call, errors as sentences."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as public
from broker_adapter.wire.pool import Method, option
from broker_adapter.wire.signature import Signer
from dmq.admin import admin_v1 as wire
from dmq.admin.client.channel import open_channel, told_of_tls
from dmq.admin.requests.validate import CLIENT_MS_MAX, WHY_HEADER
from dmq.config.contexts import ClientTls, target_of
from dmq.errors import DmqError

_ON_THE_WAY_S = 2.0  # to the daemon and back, in addition to the time of the client that it queries

_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # A web proxy cannot reach a daemon on this host or in this cluster.
    ("grpc.enable_http_proxy", 0),
)


class DaemonUnavailable(DmqError):
    """No daemon answered; the outcome of the call is unknown."""

    retriable = True


class ClientUnresponsive(DaemonUnavailable):
    """A client did not answer the daemon in time."""


class CallRefused(DmqError):
    """The daemon refused the call as invalid; nothing was done."""


class NotFound(CallRefused):
    """The named object does not exist; nothing was done."""


class NotAllowed(CallRefused):
    """The daemon requires an access key, or another one; nothing was done."""


class CallFailed(DmqError):
    """The call failed in the daemon."""


class AdminClient(wire.AdminCalls):
    """Connection to one daemon; opened by the first call, closed by ``close`` or at the end of a ``with``.

    Each RPC of ``admin_v1.proto`` is a method, with the fields of its request as arguments; absent ones leave a setting
    unchanged. A response of one field is that field. Raise ``NotFound``, ``CallRefused``, ``NotAllowed``,
    ``DaemonUnavailable`` or ``CallFailed``.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        signer: Signer | None = None,
        tls: ClientTls | None = None,
        why: str = "",
    ) -> None:
        """``signer`` is for daemons that require access keys; ``why`` is recorded with each change.

        Raise ``ContextError`` if a file of ``tls`` cannot be used.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._signer = signer
        self._tls = tls
        self._why = ((WHY_HEADER, quote(why)),) if why else ()
        self._channel = open_channel(address, tls, _OPTIONS)

    @classmethod
    def from_context(cls, name: str = "", *, timeout_s: float = 5.0, why: str = "") -> Self:
        """Return a client of the daemon of a context of ``dmq context add``. Raise ``ContextError`` if there is none.

        The default name is ``DMQ_CONTEXT``, or else the current context.
        """
        target = target_of(name)
        signer = Signer(target.access_key, target.secret, SystemClock()) if target.access_key else None
        return cls(target.address, timeout_s=timeout_s, signer=signer, tls=target.tls, why=why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def now_ms(self) -> int:
        """Return the daemon's time, or that of this host if the key may not read the status of the daemon."""
        try:
            return self.status().now_ms
        except NotAllowed:
            return SystemClock().now_ms()

    def topics(self) -> list[wire.Topic]:
        """Return all topics, by name, page by page."""
        found, request = list[wire.Topic](), wire.ListTopicsRequest()
        while True:
            page = self.list_topics(request)
            found += page.topics
            request.token = page.next_token
            if not page.next_token:
                return found

    def cancel(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Cancel up to 1000 pending delayed messages. Raise ``NotFound`` if the topic is unknown.

        A message that is ``DONE`` is never delivered; this is durable. All others are unchanged: ``TOO_LATE``,
        ``CANCELLED`` or ``REPLACED`` before, or ``UNKNOWN``. The call may be repeated with the same answers. An own key
        selects the message that is pending under it at the time of the change. If there is none, the answer names the
        last holder of the key and its end. It is ``UNKNOWN`` without an id if no holder is recorded.
        """
        return self.change_messages(topic, message_ids, recall_handles, cancel=True, own_keys=own_keys)

    def reschedule(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        deliver_at_ms: int,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Set the delivery time of up to 1000 delayed messages, in epoch milliseconds; a past time means now.

        Same contract as ``cancel``; recall handles stay valid. Raise ``CallRefused`` if the time exceeds the longest
        delay.
        """
        return self.change_messages(topic, message_ids, recall_handles, deliver_at_ms=deliver_at_ms, own_keys=own_keys)

    def fire(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Deliver up to 1000 delayed messages now. Same contract as ``reschedule``."""
        return self.change_messages(topic, message_ids, recall_handles, fire=True, own_keys=own_keys)

    def groups(self, *, with_removed: bool = False) -> list[wire.Group]:
        """Return the consumer groups without their histograms, page by page; on request also removed groups that still
        have dead letters.
        """
        found, request = list[wire.Group](), wire.ListGroupsRequest(with_removed=with_removed)
        while True:
            page = self.list_groups(request)
            found += page.groups
            request.token = page.next_token
            if not page.next_token:
                return found

    def retries(self, group: str, *, topic: str = "", token: str = "", limit: int = 1000) -> wire.ListRetriesResponse:
        """Return a page of the pending retries."""
        return self.list_retries(group, topic, token, limit)

    def dead_letters(
        self,
        group: str,
        chosen: wire.DeadFilter,
        *,
        offset: int = 0,
        limit: int = 1000,
        with_outcome: bool = False,
        with_body: bool = False,
        unmasked: bool = False,
    ) -> wire.ListDeadLettersResponse:
        """Return a page of the dead letters."""
        return self.list_dead_letters(group, chosen, offset, limit, with_outcome, with_body, unmasked)

    def client_stack(self, client_id: str) -> str:
        """Return the thread stacks of a client. Raise ``NotFound`` or ``ClientUnresponsive``."""
        return self.get_client_stack(client_id, self._client_ms)

    def verify(self, client_id: str, topic: str, message_id: str) -> wire.VerifyClientMessageResponse:
        """Make a push consumer consume a message once. Raise ``NotFound`` or ``ClientUnresponsive``."""
        return self.verify_client_message(client_id, topic, message_id, self._client_ms)

    @property
    def _client_ms(self) -> int:
        """Longest time for the answer of a client, in ms."""
        return max(1, min(int(self._timeout_s * 1000), CLIENT_MS_MAX))

    def send(self, message: public.Message) -> public.SendMessageResponse:
        """Send through the public protocol, like any client. A refusal is in the status of the response."""
        response: public.SendMessageResponse = self._call(
            public.METHODS["SendMessage"], public.SendMessageRequest(messages=[message])
        )
        return response

    def recall(self, topic: str, handle: str) -> public.RecallMessageResponse:
        """Recall a message through the public protocol, like any client. A refusal is in the status of the response."""
        response: public.RecallMessageResponse = self._call(
            public.METHODS["RecallMessage"],
            public.RecallMessageRequest(topic=public.Resource(name=topic), recall_handle=handle),
        )
        return response

    def schedules(self, *, topic: str = "", token: str = "", limit: int = 1000) -> wire.ListSchedulesResponse:
        """Return a page of schedules, by name."""
        return self.list_schedules(topic, token, limit)

    def activity(
        self, *, since_ms: int = 0, key: str = "", before: int = 0, limit: int = 1000
    ) -> wire.ListActivityResponse:
        """Return a page of the operators' changes, newest first."""
        return self.list_activity(since_ms, key, before, limit)

    def _deadline_s(self, method: Method, request: Message) -> float:
        least_s: float = option(method, wire.timeout_s) if getattr(request, "is_dry_run", True) else 0
        on_the_way_s = _ON_THE_WAY_S if hasattr(request, "timeout_ms") else 0
        return max(self._timeout_s, least_s) + on_the_way_s

    def _call(self, method: Method, request: Message) -> Any:  # noqa: ANN401 - the response of the method
        timeout_s = self._deadline_s(method, request)
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request_class.SerializeToString,
            response_deserializer=method.response_class.FromString,
        )
        try:
            signed = self._signer.metadata() if self._signer is not None else ()
            return call(request, timeout=timeout_s, metadata=(*_metadata(), *signed, *self._why))
        except grpc.RpcError as error:
            # its text is ten lines of debug output
            raise self._told(error.code(), error.details() or "", timeout_s) from None

    def _told(self, code: grpc.StatusCode, text: str, timeout_s: float) -> DmqError:
        details = " ".join(text.split())
        match code:
            case grpc.StatusCode.UNAVAILABLE if "onnection refused" in details or not details:
                return DaemonUnavailable(f"no daemon answers at {self._address}; is `dmq serve` running?")
            case grpc.StatusCode.UNAVAILABLE:
                told = told_of_tls(self._address, self._tls, details)
                return DaemonUnavailable(told or f"the daemon at {self._address} is unavailable: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DaemonUnavailable(f"no answer from {self._address} within {timeout_s:g} s")
            case grpc.StatusCode.UNIMPLEMENTED:
                return CallFailed(f"the server at {self._address} is not a Rock-DMQ daemon, or has another version")
            case grpc.StatusCode.INVALID_ARGUMENT:
                return CallRefused(details)
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return NotAllowed(details)
            case grpc.StatusCode.NOT_FOUND:
                return NotFound(details)
            case grpc.StatusCode.ABORTED:
                return ClientUnresponsive(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return DaemonUnavailable(details)
            case _:
                return CallFailed(f"{details or 'the call failed'} ({code.name.lower()})")


def _metadata() -> tuple[tuple[str, str], ...]:
    # The public protocol rejects calls without these.
    client_id = f"{socket.gethostname()}@{os.getpid()}@dmq-{secrets.token_hex(4)}"
    return (
        ("x-mq-client-id", client_id),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-client-version", "5.0.0"),
    )
