"""Failure reasons that clients report before the failure itself, held until the failure arrives.

The report and the failure are two calls of one client, in this order on one connection. A report without a failure is
dropped after ``KEPT_S``. Reasons above the size limits are also dropped: no message depends on a reason. An
acknowledgement never accesses this module.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Refused
from broker_adapter.runtime.clock import Clock
from dmq.broker.handles import ReceiptHandles
from dmq.broker.topics import Names
from retry.failure_reason import FailureReason, bounded

KEPT_S: Final = 30.0
BYTES_MAX: Final = 8 * 1024 * 1024  # of all groups
GROUP_BYTES_MAX: Final = 1024 * 1024  # so that one group cannot use up the total
_REASON_BYTES: Final = 1024  # overhead of an entry with its handle, in addition to its texts


class _Reported(NamedTuple):
    group: str
    reason: FailureReason
    since_s: float
    size: int


class FailureReasons:
    """Reported reasons by receipt handle. It belongs to the event loop."""

    def __init__(self, names: Names, receipts: ReceiptHandles, clock: Clock, *, is_on: bool) -> None:
        self.is_on = is_on
        self.dropped_total = 0  # because of the size limits
        self._names = names
        self._receipts = receipts
        self._clock = clock
        self._reported: OrderedDict[str, _Reported] = OrderedDict()  # oldest first
        self._bytes: Counter[str] = Counter()  # by group
        self._bytes_in_all = 0

    def note(self, group: str, receipt_handle: str, reason: FailureReason) -> bool:
        """Store the reason of an expected failure; return False if reasons are disabled.

        A handle of another group, or one that this store has not issued, is ignored.
        """
        if not self.is_on:
            return False
        try:
            receipt = self._receipts.decode(receipt_handle)
        except Refused:
            return True
        known = self._names.groups.get(group)
        if known is not None and known.group_id == receipt.group_id:
            self.keep(group, receipt_handle, reason)
        return True

    def keep(self, group: str, receipt_handle: str, reason: FailureReason) -> None:
        """Store the reason of a delivery that is known to belong to the group."""
        if not self.is_on:
            return
        now_s = self._clock.monotonic_s()
        reason = bounded(reason)
        if (earlier := self._pop(receipt_handle)) is not None:
            reason = reason.or_else(earlier)
        while self._reported and next(iter(self._reported.values())).since_s < now_s - KEPT_S:
            self._pop(next(iter(self._reported)))
        size = _REASON_BYTES + sum(map(len, reason))
        if self._bytes_in_all + size > BYTES_MAX or self._bytes[group] + size > GROUP_BYTES_MAX:
            self.dropped_total += 1
            return
        self._reported[receipt_handle] = _Reported(group, reason, now_s, size)
        self._bytes[group] += size
        self._bytes_in_all += size

    def take(self, receipt_handle: str) -> FailureReason | None:
        """Remove and return the reason of a failed delivery, or None if none was reported."""
        return self._pop(receipt_handle) if self._reported else None

    def _pop(self, receipt_handle: str) -> FailureReason | None:
        found = self._reported.pop(receipt_handle, None)
        if found is None:
            return None
        self._bytes_in_all -= found.size
        self._bytes[found.group] -= found.size
        if not self._bytes[found.group]:
            del self._bytes[found.group]
        return found.reason
