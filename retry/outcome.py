"""What became of a send: the caller can tell "sent" from "safe" from "neither"."""

from __future__ import annotations

from dataclasses import dataclass


class SendRejected(Exception):
    """A send was rejected, and the message is nowhere. ``__cause__`` is the handler's error, if there was one."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(f"message {rejected.uid.hex()} was rejected: {rejected.reason}")
        self.rejected = rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The handler sent it; ``receipt`` is what it returned."""

    uid: bytes
    receipt: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """It is durable and will be sent, not before ``due_at_ms``.

    ``is_uncertain``: the attempt may have got through (a timeout), so the receiver may see the message twice, with the
    same uid.
    """

    uid: bytes
    due_at_ms: int
    reason: str
    is_uncertain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """It is not known to be sent or kept: the caller still has it, and must do something about it.

    ``is_uncertain``: it may arrive all the same, as an attempt may have got through, or the sink may have kept it
    though it did not say so in time. Whoever sends it again gives the same uid, so that receivers know a repetition.
    """

    uid: bytes
    reason: str
    error: BaseException | None = None
    is_uncertain: bool = False


Outcome = Delivered | Spooled | Rejected
