"""The answers that carry messages, in pieces: what is there at once goes out at once.

A piece ends with the message that makes it ``PIECE_BYTES`` or larger. A message that cannot be read is left out and
logged, for the others are good: one that was received comes back until its attempts are used up, one that was pulled
stays where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import structlog
from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import Pulled, PulledMessage
from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.message import Delivery
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp
from dmq.http2 import Account
from dmq.rocketmq_server.codec import mapping
from dmq.rocketmq_server.codec.codes import OK_STATUS

PIECE_BYTES: Final = 64 * 1024

_RECEIVED = wire.ReceiveMessageResponse(status=OK_STATUS)
_NOTHING_RECEIVED = wire.ReceiveMessageResponse(
    status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no new message came while waiting")
)
_PULLED = wire.PullMessageResponse(status=OK_STATUS)
_NOTHING_PULLED = wire.PullMessageResponse(
    status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no new message between the offset and the next one")
)

_Answer = TypeVar("_Answer", wire.ReceiveMessageResponse, wire.PullMessageResponse)
_Message = TypeVar("_Message", Delivery, PulledMessage)

log = structlog.get_logger("dmq.rocketmq_server")


def received(
    deliveries: Sequence[Delivery],
    topic: wire.Resource,
    store_host: str,
    now_ms: Callable[[], int],
    account: Account | None = None,
    over: Callable[[bool], None] = lambda _: None,
) -> Iterator[list[wire.ReceiveMessageResponse]]:
    """Give the status first, each message, the time of delivery last; tell ``over`` whether all of it was taken."""
    fill = partial(_filled, wire.ReceiveMessageResponse, mapping.fill, topic, store_host)
    first = _RECEIVED if deliveries else _NOTHING_RECEIVED
    waiting = _Waiting(deliveries, account)
    del deliveries
    is_taken = False
    try:
        yield from _in_pieces(first, waiting, fill, lambda: _delivered_at(now_ms()))
        is_taken = True
    finally:
        waiting.drop()
        over(is_taken)


def pulled(
    found: Pulled, topic: wire.Resource, store_host: str, account: Account | None = None
) -> Iterator[list[wire.PullMessageResponse]]:
    """Give the status first, each message, the offset to go on from last."""
    fill = partial(_filled, wire.PullMessageResponse, mapping.fill_pulled, topic, store_host)
    first = _PULLED if found.messages else _NOTHING_PULLED
    waiting, last = _Waiting(found.messages, account), wire.PullMessageResponse(next_offset=found.next_offset)
    del found
    try:
        yield from _in_pieces(first, waiting, fill, lambda: last)
    finally:
        waiting.drop()


def check_room(messages: Sequence[Delivery] | Sequence[PulledMessage], account: Account | None) -> None:
    """Raise Overloaded if there is no room for an answer with these messages, which may have to wait for its client."""
    size = sum(len(each.payload) for each in messages)
    if account is None or size <= PIECE_BYTES:
        return
    account.hold(size)
    pool = account.has_room()
    account.hold(-size)
    if pool is not None:
        raise Overloaded(f"bytes of requests and answers that wait ({pool})", limit=pool.bytes_max)


class _Waiting(Generic[_Message]):
    """Messages of an answer that are not encoded yet. The account counts them until they are."""

    def __init__(self, messages: Sequence[_Message], account: Account | None) -> None:
        self._messages: deque[_Message] = deque(messages)
        self._account = account
        self._hold(sum(len(each.payload) for each in messages))

    def __bool__(self) -> bool:
        return bool(self._messages)

    def take(self) -> _Message:
        """Return the next message, which is counted no more."""
        message = self._messages.popleft()
        self._hold(-len(message.payload))
        return message

    def drop(self) -> None:
        """Forget the messages that are left."""
        while self._messages:
            self.take()

    def _hold(self, size: int) -> None:
        if self._account is not None:
            self._account.hold(size)


def _in_pieces(
    first: _Answer, waiting: _Waiting[_Message], fill: Callable[[_Message], list[_Answer]], last: Callable[[], _Answer]
) -> Iterator[list[_Answer]]:
    """Yield lists of answers. No variable keeps a message during a yield: the receiver of a list empties it."""
    piece: list[_Answer] = [first]
    piece_bytes = 0
    while waiting:
        message = waiting.take()
        filled = fill(message)
        piece += filled
        piece_bytes += len(message.payload) if filled else 0
        del message, filled
        if piece_bytes >= PIECE_BYTES:
            yield piece
            piece = []
            piece_bytes = 0
    piece.append(last())
    yield piece


def _filled(
    answer_class: type[_Answer],
    fill: Callable[[wire.Message, _Message, wire.Resource, str], None],
    topic: wire.Resource,
    store_host: str,
    message: _Message,
) -> list[_Answer]:
    """Return the answer with one message; none, and a line in the log, if the message cannot be read."""
    answer = answer_class()
    try:
        fill(answer.message, message, topic, store_host)
    except DecodeError:
        log.exception(
            "message_unreadable",
            topic=topic.name,
            message_id=message.message_id,
            queue_id=message.queue_id,
            queue_offset=message.queue_offset,
        )
        return []
    return [answer]


def _delivered_at(now_ms: int) -> wire.ReceiveMessageResponse:
    last = wire.ReceiveMessageResponse()
    set_timestamp(last.delivery_timestamp, now_ms)
    return last
