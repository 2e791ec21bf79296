"""What a front and the store process say to each other, as values, and the bytes of it.

A *batch* is what one of them has to say in one turn of its loop: its length in 4 bytes, and an array of frames in
MessagePack. Frames are arrays that begin with the number of their kind. Both ends are of one version, which ``Hello``
says; numbers of kinds are not used again for something else all the same.

Numbers of calls are the front's. A call gets one answer, or pieces and an end; after a ``Cancel`` it may get none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from broker_adapter.contracts.errors import BrokerAway, BrokerUnavailable, CallGivenUp, Overloaded, Refused, Rule
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt
from dmq.acl.quotas import Holder
from dmq.metrics.counting import CallsTaken
from dmq.processes.settings import Settings
from dmq.rocketmq_server.calls.dispatch import Logged

_LENGTH: Final = struct.Struct(">I")
LENGTH_BYTES: Final = _LENGTH.size
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1  # of what a frame can hold


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A frame of any kind."""


# -- what a front says ------------------------------------------------------------------------------------------------


class Hello(Frame, tag=1, frozen=True):
    """The front is there, and of which version."""

    version: str


class Ready(Frame, tag=2, frozen=True):
    """It takes connections."""


class SendMessages(Frame, tag=3, frozen=True):
    """As ``Exchange.send``; answered by ``Sent``."""

    call: int
    envelopes: list[Envelope]
    holders: tuple[Holder, ...]
    wall_less_boot_ms: int  # by which the front made times of delays


class ReceiveMessages(Frame, tag=4, frozen=True):
    """As ``Exchange.receive``; answered by ``DeliveredMessages``, which is answered by ``Taken`` or ``NotTaken``."""

    call: int
    client_id: str
    holders: tuple[Holder, ...]
    group: str
    topic: str
    queue_id: int
    tags: list[str]
    sql: str
    batch_max: int
    invisible_ms: int
    wait_ms: int
    is_renewed: bool


class Taken(Frame, tag=5, frozen=True):
    """The client's socket took all that a receive delivered."""

    call: int


class NotTaken(Frame, tag=6, frozen=True):
    """It did not: give it back.

    What nobody wanted any more no client can have seen, so that it costs no attempt.
    """

    call: int
    was_wanted: bool = True


class Ack(Frame, tag=7, frozen=True):
    """As ``Exchange.ack``; answered by ``Acked``."""

    call: int
    group: str
    topic: str
    receipt_handles: list[str]


class ChangeInvisible(Frame, tag=8, frozen=True):
    """As ``Exchange.change_invisible``; answered by ``Hidden``."""

    call: int
    group: str
    topic: str
    receipt_handle: str
    invisible_ms: int
    suspend: bool
    client_id: str
    address: str


class Relay(Frame, tag=9, frozen=True):
    """A call that is passed on as it came; answered by ``Piece``s and an ``End``. ``body`` is missing of a stream.

    One with a ``refusal`` was refused by its headers, and its body is not what the client sent.
    """

    call: int
    path: str
    names: list[str]
    values: list[bytes]
    peer: str
    address: str
    deadline_s: float | None
    packed_bytes: int
    body: bytes | None
    refusal: Failure | None = None


class StreamMessage(Frame, tag=10, frozen=True):
    """One more message of a stream that is passed on."""

    call: int
    body: bytes


class HalfClose(Frame, tag=11, frozen=True):
    """The last message of a stream was passed on; with a ``status`` other than OK what came then was no message."""

    call: int
    status: int = 0  # one of gRPC's
    text: str = ""


class More(Frame, tag=12, frozen=True):
    """The client took a piece: the next one may come; or the handler read a message, and the next one may come."""

    call: int


class Cancel(Frame, tag=13, frozen=True):
    """Nobody waits for the answer of a call any more."""

    call: int


class Left(Frame, tag=14, frozen=True):
    """Connections that ended, by their addresses."""

    addresses: list[str]


class Figures(Frame, tag=15, frozen=True):
    """What the front counted since it said so last, and what it holds now."""

    calls: list[CallsTaken]
    connections: int
    streams: int
    held_bytes: list[tuple[Holder, int]]
    cpu_s: float  # of the process, since it began
    memory_bytes: int


class Pong(Frame, tag=16, frozen=True):
    """The answer to a ``Ping``: the front's loop turns."""

    number: int


# -- what the store process says --------------------------------------------------------------------------------------


class Welcome(Frame, tag=32, frozen=True):
    """How the front is to serve."""

    settings: Settings


class Sent(Frame, tag=33, frozen=True):
    """The receipts of a send, durable."""

    call: int
    receipts: list[SendReceipt]


class DeliveredMessages(Frame, tag=34, frozen=True):
    """What a receive got."""

    call: int
    deliveries: list[Delivery]


