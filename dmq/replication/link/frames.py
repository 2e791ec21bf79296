"""Messages of the direct link, in msgpack. The primary sends, and the standby answers each message.

LinkHello    > LinkWelcome     once
LinkFrame    > int         batches, or none as a sign of life; the answer is the last batch that the standby has
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeVar

import msgspec

from dmq.errors import DmqError

__all__ = [
    "FRAME_BYTES_MAX",
    "HELLO_BYTES_MAX",
    "VERSION",
    "LinkBroken",
    "LinkChannel",
    "LinkFrame",
    "LinkHello",
    "LinkWelcome",
    "decode",
    "encode",
]

VERSION = 1
HELLO_BYTES_MAX = 1024  # of each message until the standby knows the primary
FRAME_BYTES_MAX = 16 * 1024 * 1024  # a larger batch is only put into the object store

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Message = TypeVar("_Message")
encode = msgspec.msgpack.Encoder().encode


class LinkBroken(DmqError):
    """The direct link ended, with the reason. Both sides connect again."""

    retriable = True


class LinkHello(msgspec.Struct, frozen=True, array_like=True):
    """Primary of a log. Newer versions append fields."""

    version: _Number
    store: _Number
    epoch: _Number


class LinkWelcome(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a standby; it is empty except for a ``refusal``."""

    version: _Number
    member: str
    received: _Number  # last batch of the epoch that it has
    refusal: str


class LinkFrame(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive batches of the primary."""

    first: _Number
    stored: _Number  # last batch that the object store has
    time_ms: _Number  # of the primary, for the segments of a standby
    batches: list[bytes]

    @property
    def last(self) -> int:
        """Number of its last batch."""
        return self.first + len(self.batches) - 1


class LinkChannel(Protocol):
    """Connection with messages. Every method raises ``LinkBroken``."""

    def send(self, body: bytes, timeout_s: float) -> None:
        """Send a message."""
        ...

    def receive(self, size_max: int, timeout_s: float) -> bytes:
        """Return the next message. A larger one breaks the link, before its content is read."""
        ...

    def close(self) -> None:
        """End the connection; from any thread, and more than once."""
        ...


def decode(body: bytes, kind: type[_Message]) -> _Message:
    """Decode a message; raise ``LinkBroken`` if it is invalid."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise LinkBroken(f"the other side sent an invalid message: {error}") from error
