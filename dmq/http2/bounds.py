"""Token buckets against floods, and the account of what all connections hold together."""

from __future__ import annotations

from dmq.http2.errors import Code, ConnectionFault
from dmq.http2.limits import Rate


class Allowance:
    """How often a peer may still do something that costs us work and them nothing."""

    __slots__ = ("_left", "_rate", "_seen_s", "_what")

    def __init__(self, what: str, rate: Rate, now_s: float) -> None:
        self._what = what
        self._rate = rate
        self._left = float(rate.burst)
        self._seen_s = now_s

    def spend(self, now_s: float) -> None:
        """Take one; raises ConnectionFault (ENHANCE_YOUR_CALM) if there is none."""
        if self._left < 1:
            self._left = min(self._rate.burst, self._left + (now_s - self._seen_s) * self._rate.per_s)
            self._seen_s = now_s
            if self._left < 1:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"too many {self._what}")
        self._left -= 1

    def refill(self) -> None:
        """Make it full again: the peer has done something of use."""
        self._left = float(self._rate.burst)


class Account:
    """Bytes held by all connections of a server."""

    __slots__ = ("bytes_held", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_held = 0
        self.bytes_max = bytes_max
