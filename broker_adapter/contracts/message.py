"""Message model: plain values, standard library only.

There are two forms. ``Message`` has every field and is used by applications and rules. ``Envelope`` is used by brokers:
it has the few fields for their decisions, and the unmodified wire bytes of the message.
``broker_adapter.wire.mapping`` converts between them.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import IntEnum
from typing import NamedTuple

_HEX_ID_CHARS = 34


class MessageType(IntEnum):
    """Message type, with the numbers of the public protocol."""

    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4


class BodyEncoding(IntEnum):
    """Encoding of the body by the producer; the broker never decodes it. Numbers of the public protocol."""

    IDENTITY = 1
    GZIP = 2


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a producer. ``message_id`` is created by the client and is the idempotency key of the send.

    A producer of ``broker_adapter`` creates a missing id. ``key`` is a shortcut for a single entry of ``keys``.
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
        """Append ``key`` to ``keys``."""
        if key:
            object.__setattr__(self, "keys", (*self.keys, key))

    @property
    def message_type(self) -> MessageType:
        """Type of the message; a delayed message with a message group is DELAY, as in RocketMQ."""
        if self.deliver_at_ms:
            return MessageType.DELAY
        return MessageType.FIFO if self.message_group else MessageType.NORMAL


class Envelope(NamedTuple):
    """Message in transit: the fields for a broker's decisions, and the wire bytes of the message."""

    topic: str
    message_id: str
    payload: bytes  # a serialized apache.rocketmq.v2.Message
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0  # epoch ms; 0: not delayed
    is_relative: bool = False  # due after a delay, not at an absolute time
    queue_id: int = -1  # queue chosen by the sender; -1: the broker chooses
    not_after_ms: int = 0  # expiry in epoch ms: no delivery after it; 0: none
    own_key: str = ""  # sender's name of a pending message; at most one pending message of a topic has it
    keeps_first: bool = False  # absorb this message if its own key has a pending one; else replace that one

    @property
    def message_type(self) -> MessageType:
        """Type as in ``Message``; half messages are identified by the call that sends them."""
        if self.deliver_at_ms:
            return MessageType.DELAY
        return MessageType.FIFO if self.message_group else MessageType.NORMAL


class SendReceipt(NamedTuple):
    """Receipt of a durable send: the position of the message, or that it is pending.

    If the message was absorbed by a pending one with the same own key, the receipt is that of the pending message.
    """

    message_id: str
    queue_id: int  # -1 while it is pending
    queue_offset: int  # -1 while it is pending
    repeated: bool = False  # the same message id was accepted before; this is the first answer
    recall_handle: str = ""  # of a delayed message; else empty
    recalled_at_ms: int = 0  # when its sender recalled the message accepted under this id; nothing was stored


class RecallReceipt(NamedTuple):
    """Receipt of a recall: the pending message is removed and will never be delivered."""

    message_id: str
    recalled_at_ms: int
    repeated: bool = False  # it was recalled before; this is the first answer


class DeadLetterFacts(NamedTuple):
    """Failure history of a dead letter, as its consumer receives it."""

    origin_topic: str
    origin_message_id: str
    attempts: int
    reason: str
    first_failed_at_ms: int
    last_failed_at_ms: int


class Delivery(NamedTuple):
    """Delivery of a message to a consumer group. ``payload`` is the wire message as it was sent."""

    topic: str
    message_id: str
    payload: bytes
    queue_id: int
    queue_offset: int
    receipt_handle: str
    delivery_attempt: int  # 1 for the first delivery
    invisible_ms: int
    stored_at_ms: int
    deliver_at_ms: int  # 0: was not delayed
    dead_letter: DeadLetterFacts | None = None  # of a message in a dead-letter queue
    message_group: str = ""


def pack_id(message_id: str) -> bytes:
    """Return a key for ``message_id``: 17 bytes for the clients' 34 hex digits, else a zero byte and its UTF-8.

    Client ids of the current protocol start with ``01``, so the two forms never collide.
    """
    if len(message_id) == _HEX_ID_CHARS:
        try:
            packed = unhexlify(message_id)
        except ValueError:
            packed = b"\0"
        if packed[0] and message_id.upper() == message_id:  # upper case only, so that the text is restored exactly
            return packed
    return b"\0" + message_id.encode()


def unpack_id(packed: bytes) -> str:
    """Return the message id of a key of ``pack_id``."""
    return packed[1:].decode() if packed[:1] == b"\0" else packed.hex().upper()
