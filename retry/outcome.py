"""Outcome of a send. The caller can distinguish "sent", "durably kept" and "neither"."""

from __future__ import annotations

from dataclasses import dataclass


class SendRejected(Exception):
    """A send was rejected: the message was neither sent nor kept. ``__cause__`` is the handler's error, if there was
    one.
    """

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(f"message {rejected.uid.hex()} was rejected: {rejected.reason}")
        self.rejected = rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The handler sent the message; ``receipt`` is its return value."""

    uid: bytes
    receipt: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """The message is durable and will be sent, not before ``due_at_ms``.

    ``is_uncertain``: the attempt may have succeeded (a timeout). The receiver may then see the message twice, with the
    same uid.
    """

    uid: bytes
    due_at_ms: int
    reason: str
    is_uncertain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The message is not known to be sent or kept. The caller still owns it and must handle it.

    ``is_uncertain``: the message may still arrive. An attempt may have succeeded, or the sink may have kept it without
    confirming in time. A caller that sends it again must pass the same uid, so that receivers detect the duplicate.
    """

    uid: bytes
    reason: str
    error: BaseException | None = None
    is_uncertain: bool = False


Outcome = Delivered | Spooled | Rejected
