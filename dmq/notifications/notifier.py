"""Notifier: delivers the notifications of one source through one channel, at a bounded rate, with retries.

A subject is reported at most once in ``every_s``. After a failure, the next attempt waits: 5 s, 10 s, 20 s and so on up
to 5 minutes, for all subjects of the channel. Meanwhile the source only counts. A subject that alone fails does not
stop the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog

from broker_adapter.contracts.errors import BrokerError
from broker_adapter.runtime.clock import Clock
from dmq.errors import DmqError
from dmq.notifications.channels import Channel
from dmq.notifications.sources import NotificationReport, Source

LOOK_S: Final = 1.0
AT_ONCE_MAX: Final = 5  # notifications in a row
_RETRY_S_MIN, _RETRY_S_MAX = 5.0, 300.0
_SUBJECTS_MAX: Final = 20_000  # remembered; more than groups can exist

log = structlog.get_logger("dmq.notifications")


@dataclass(slots=True)
class NotifierTotals:
    """Counters of a notifier. Any thread may read them."""

    sent: int = 0
    failed: int = 0  # attempts
    suppressed: int = 0  # dead letters that a notification only counts, besides its first one


@dataclass(slots=True)
class _Subject:
    """Earliest time of the next notification, and the number of failures in a row."""

    next_s: float
    failures: int = 0


class Notifier:
    """Task that notifies. It belongs to the event loop; ``start`` begins it and ``close`` ends it."""

    def __init__(self, kind: str, source: Source, channel: Channel, clock: Clock, *, every_s: float) -> None:
        self.kind = kind
        self.totals = NotifierTotals()
        self.problem = ""  # why the last attempt failed; empty if it did not
        self._source = source
        self._channel = channel
        self._clock = clock
        self._every_s = every_s
        self._subjects: dict[str, _Subject] = {}
        self._failures = 0  # in a row, of any subject
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to notify."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"dmq-notify-{self.kind}")

    async def close(self) -> None:
        """End the task. A webhook under way may still arrive; it is sent again by the next run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # any error: a task that ended silently would look like a quiet store
                is_bug = not isinstance(error, BrokerError | DmqError)
                log.error("notifier_failed", kind=self.kind, error=str(error), exc_info=is_bug)  # noqa: TRY400
                self._next_s = self._clock.monotonic_s() + _RETRY_S_MAX
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Deliver the notifications that are due, a bounded number."""
        for _ in range(AT_ONCE_MAX):
            if self._clock.monotonic_s() < self._next_s:
                return
            report = await self._source.report(self._is_due)
            if report is None:
                return
            await self._deliver(report)

    def _is_due(self, subject: str) -> bool:
        known = self._subjects.get(subject)
        return known is None or self._clock.monotonic_s() >= known.next_s

    async def _deliver(self, report: NotificationReport) -> None:
        notification, subject = report.notification, self._subject(report.subject)
        place = {"kind": self.kind, "subject": report.subject, "id": notification.notification_id}
        try:
            await self._channel.deliver(notification, report.progress)
        except (BrokerError, DmqError) as error:
            self.totals.failed += 1
            self._failures += 1
            subject.failures += 1
            now_s = self._clock.monotonic_s()
            subject.next_s = now_s + _pause_s(subject.failures)
            self._next_s = now_s + _pause_s(self._failures)
            self.problem = f"notifications of kind {self.kind} are not delivered: {error}"
            retry_in_s = max(subject.next_s, self._next_s) - now_s
            log.warning("notification_failed", **place, error=str(error), retry_in_s=retry_in_s)
            return
        self.problem = ""
        self._source.delivered(report)
        self.totals.sent += 1
        self.totals.suppressed += report.events - 1
        self._failures = subject.failures = 0
        subject.next_s = self._clock.monotonic_s() + self._every_s
        log.info("notification_sent", **place, events=report.events)

    def _subject(self, name: str) -> _Subject:
        if name not in self._subjects and len(self._subjects) >= _SUBJECTS_MAX:
            del self._subjects[next(iter(self._subjects))]
        return self._subjects.setdefault(name, _Subject(0.0))


def _pause_s(failures: int) -> float:
    return min(_RETRY_S_MAX, _RETRY_S_MIN * 2.0 ** min(failures - 1, 10))
