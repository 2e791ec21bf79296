"""One stream: its state, its windows, and its buffered data."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dmq.http2.admission.bounds import Account
from dmq.http2.codec.headers import HeaderShape, RequestHeaders

if TYPE_CHECKING:
    from dmq.http2.connection.methods import Bidirectional, NotGrpc, Streaming, Unary

# News of a stream since it was last processed.
OPENED: Final = 1
ARRIVED: Final = 2  # bytes of the request
ENDED: Final = 4  # the whole request is here
GONE: Final = 8  # the peer or a fault ended it: no answer can arrive
DRAINED: Final = 16  # the pending data has been sent


class Stream:
    """One call on a connection.

    ``is_ended``: the peer's half has ended, so its request is complete. ``is_closed``: the stream is over and removed
    from the connection. ``receive_left`` is the peer's remaining window. ``granted`` is the sum of the peer's grants
    beyond its initial window, minus the bytes sent. Our window is ``granted`` plus ``Outbound.window``, so that
    SETTINGS changes no stream. Both may be negative.
    """

    __slots__ = (
        "account",
        "body",
        "body_left",
        "deadline_at_s",
        "encoding",
        "granted",
        "has_answered",
        "headers",
        "id",
        "is_closed",
        "is_ended",
        "list_bytes",
        "method",
        "news",
        "pending",
        "reader",
        "receive_left",
        "refusal",
        "request_max",
        "sent",
        "shape",
        "task",
        "trailers",
        "unread",
        "waits_since_s",
        "writer",
    )

    def __init__(
        self, stream_id: int, headers: RequestHeaders, shape: HeaderShape, account: Account, receive_left: int
    ) -> None:
        self.id = stream_id
        self.headers = headers
        self.shape = shape
        self.account = account  # counts its bytes
        self.body: bytes | bytearray = b""  # unread bytes of the request
        self.body_left = -1  # bytes left of the content-length; -1 without one
        self.unread = 0  # bytes of the request that count as held
        self.waits_since_s = 0.0  # first check at which it waited for the peer; 0: it does not wait
        self.news = 0
        self.is_ended = False
        self.is_closed = False
        self.has_answered = False  # the response's HEADERS are queued
        self.receive_left = receive_left
        self.granted = 0
        self.list_bytes = 0  # size of the stream and its headers in the account of lists
        self.pending = b""  # the message that is being sent, with its prefix
        self.sent = 0  # sent bytes of pending
        self.trailers: bytes | None = None  # the header block that ends the stream after pending
        self.deadline_at_s: float | None = None
        # State of the call layer. A stream without a task has not called its handler yet, or its answer is a Deferred.
        self.method: Unary | Streaming | Bidirectional | None = None
        self.refusal: NotGrpc | None = None  # the answer to a request that is not gRPC, sent once it is complete
        self.encoding = ""
        self.request_max = 0  # bytes of a message
        self.task: asyncio.Task[None] | None = None
        self.reader: asyncio.Future[None] | None = None  # waits for ARRIVED or ENDED
        self.writer: asyncio.Future[None] | None = None  # waits for DRAINED
