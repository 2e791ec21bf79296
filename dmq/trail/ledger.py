"""The ledger: at any moment each message is in exactly one term of an equation, and the equations balance.

Of a topic:

    scheduled      = fired + cancelled + pending
    put into queues = fired + accepted at once
    half messages  = committed + rolled back + given up + undecided

Of a topic and a group, counted from the group's start or its last reset:

    fired          = acknowledged + forwarded + dead + filtered + expired + in retry + unread

*Unread* includes messages in flight and returned messages. A message that a reset delivers again is fired once more.

Of a dead-letter queue:

    letters        = redriven + purged + expired + left

Only the ledger counts these terms, with two exceptions. *Pending*, and the sum of *in retry* over all topics of a
group, are compared with separate figures of the store. ``against_rows`` compares all terms with the rows of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from dmq.store.schema.accounting.ledger import Term, encode_ledger
from dmq.store.schema.keys import half_scope
from dmq.store.writer.recount import KnownIds, Pair, Recount, Scanned, read_ledger, read_names
from dmq.trail.events import EventKind

_K = EventKind
_HALF_ENDS = (_K.COMMITTED, _K.ROLLED_BACK, _K.TX_GIVEN_UP, _K.TX_TOO_OLD)
_DEAD = (
    *(_K.DEAD_EXHAUSTED, _K.DEAD_TOO_OLD, _K.DEAD_TOO_LATE, _K.DEAD_FORWARDED, _K.DEAD_SENT_BACK, _K.DEAD_BY_OPERATOR),
    _K.FORWARD_REFUSED,
)
LEDGER_KINDS = frozenset(
    {
        *(_K.SCHEDULED, _K.DELIVERED, _K.RECALLED, _K.REPLACED, _K.QUEUED, _K.EXPIRED, _K.HALF, *_HALF_ENDS),
        *(_K.ACKED, _K.FORWARDED, _K.FILTERED, *_DEAD),
        *(_K.NACKED, _K.RETRIED, _K.RETRY_MOVED, _K.QUEUED_FOR_GROUP, _K.TAKEN_OVER),
    }
)


class Difference(NamedTuple):
    """A term that does not balance. ``group`` is empty for a term of a topic, ``topic`` for a term of a group."""

    topic: str
    group: str
    term: str
    counted: int
    found: int

    def __str__(self) -> str:
        where = [f"topic {self.topic}"] if self.topic else []
        where += [f"group {self.group}"] if self.group else []
        return f"{', '.join(where)}: {self.term}: counted {self.counted:,}, found {self.found:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBook:
    """Terms of a topic's messages for one group."""

    group_id: int
    fired: int
    acked: int
    forwarded: int
    dead: int
    filtered: int
    expired: int
    in_retry: int
    unread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LettersBook:
    """Terms of the letters of a dead-letter queue."""

    letters: int
    redriven: int
    purged: int
    expired: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicBook:
    """Terms of the messages of a topic."""

    topic_id: int
    scheduled: int
    fired: int
    cancelled: int
    pending: int
    at_once: int
    half: int
    committed: int
    rolled_back: int
    given_up: int
    undecided: int
    expired: int  # removed from its queues before all of its groups had finished them
    groups: list[GroupBook] = field(default_factory=list)
    letters: LettersBook | None = None


