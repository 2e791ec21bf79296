"""The client RPCs as methods of ``dmq.http2``, for every process that serves them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace

from broker_adapter.contracts.errors import Refused, Rule
from dmq.acl.quotas import QuotaBounds
from dmq.http2 import SHARES, Bidirectional, CallEnded, Limits, Method, RequestHeaders, Status, Streaming, Unary
from dmq.rocketmq_server.calls.call import CLIENT_ID_HEADER, Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher, StreamEnded, StreamHandler, TelemetryHandler, UnaryHandler
from dmq.rocketmq_server.calls.methods import METHODS

# RPCs called for each message or each few messages. Clients call the others at start and then every few seconds.
_FREQUENT = frozenset(
    {
        "SendMessage",
        "ReceiveMessage",
        "PullMessage",
        "AckMessage",
        "ChangeInvisibleDuration",
        "ForwardMessageToDeadLetterQueue",
        "ReportFailure",
        "EndTransaction",
        "RecallMessage",
        "GetOffset",
        "UpdateOffset",
    }
)


def with_bounds(limits: Limits, bounds: QuotaBounds, share: int = 1) -> Limits:
    """Return ``limits`` with the bounds on held bytes of all connections, divided by ``share``, the number of equal
    parts.

    Each connection belongs to one part. It may hold there as many bytes as in the undivided server, as far as there is
    room.
    """
    held, reserve = bounds.bytes_held // share, bounds.bytes_reserve // share
    return replace(
        limits,
        held_in_all=held,
        held_per_connection=min(bounds.bytes_held // SHARES, held - reserve),
        held_reserve=reserve,
    )


def messaging(dispatcher: Dispatcher, rpcs: Iterable[str] = METHODS) -> dict[str, Method]:
    """Return the methods of ``rpcs`` by path."""
    found: dict[str, Method] = {}
    for name in rpcs:
        method = METHODS[name]
        if method.client_streaming:
            found[method.path] = Bidirectional(_telemetry(dispatcher.telemetry()))
        elif method.server_streaming:
            found[method.path] = Streaming(_streaming(dispatcher.streaming(name)), is_frequent=name in _FREQUENT)
        else:
            found[method.path] = Unary(_unary(dispatcher.unary(name)), is_frequent=name in _FREQUENT)
    return found


def _unary(handle: UnaryHandler) -> Callable[[bytes, RequestHeaders], Awaitable[bytes]]:
    def serve(body: bytes, headers: RequestHeaders) -> Awaitable[bytes]:
        client_id = headers.get(CLIENT_ID_HEADER) or ""
        return handle(body, Call(client_id=client_id, headers=headers, admission=headers.admission))

    return serve


def _streaming(handle: StreamHandler) -> Callable[[bytes, RequestHeaders], AsyncGenerator[list[bytes], None]]:
    def serve(body: bytes, headers: RequestHeaders) -> AsyncGenerator[list[bytes], None]:
        return handle(body, _waiting_call(headers))

    return serve


def _telemetry(
    handle: TelemetryHandler,
) -> Callable[[AsyncIterator[bytes], RequestHeaders], AsyncGenerator[bytes, None]]:
    async def serve(bodies: AsyncIterator[bytes], headers: RequestHeaders) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(handle(_whole(bodies), _waiting_call(headers))) as frames:
                async for frame in frames:
                    yield frame
        except StreamEnded as end:
            raise CallEnded(Status[end.code], end.text) from end

    return serve


async def _whole(bodies: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Convert a malformed message of a stream to a refusal of the protocol."""
    try:
        async for body in bodies:
            yield body
    except CallEnded as end:
        raise Refused(Rule.REQUEST, end.text) from end


def _waiting_call(headers: RequestHeaders) -> Call:
    return Call(
        client_id=headers.get(CLIENT_ID_HEADER) or "",
        headers=headers,
        admission=headers.admission,
        deadline_s=headers.deadline_s,
        peer=headers.peer,
        account=headers.account,
    )
