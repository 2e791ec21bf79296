"""Facts: reports of the client processes to the demo, one line of JSON each. Times are epoch milliseconds of
this host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple


class Sent(NamedTuple):
    """A send was answered OK. ``asked_ms`` is the requested delivery timestamp, 0 if a delay was requested."""

    number: int
    message_id: str
    asked_ms: int
    started_ms: int  # before its first attempt
    answered_ms: int
    attempts: int  # calls of ``send``, all with the same message id


class SendFailed(NamedTuple):
    """An attempt to send failed; it is repeated with the same message id."""

    number: int
    at_ms: int
    why: str


class SendsDone(NamedTuple):
    """All messages of the plan are sent."""

    at_ms: int


class Received(NamedTuple):
    """A message was delivered to the consumer; ``reception`` counts the deliveries from 1."""

    reception: int
    number: int
    message_id: str
    at_ms: int
    deliver_at_ms: int  # from the daemon; 0 from a cluster, whose topic accepts no delayed messages
    attempt: int


class Acked(NamedTuple):
    """An acknowledgement was answered OK."""

    reception: int
    at_ms: int


class AckStale(NamedTuple):
    """An acknowledgement came too late: the message had been delivered again."""

    reception: int
    at_ms: int


class ReceiveFailed(NamedTuple):
    """A receive or an acknowledgement got no answer; it is repeated."""

    at_ms: int
    why: str


class Ready(NamedTuple):
    """The client is connected."""

    at_ms: int


Fact = Sent | SendFailed | SendsDone | Received | Acked | AckStale | ReceiveFailed | Ready
_CLASSES: dict[str, Callable[..., Fact]] = {
    fact.__name__: fact for fact in (Sent, SendFailed, SendsDone, Received, Acked, AckStale, ReceiveFailed, Ready)
}


def to_line(fact: Fact) -> str:
    """Return the fact as a line without the newline."""
    return json.dumps([type(fact).__name__, *fact], separators=(",", ":"))


def from_line(line: str) -> Fact:
    """Undo ``to_line``. Raise ``ValueError`` if the line is not a fact."""
    try:
        name, *fields = json.loads(line)
        return _CLASSES[name](*fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no fact: {line[:200]!r}") from error