class Ledger:
    """Counts of a store at one instant, as terms of the equations."""

    def __init__(self, rows: Mapping[Pair, Mapping[int, int]], pending: Mapping[int, int], known: KnownIds) -> None:
        """Combine the result of ``Store.ledger`` with the names.

        Topics and groups that are removed, or under removal, are left out.
        """
        self._rows = rows
        self._pending = pending
        self._known = known
        self._groups: dict[int, list[int]] = {}
        self._books: dict[Pair, GroupBook] = {}  # those computed so far
        self._lanes = {(lane.topic_id, lane.group_id): lane_id for lane_id, lane in known.lanes.items()}
        self._topics = [each for each in known.queues if each not in known.lanes]
        self._all_groups: dict[int, list[int]] = {}  # by topic: groups with any counts, removed ones included
        for topic_id, group_id in sorted({*rows, *self._lanes}):
            self._all_groups.setdefault(topic_id, []).append(group_id)
            if group_id in known.groups and topic_id in known.queues and topic_id not in known.lanes:
                self._groups.setdefault(topic_id, []).append(group_id)

    def topic(self, topic_id: int) -> TopicBook:
        """Return the terms of a topic, with its groups."""
        row = self._row(topic_id)
        books = [self.group(topic_id, group_id) for group_id in self._groups.get(topic_id, ())]
        groups = self._all_groups.get(topic_id, ())
        given_up = sum(self._row(topic_id, group_id)(_K.TX_GIVEN_UP, _K.TX_TOO_OLD) for group_id in groups)
        cancelled = row(_K.RECALLED, _K.REPLACED)
        half, committed, rolled_back = row(Term.HALF_BEFORE, _K.HALF), row(_K.COMMITTED), row(_K.ROLLED_BACK)
        scheduled, fired = row(Term.PENDING_BEFORE, _K.SCHEDULED), row(_K.DELIVERED)
        return TopicBook(
            topic_id=topic_id,
            scheduled=scheduled,
            fired=fired,
            cancelled=cancelled,
            pending=scheduled - fired - cancelled,
            at_once=row(_K.QUEUED),
            half=half,
            committed=committed,
            rolled_back=rolled_back,
            given_up=given_up,
            undecided=half - committed - rolled_back - given_up,
            expired=row(_K.EXPIRED),
            groups=[each for each in books if each.fired],
            letters=self._letters(topic_id) if self._has_letters(topic_id) else None,
        )

    def group(self, topic_id: int, group_id: int) -> GroupBook:
        """Return the terms of a group on a topic; the result is cached."""
        book = self._books.get((topic_id, group_id))
        if book is None:
            book = self._books[topic_id, group_id] = self._group(topic_id, group_id)
        return book

    def _group(self, topic_id: int, group_id: int) -> GroupBook:
        row, lane = self._row(topic_id, group_id), self._lanes.get((topic_id, group_id))
        from_queues = self._row(topic_id)(Term.STORED) - row(Term.BEFORE) if row(Term.QUEUES) else 0
        in_retry = row(Term.COPIES_BEFORE, _K.NACKED) - row(_K.RETRIED, _K.RETRY_MOVED, Term.DEAD_WAITING)
        own = row(_K.QUEUED_FOR_GROUP, _K.TAKEN_OVER, Term.LANE_BEFORE, Term.COPIES_BEFORE)
        fired = from_queues + own
        acked, forwarded, dead, filtered = row(_K.ACKED), row(_K.FORWARDED), row(*_DEAD), row(_K.FILTERED)
        expired = row(Term.SKIPPED) + (self._row(lane, group_id)(Term.SKIPPED) if lane is not None else 0)
        return GroupBook(
            group_id=group_id,
            fired=fired,
            acked=acked,
            forwarded=forwarded,
            dead=dead,
            filtered=filtered,
            expired=expired,
            in_retry=in_retry,
            unread=fired - acked - forwarded - dead - filtered - expired - in_retry,
        )

    def pairs(self, *, only_topic: int = 0, only_group: int = 0) -> Iterator[tuple[int, GroupBook]]:
        """Yield each topic with the terms of each group that reads it or failed some of its messages.

        Only the given topic and group are computed; 0 stands for all.
        """
        for topic_id in self._topics:
            if only_topic not in {0, topic_id}:
                continue
            for group_id in self._groups.get(topic_id, ()):
                if only_group not in {0, group_id}:
                    continue
                book = self.group(topic_id, group_id)
                if book.fired or self._row(topic_id, group_id)(Term.QUEUES):
                    yield topic_id, book

    def mark(self, topic_id: int, group_id: int) -> bytes:
        """Return a value that changes when the group finishes, is set to an offset, or loses messages of the topic."""
        lane = self._lanes.get((topic_id, group_id))
        skipped = self._row(lane, group_id)(Term.SKIPPED) if lane is not None else 0
        besides: dict[int, int] = {Term.SKIPPED: skipped, _K.EXPIRED: self._row(topic_id)(_K.EXPIRED)}
        return encode_ledger(self._rows.get((topic_id, group_id), {})) + encode_ledger(besides)

    def name(self, name_id: int) -> str:
        """Return the name of a topic or a group."""
        return self._known.names[name_id]

    def topics(self) -> list[TopicBook]:
        """Return the terms of all topics, by name."""
        return [self.topic(each) for each in sorted(self._topics, key=lambda each: self._known.names[each])]

    # -- differences --------------------------------------------------------------------------------------------------

    def differences(self) -> list[Difference]:
        """Return the terms that do not balance by the stored figures; empty if all do."""
        return list(self._differences())

    def _differences(self) -> Iterator[Difference]:
        in_retry: dict[int, int] = {}
        for topic_id in self._topics:
            book, row = self.topic(topic_id), self._row(topic_id)
            yield from self._waiting(book, self._pending)
            if book.letters is None:
                arrived = row(Term.STORED_BEFORE, _K.QUEUED, _K.DELIVERED)
                yield from self._compared(topic_id, 0, "put into queues", arrived, row(Term.STORED))
            elif book.letters.left < 0:
                yield self._difference(topic_id, 0, "letters left", book.letters.left, 0)
            for group_id in self._groups.get(topic_id, ()):
                group = self.group(topic_id, group_id)
                in_retry[group_id] = in_retry.get(group_id, 0) + group.in_retry
                if group.unread < 0:
                    yield self._difference(topic_id, group_id, "unread", group.unread, 0)
                if (lane := self._lanes.get((topic_id, group_id))) is not None:
                    came = self._row(topic_id, group_id)(_K.RETRIED, _K.RETRY_MOVED, _K.QUEUED_FOR_GROUP)
                    lane_row = self._row(lane)
                    came += lane_row(Term.STORED_BEFORE)
                    yield from self._compared(topic_id, group_id, "came back", came, lane_row(Term.STORED))
        for group_id in self._known.groups if not self._has_removals() else ():
            counted = in_retry.get(group_id, 0)
            yield from self._compared(0, group_id, "in retry", counted, self._pending.get(group_id, 0))

    def against_rows(self, found: Recount) -> list[Difference]:
        """Return the terms that do not balance, or differ from a recount of the rows at the same instant."""
        return [*self._differences(), *self._against_rows(found)]

    def _against_rows(self, found: Recount) -> Iterator[Difference]:
        for lane_id, lane in self._known.lanes.items():
            if lane.topic_id in self._known.queues and lane.group_id in self._known.groups:
                stored = self._row(lane_id)(Term.STORED)
                yield from self._compared(*(lane.topic_id, lane.group_id), "came back", stored, found.stored[lane_id])
        for topic_id in self._topics:
            book, row = self.topic(topic_id), self._row(topic_id)
            yield from self._waiting(book, found.waiting)
            yield from self._compared(topic_id, 0, "put into queues", row(Term.STORED), found.stored[topic_id])
            if book.letters is not None:
                left = found.unfinished.get((topic_id, 0), found.stored[topic_id])
                yield from self._compared(topic_id, 0, "letters left", book.letters.left, left)
            readers = {group_id for topic, group_id in found.queues if topic == topic_id}
            for group_id in sorted(readers | set(self._groups.get(topic_id, ()))):
                if group_id in self._known.groups:
                    yield from self._group_against_rows(topic_id, group_id, found)

    def _group_against_rows(self, topic_id: int, group_id: int, found: Recount) -> Iterator[Difference]:
        group, lane = self.group(topic_id, group_id), self._lanes.get((topic_id, group_id), 0)
        unread = found.unfinished.get((topic_id, group_id), 0) + found.unfinished.get((lane, group_id), 0)
        queues = self._row(topic_id, group_id)(Term.QUEUES)
        yield from self._compared(topic_id, group_id, "queues", queues, found.queues.get((topic_id, group_id), 0))
        yield from self._compared(topic_id, group_id, "unread", group.unread, unread)
        copies = found.copies.get((topic_id, group_id), 0)
        yield from self._compared(topic_id, group_id, "in retry", group.in_retry, copies)

    def _waiting(self, book: TopicBook, waiting: Mapping[int, int]) -> Iterator[Difference]:
        topic_id = book.topic_id
        yield from self._compared(topic_id, 0, "pending", book.pending, waiting.get(topic_id, 0))
        halves = waiting.get(half_scope(topic_id), 0)
        yield from self._compared(topic_id, 0, "undecided", book.undecided, halves)

    def _compared(self, topic_id: int, group_id: int, term: str, counted: int, found: int) -> Iterator[Difference]:
        if counted != found:
            yield self._difference(topic_id, group_id, term, counted, found)

    def _difference(self, topic_id: int, group_id: int, term: str, counted: int, found: int) -> Difference:
        names = self._known.names
        return Difference(names.get(topic_id, ""), names.get(group_id, ""), term, counted, found)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _row(self, topic_id: int, group_id: int = 0) -> _Row:
        return _Row(self._rows.get((topic_id, group_id), {}))

    def _has_removals(self) -> bool:
        """Return True if a topic is under removal: its retries may still be pending, and belong to no listed topic."""
        return any(lane.topic_id not in self._known.queues for lane in self._known.lanes.values())

    def _has_letters(self, topic_id: int) -> bool:
        return self._known.names[topic_id].startswith(DEAD_LETTER_PREFIX)

    def _letters(self, topic_id: int) -> LettersBook:
        row = self._row(topic_id)
        letters = row(Term.STORED) - row(Term.SETTLED_BEFORE)
        redriven, purged, expired = row(Term.LETTERS_REDRIVEN), row(Term.LETTERS_PURGED), row(Term.SKIPPED)
        left = letters - redriven - purged - expired
        return LettersBook(letters=letters, redriven=redriven, purged=purged, expired=expired, left=left)


def read_books(source: Scanned, rows_max: int = 2**31) -> Ledger:
    """Return the ledger of a store. If names change during the read, it is repeated.

    Raise ``Overloaded`` if there are more than ``rows_max`` rows.
    """
    rows = read_names(source)
    while True:
        counts = read_ledger(source, rows_max)
        before, rows = rows, read_names(source)
        if before == rows:
            return Ledger(*counts, KnownIds.of_rows(rows))


_ZEROS = repeat(0)


class _Row(NamedTuple):
    counts: Mapping[int, int]

    def __call__(self, *terms: int) -> int:
        """Return the sum of the counts of ``terms``."""
        return sum(map(self.counts.get, terms, _ZEROS))
