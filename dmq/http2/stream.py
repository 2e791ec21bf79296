"""One stream: its state, its windows, and what waits in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dmq.http2.bounds import Account
from dmq.http2.headers import RequestHeaders, Shape

if TYPE_CHECKING:
    from dmq.http2.methods import Bidirectional, NotGrpc, Streaming, Unary

# What happened to a stream since it was last looked at.
OPENED: Final = 1
ARRIVED: Final = 2  # bytes of the request
ENDED: Final = 4  # the whole request is here
GONE: Final = 8  # the peer or a fault ended it: nothing that is sent will arrive
DRAINED: Final = 16  # what waited to be sent has been sent


class Stream:
    """One call on a connection.

    The peer's half is ``is_ended`` when its request is whole. ``is_closed``: over, and unknown to the connection.
    ``receive_left`` is the window of the peer. ``granted`` is what the peer has granted beyond its initial window,
    less what was sent: our window is this and ``Outbound.window``, so that SETTINGS touch no stream. Either may be
    negative.
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
        self, stream_id: int, headers: RequestHeaders, shape: Shape, account: Account, receive_left: int
    ) -> None:
        self.id = stream_id
        self.headers = headers
        self.shape = shape
        self.account = account  # where its bytes count
        self.body: bytes | bytearray = b""  # of the request, not taken yet
        self.body_left = -1  # what the content-length leaves; -1 without one
        self.unread = 0  # bytes of the request that count as held
        self.waits_since_s = 0.0  # when the peer was first seen to owe us bytes, or to take bytes; 0: it was not
        self.news = 0
        self.is_ended = False
        self.is_closed = False
        self.has_answered = False  # the response's HEADERS are out
        self.receive_left = receive_left
        self.granted = 0
        self.list_bytes = 0  # what the stream and its headers count in the account of lists
        self.pending = b""  # the message that is being sent, with its prefix
        self.sent = 0  # of pending
        self.trailers: bytes | None = None  # what ends the stream behind it
        self.deadline_at_s: float | None = None
        # Of those who serve it. A stream without its task is one whose handler was not called yet.
        self.method: Unary | Streaming | Bidirectional | None = None
        self.refusal: NotGrpc | None = None  # the answer to a request that is no gRPC, once it is whole
        self.encoding = ""
        self.request_max = 0  # bytes of a message
        self.task: asyncio.Task[None] | None = None
        self.reader: asyncio.Future[None] | None = None  # waits for ARRIVED or ENDED
        self.writer: asyncio.Future[None] | None = None  # waits for DRAINED
