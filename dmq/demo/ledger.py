"""Facts of the client processes so far: added by their threads, read by the screen, and judged at the end."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dmq.demo.facts import (
    Acked,
    AckStale,
    Fact,
    Ready,
    Received,
    ReceiveFailed,
    SendFailed,
    SendsDone,
    Sent,
)
from dmq.demo.plan import Kind, Plan


@dataclass(slots=True)
class Tally:
    """Counts of one kind of message so far."""

    planned: int = 0
    sent: int = 0
    received: int = 0
    late_ms_max: int = -1  # no due time is known


class Ledger:
    """All facts of a run. Safe from any thread; the lists only grow."""

    def __init__(self, plan: Plan) -> None:
        self.sent: list[Sent] = []
        self.received: list[Received] = []
        self.acked: list[Acked] = []
        self.sends_failed = 0
        self.receives_failed = 0
        self.last_trouble = ""
        self.tallies = {kind: Tally() for kind in Kind}
        self.ready = threading.Event()  # set when a client is connected; cleared before the next one is started
        self._kinds = {send.number: send.kind for send in plan.sends}
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._unsettled: set[int] = set()  # receptions with an unanswered acknowledgement
        self._is_sending = True
        for send in plan.sends:
            self.tallies[send.kind].planned += 1

    def take(self, fact: Fact) -> None:
        """Record a fact."""
        with self._lock:
            match fact:
                case Sent():
                    self.sent.append(fact)
                    self.tallies[self._kinds[fact.number]].sent += 1
                case Received():
                    self._take_received(fact)
                case Acked():
                    self.acked.append(fact)
                    self._unsettled.discard(fact.reception)
                case AckStale():
                    self._unsettled.discard(fact.reception)
                case SendFailed():
                    self.sends_failed += 1
                    self.last_trouble = fact.why
                case ReceiveFailed():
                    self.receives_failed += 1
                    self.last_trouble = fact.why
                case SendsDone():
                    self._is_sending = False
                case Ready():
                    self.ready.set()

    def _take_received(self, fact: Received) -> None:
        self.received.append(fact)
        self._unsettled.add(fact.reception)
        if fact.number in self._seen:
            return
        self._seen.add(fact.number)
        tally = self.tallies[self._kinds[fact.number]]
        tally.received += 1
        if fact.deliver_at_ms:
            tally.late_ms_max = max(tally.late_ms_max, fact.at_ms - fact.deliver_at_ms)

    def is_settled(self) -> bool:
        """Return True if every message was sent and received, and every acknowledgement is answered."""
        with self._lock:
            return not self._is_sending and len(self._seen) == len(self._kinds) and not self._unsettled

    def first_received_after(self, at_ms: int) -> int:
        """Return the time of the first message received after ``at_ms``; 0 if there is none."""
        with self._lock:
            return min((each.at_ms for each in self.received if each.at_ms > at_ms), default=0)

    def total(self) -> Tally:
        """Return the sum of all kinds."""
        with self._lock:
            found = list(self.tallies.values())
            return Tally(
                planned=sum(each.planned for each in found),
                sent=sum(each.sent for each in found),
                received=sum(each.received for each in found),
                late_ms_max=max(each.late_ms_max for each in found),
            )
