"""What clients and an operator of ``turmoil`` were told, and what they are owed by that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

PLAIN, KEYED, ORDERED = "plain", "keyed", "ordered"
TOPICS = (PLAIN, KEYED, ORDERED)  # what is asked about in the end is sent to these
GROUPS = ("first", "second")  # who must get it
READERS = "readers"  # who reads by offset


@dataclass(slots=True)
class Sent:
    """One message that was sent: what was asked for, and what was answered."""

    topic: str
    deliver_at_ms: int
    own_key: str
    resolution: str  # of a transaction: commit, rollback, none; else empty
    is_accepted: bool = False
    stored_as: str = ""  # the id that was answered: another one's, where that has its own key
    recall_handle: str = ""
    may_be_cancelled: bool = False  # was asked for, and the answer was lost


@dataclass(slots=True)
class Books:
    """What clients and operators were told. Written by many threads."""

    sent: dict[str, Sent] = field(default_factory=dict)
    acked: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in GROUPS})
    seen: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in (*GROUPS, READERS)})
    cancelled: set[str] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def owed(self) -> list[tuple[str, str]]:
        """Return who must get what: each group each message that was accepted, and not rolled back or left half."""
        with self.lock:
            return [
                (group, message_id)
                for message_id, sent in self.sent.items()
                if sent.is_accepted and sent.resolution in {"", "commit"} and sent.stored_as == message_id
                for group in GROUPS
            ]

    def missing(self) -> list[tuple[str, str]]:
        """Return what of that was not acknowledged."""
        owed = self.owed()
        with self.lock:
            return [each for each in owed if each[1] not in self.acked[each[0]]]

    def waiting(self, topic: str, now_ms: int) -> list[str]:
        """Return what was accepted and may still wait for its time."""
        with self.lock:
            return [
                message_id
                for message_id, sent in self.sent.items()
                if sent.topic == topic and sent.is_accepted and sent.deliver_at_ms > now_ms
            ]

    def doubt(self, topic: str, ids: Sequence[str], own_keys: Sequence[str]) -> None:
        """Note that nobody knows whether these were cancelled."""
        with self.lock:
            for message_id, sent in self.sent.items():
                if sent.topic == topic and (message_id in ids or sent.own_key in own_keys):
                    sent.may_be_cancelled = True
