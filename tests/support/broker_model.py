"""What the embedded broker must do, said a second time: no store, no queues, no threads, one dictionary per thing.

Messages are named ``(topic, message id)``. Every change of state appends the fact the audit trail must hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from dmq.audit.events import EventKind

Key = tuple[str, str]  # topic, message id


class Fact(NamedTuple):
    """One audit event, as far as it is determined; ``group`` is empty for what happens to the message itself."""

    kind: EventKind
    key: Key
    group: str = ""
    attempt: int = 0
    at_ms: int = 0  # delivery time, or when it becomes visible


@dataclass
class Held:
    """One message as one group has it."""

    next_attempt: int = 1
    lease_attempt: int = 0  # of the last hand-out
    hidden_until_ms: int | None = None
    is_row: bool = False  # the lease outlives the run
    is_suspended: bool = False
    is_finished: bool = False
    handles: list[str] = field(default_factory=list)
    run: int = 0  # in which the last handle was made


class Model:
    """The state that operations and time lead to."""

    def __init__(self) -> None:
        self.run = 1
        self.waiting: dict[Key, int] = {}
        self.queued: set[Key] = set()
        self.held: dict[str, dict[Key, Held]] = {}
        self.facts: list[Fact] = []

    def send(self, key: Key, deliver_at_ms: int, now_ms: int) -> bool:
        """Accept a message; say whether it was known already."""
        if key in self.waiting or key in self.queued:
            return True
        if deliver_at_ms > now_ms:
            self.waiting[key] = deliver_at_ms
            self.facts.append(Fact(EventKind.SCHEDULED, key, at_ms=deliver_at_ms))
        else:
            self.queued.add(key)
            self.facts.append(Fact(EventKind.QUEUED, key, at_ms=deliver_at_ms))
        return False

    def due(self, now_ms: int) -> list[Key]:
        """What waits no longer."""
        return [key for key, at_ms in self.waiting.items() if at_ms <= now_ms]

    def expired(self, now_ms: int) -> list[tuple[str, Key]]:
        """Leases that are over."""
        return [
            (group, key)
            for group, messages in self.held.items()
            for key, held in messages.items()
            if held.hidden_until_ms is not None and held.hidden_until_ms <= now_ms
        ]

    def settle(self, now_ms: int) -> None:
        """Do what time does."""
        self.hand_over(now_ms)
        self.expire(now_ms)

    def hand_over(self, now_ms: int) -> None:
        """Move what is due."""
        for key in self.due(now_ms):
            self.facts.append(Fact(EventKind.DELIVERED, key, at_ms=self.waiting.pop(key)))
            self.queued.add(key)

    def expire(self, now_ms: int) -> None:
        """Bring back what nobody finished in time."""
        for group, key in self.expired(now_ms):
            self._bring_back(group, key, EventKind.LEASE_EXPIRED)

    def available(self, group: str, topic: str) -> dict[Key, Held]:
        """What a receive may hand out."""
        messages = self.held.setdefault(group, {})
        return {
            key: held
            for key in self.queued
            if key[0] == topic
            and (held := messages.setdefault(key, Held())).hidden_until_ms is None
            and not held.is_finished
        }

    def hand_out(self, held: Held, handle: str, hidden_until_ms: int) -> None:
        """Lease a message."""
        held.lease_attempt, held.run = held.next_attempt, self.run
        held.hidden_until_ms, held.is_row, held.is_suspended = hidden_until_ms, False, False
        held.handles.append(handle)

    def finish(self, group: str, key: Key) -> None:
        """Acknowledge with the last handle, the first time or again."""
        held = self.held[group][key]
        if not held.is_finished:
            held.is_finished, held.hidden_until_ms = True, None
            self.facts.append(Fact(EventKind.ACKED, key, group, held.lease_attempt))

    def hide(self, group: str, key: Key, now_ms: int, invisible_ms: int, *, suspend: bool) -> None:
        """Change the invisible duration with the last handle."""
        held = self.held[group][key]
        held.hidden_until_ms, held.is_row, held.is_suspended = now_ms + invisible_ms, True, suspend
        if invisible_ms:
            at_ms = now_ms + invisible_ms
            self.facts.append(Fact(EventKind.INVISIBLE_CHANGED, key, group, held.lease_attempt, at_ms))
        else:
            self._bring_back(group, key, EventKind.GIVEN_BACK)

    def restart(self) -> None:
        """Forget what only memory knew: leases that were never renewed."""
        self.run += 1
        for messages in self.held.values():
            for held in messages.values():
                if not held.is_row:
                    held.hidden_until_ms = None

    def due_counts(self, topic: str, bucket_ms: int) -> dict[int, int]:
        """How many wait, by the end of their time bucket."""
        return Counter((at_ms // bucket_ms + 1) * bucket_ms for key, at_ms in self.waiting.items() if key[0] == topic)

    def _bring_back(self, group: str, key: Key, kind: EventKind) -> None:
        held = self.held[group][key]
        held.next_attempt = held.lease_attempt + (not held.is_suspended)
        held.hidden_until_ms, held.is_row = None, False
        self.facts.append(Fact(kind, key, group, held.next_attempt))
