"""The message model: values only, standard library only.

Two forms of the same thing. ``Message`` has every field and is what applications and rules read. ``Envelope`` is what
brokers pass on: the few facts they decide by, and the message itself as its wire bytes, untouched.
``broker_adapter.wire.mapping`` turns one into the other.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import IntEnum
from typing import NamedTuple

_HEX_ID_CHARS = 34


class MessageType(IntEnum):
    """Numbers of the public protocol."""

    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4


class BodyEncoding(IntEnum):
    """How the producer packed the body; the broker never unpacks it. Numbers of the public protocol."""

    IDENTITY = 1
    GZIP = 2


@dataclass(frozen=True, slots=True)
class Message:
    """What a producer sends. ``message_id`` is made by the client and is the idempotency key of the send.

    A producer of ``broker_adapter`` makes one for a message that has none. ``key`` is short for ``keys`` of one.
    """

    topic: str
    body: bytes = field(repr=False)
    _: KW_ONLY
    message_id: str = ""
    tag: str = ""
    key: InitVar[str] = ""
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    message_group: str = ""
    deliver_at_ms: int = 0  # 0: not delayed
    body_encoding: BodyEncoding = BodyEncoding.IDENTITY
    born_at_ms: int = 0
    born_host: str = ""

    def __post_init__(self, key: str) -> None:
        """Let a single key be one of ``keys``."""
        if key:
            object.__setattr__(self, "keys", (*self.keys, key))

    @property
    def message_type(self) -> MessageType:
        """A message that is delayed and grouped counts as DELAY, as RocketMQ types it."""
        if self.deliver_at_ms:
            return MessageType.DELAY
        return MessageType.FIFO if self.message_group else MessageType.NORMAL


class Envelope(NamedTuple):
    """A message on its way: what a broker decides by, and the message as it came off the wire."""

    topic: str
    message_id: str
    payload: bytes  # a serialized apache.rocketmq.v2.Message
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0  # epoch ms; 0: not delayed
    is_relative: bool = False  # due some time after it is sent, not at a time that somebody gave
    queue_id: int = -1  # where it is to lie, if its sender chose; -1: its broker chooses
    not_after_ms: int = 0  # epoch ms after which nobody is to get it any more; 0: there is no such time
    own_key: str = ""  # by which its sender finds it while it waits; of a topic at most one message waits under it
    keeps_first: bool = False  # what waits under its own key stays, and this message is not stored; else it is replaced

    @property
    def message_type(self) -> MessageType:
        """As that of ``Message``; half messages are told apart by who sends them."""
        if self.deliver_at_ms:
            return MessageType.DELAY
        return MessageType.FIFO if self.message_group else MessageType.NORMAL


class SendReceipt(NamedTuple):
    """A durable send: where the message is, or that it waits.

    Of a message that was not stored, since another one waits under its own key and is to stay, it is that one's.
    """

    message_id: str
    queue_id: int  # -1 while it waits for its delivery time
    queue_offset: int  # -1 while it waits for its delivery time
    repeated: bool = False  # the same message id was accepted before; this is the first answer
    recall_handle: str = ""  # of a message that waits, or waited; empty for every other
    recalled_at_ms: int = 0  # when its sender recalled the message accepted under this id; nothing was stored


class RecallReceipt(NamedTuple):
    """A message that was recalled: it waited, is gone, and will never be delivered."""

    message_id: str
    recalled_at_ms: int
    repeated: bool = False  # it was recalled before; this is the first answer


class DeadLetterFacts(NamedTuple):
    """What a dead letter tells its consumer about its end."""

    origin_topic: str
    origin_message_id: str
    attempts: int
    reason: str
    first_failed_at_ms: int
    last_failed_at_ms: int


class Delivery(NamedTuple):
    """One hand-out of a message to a consumer group. ``payload`` is the wire message as it was sent."""

    topic: str
    message_id: str
    payload: bytes
    queue_id: int
    queue_offset: int
    receipt_handle: str
    delivery_attempt: int  # 1 for the first hand-out
    invisible_ms: int
    stored_at_ms: int
    deliver_at_ms: int  # 0: was not delayed
    dead_letter: DeadLetterFacts | None = None  # of a message in a dead-letter queue
    message_group: str = ""


def pack_id(message_id: str) -> bytes:
    """Return a key for ``message_id``: 17 bytes for the clients' 34 hex digits, a zero byte and its UTF-8 otherwise.

    Client ids of the current protocol start with ``01``, so the two forms never collide.
    """
    if len(message_id) == _HEX_ID_CHARS:
        try:
            packed = unhexlify(message_id)
        except ValueError:
            packed = b"\0"
        if packed[0] and message_id.upper() == message_id:  # no small letters
            return packed
    return b"\0" + message_id.encode()


def unpack_id(packed: bytes) -> str:
    """Undo ``pack_id``."""
    return packed[1:].decode() if packed[:1] == b"\0" else packed.hex().upper()
