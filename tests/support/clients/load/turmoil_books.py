"""What clients and an operator of ``turmoil`` were told, and what they are owed by that, also by a restored backup."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from support.clients.load.gate import Gate

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
    is_resolved: bool = False  # a transaction, as it was asked for
    stored_as: str = ""  # the id that was answered: another one's, where that has its own key
    recall_handle: str = ""
    may_be_cancelled: bool = False  # was asked for, and the answer was lost


_NOT_SENT = Sent("", deliver_at_ms=0, own_key="", resolution="")


class Page(NamedTuple):
    """What the books said at a moment."""

    sent: dict[str, Sent]
    acked: dict[str, set[str]]
    seen: dict[str, set[str]]
    cancelled: set[str]


@dataclass(slots=True)
class Books:
    """What clients and operators were told by the store as it is. Written by many threads.

    Who asks the daemon for something and notes the answer does both within one pass of the gate: so no answer of a
    store is noted when another one has been put in its place.
    """

    sent: dict[str, Sent] = field(default_factory=dict)
    acked: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in GROUPS})
    seen: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in (*GROUPS, READERS)})
    ever_seen: dict[str, set[str]] = field(default_factory=lambda: {group: set() for group in (*GROUPS, READERS)})
    cancelled: set[str] = field(default_factory=set)
    backups: list[tuple[Path, Page]] = field(default_factory=list)  # what was known before each was asked for
    gate: Gate = field(default_factory=Gate)
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, group: str, message_ids: Iterable[str]) -> None:
        """Note what came to a group."""
        found = set(message_ids)
        with self.lock:
            self.seen[group] |= found
            self.ever_seen[group] |= found

    def page(self) -> Page:
        """Return what is known now."""
        with self.lock:
            sent = {message_id: replace(each) for message_id, each in self.sent.items()}
            return Page(sent, _copied(self.acked), _copied(self.seen), set(self.cancelled))

    def put_back(self, page: Page) -> None:
        """Forget what the store forgets that is put back to a backup: ``page`` is of before it.

        What came between the two may be in the backup or not, and is owed to nobody.
        """
        with self.lock:
            for message_id, sent in self.sent.items():
                was = page.sent.get(message_id, _NOT_SENT)
                sent.is_accepted, sent.is_resolved, sent.stored_as = was.is_accepted, was.is_resolved, was.stored_as
            for message_id in self.cancelled - page.cancelled:
                if message_id in self.sent:
                    self.sent[message_id].may_be_cancelled = True
            self.acked, self.seen, self.cancelled = _copied(page.acked), _copied(page.seen), set(page.cancelled)

    def owed(self) -> list[tuple[str, str]]:
        """Return who must get what: each group each message that was accepted, and not rolled back or left half."""
        with self.lock:
            return [
                (group, message_id)
                for message_id, sent in self.sent.items()
                if sent.is_accepted and sent.stored_as == message_id
                if not sent.resolution or (sent.resolution == "commit" and sent.is_resolved)
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


def _copied(sets: dict[str, set[str]]) -> dict[str, set[str]]:
    return {name: set(each) for name, each in sets.items()}
