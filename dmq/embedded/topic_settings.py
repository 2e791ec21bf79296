"""What an operator may change of how long a topic keeps what is in its queues."""

from __future__ import annotations

from typing import Literal, NamedTuple

from broker_adapter.errors import Refused, Rule
from dmq.store.schema.names import Keep
from dmq.units import DURATION_MS_MAX

KEEP_TIME_MS_LEAST = 1_000
BACK = -1


class KeepChange(NamedTuple):
    """What is to be changed of a ``Keep``: ``None`` stays, ``BACK`` and "default" are as configured again."""

    time_ms: int | None = None
    size_bytes: int | None = None
    unread: Literal["yes", "no", "default"] | None = None

    def applied_to(self, keep: Keep) -> Keep:
        """Return ``keep`` with the changes; ``Refused(REQUEST)`` for what cannot be."""
        if not (self.time_ms in {None, 0, BACK} or KEEP_TIME_MS_LEAST <= (self.time_ms or 0) <= DURATION_MS_MAX):
            limit = f"{KEEP_TIME_MS_LEAST} to {DURATION_MS_MAX} ms"
            raise Refused(Rule.REQUEST, "the keep time is out of range", value=self.time_ms, limit=limit)
        if self.size_bytes is not None and not BACK <= self.size_bytes < 2**63:
            raise Refused(Rule.REQUEST, "the number of bytes to keep is out of range", value=self.size_bytes)
        return Keep(
            _bound(self.time_ms, keep.time_ms),
            _bound(self.size_bytes, keep.size_bytes),
            keep.unread if self.unread is None else {"yes": True, "no": False, "default": None}[self.unread],
        )


def _bound(change: int | None, before: int | None) -> int | None:
    return before if change is None else None if change == BACK else change


KEEP_STAYS = KeepChange()