class Acked(Frame, tag=35, frozen=True):
    """The results of an acknowledgement: empty if all are good, else one for each handle, ``None`` for a good one."""

    call: int
    results: list[Failure | None]


class Hidden(Frame, tag=36, frozen=True):
    """The handle of a delivery that was hidden anew."""

    call: int
    receipt_handle: str


class Failed(Frame, tag=37, frozen=True):
    """A call failed."""

    call: int
    failure: Failure


class Piece(Frame, tag=38, frozen=True):
    """Messages of the answer to a call that was passed on."""

    call: int
    messages: list[bytes]


class End(Frame, tag=39, frozen=True):
    """The end of a call that was passed on; ``status`` is one of gRPC's, by number."""

    call: int
    status: int
    text: str


class Time(Frame, tag=40, frozen=True):
    """What the store process believes: the wall clock less the boot clock, in milliseconds."""

    wall_less_boot_ms: int


class OperatorLimits(Frame, tag=41, frozen=True):
    """The limits that operators set for keys and addresses, as the store keeps them."""

    encoded: bytes


class Listening(Frame, tag=42, frozen=True):
    """Where clients reach the daemon."""

    host: str
    port: int


class Ping(Frame, tag=43, frozen=True):
    """Asks for a ``Pong``."""

    number: int


class Read(Frame, tag=44, frozen=True):
    """A handler read a message of a stream that is passed on: the next one may come."""

    call: int


class DrainFront(Frame, tag=45, frozen=True):
    """Take no new calls, let those in flight finish within ``grace_s``, and end."""

    grace_s: float


class Failure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An error of ``broker_adapter.contracts.errors``; ``value`` and ``limit`` are as they are shown."""

    kind: str
    text: str
    rule: str = ""
    value: str | int | float | None = None
    limit: str | int | float | None = None
    code: int = 0


FromFront = (
    Hello
    | Ready
    | SendMessages
    | ReceiveMessages
    | Taken
    | NotTaken
    | Ack
    | ChangeInvisible
    | Relay
    | StreamMessage
    | HalfClose
    | More
    | Cancel
    | Left
    | Figures
    | Pong
)
FromStore = (
    Welcome
    | Sent
    | DeliveredMessages
    | Acked
    | Hidden
    | Failed
    | Piece
    | End
    | Time
    | OperatorLimits
    | Listening
    | Ping
    | Read
    | DrainFront
)

_encoder: Final = msgspec.msgpack.Encoder()
from_front: Final = msgspec.msgpack.Decoder(list[FromFront]).decode
from_store: Final = msgspec.msgpack.Decoder(list[FromStore]).decode


def encode(frames: Sequence[Frame]) -> bytearray:
    """Return a batch: each message of it is copied once. Raises what msgspec does for what has no bytes."""
    batch = bytearray(LENGTH_BYTES)
    _encoder.encode_into(frames, batch, LENGTH_BYTES)
    _LENGTH.pack_into(batch, 0, len(batch) - LENGTH_BYTES)
    return batch


def length_at(batches: bytearray | memoryview, at: int) -> int:
    """Return how many bytes the batch that begins ``at`` has behind its length."""
    length: int = _LENGTH.unpack_from(batches, at)[0]
    return length


# -- errors -----------------------------------------------------------------------------------------------------------


_UNAVAILABLE = {BrokerAway: "away", CallGivenUp: "given up"}


class Unexpected(Logged):
    """The store process failed to serve a call."""


def failure_of(error: Exception) -> Failure:
    """Return what an error is on its way; one that is no broker's says nothing of itself."""
    if isinstance(error, Refused):
        return Failure("refused", error.why, error.rule.name, _shown(error.value), _shown(error.limit), error.code)
    if isinstance(error, Overloaded):
        return Failure("overloaded", error.what, limit=_shown(error.limit), code=error.code)
    if isinstance(error, BrokerUnavailable):
        kind = _UNAVAILABLE.get(type(error), "unavailable")
        return Failure(kind, str(error), code=error.code)
    return Failure("unexpected", type(error).__name__)


def error_of(failure: Failure) -> Exception:
    """Return the error, as it was raised."""
    match failure.kind:
        case "refused":
            return Refused(
                Rule[failure.rule], failure.text, value=failure.value, limit=failure.limit, code=failure.code
            )
        case "overloaded":
            return Overloaded(failure.text, limit=failure.limit, code=failure.code)
        case "away":
            return BrokerAway(failure.text, code=failure.code)
        case "given up":
            return CallGivenUp(failure.text, code=failure.code)
        case "unavailable":
            return BrokerUnavailable(failure.text, code=failure.code)
    return Unexpected(failure.text)


def _shown(value: object) -> str | int | float | None:
    if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)
