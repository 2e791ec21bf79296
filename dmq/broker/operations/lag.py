"""Lag of groups: the ledger counts of each topic and group, and the age of the oldest unread message.

The counts come from the ledger. The age needs a read at the group's position, one row for each queue. It is read only
after the group has moved, which its ledger row shows. From then on the age advances by the boot clock, so a step of
the wall clock does not change a known age. Reads block: do not call this module on the event loop.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.runtime.clock import Moment, moment
from dmq.broker.groups import GroupQueue, Subscriptions
from dmq.broker.topics import Names
from dmq.errors import StoreCorrupt, StoreError
from dmq.store import Store
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import decode_queued
from dmq.store.schema.topics.group import GroupKind, pack_group_key
from dmq.trail.ledger import GroupBook, Ledger, read_books

LEDGER_ROWS_MAX = 50_000  # of a ledger that is scanned for metrics
READS_MAX = 10_000  # in one scan
READ_BYTES_MAX = 16 * 1024 * 1024  # a row includes its message
_REST_PART = 19  # pause of metrics between two scans, as a multiple of the scan's duration
_REST_S_MAX = 60.0  # limit of the pause: a process suspended during a scan measures a long duration


class Lag(NamedTuple):
    """Lag of a group in a topic. ``None``: unknown here, because the cluster has the messages."""

    topic: str
    group: str
    unread: int | None
    oldest_unread_age_ms: int | None  # 0: nothing unread; None also while the scan limits delay the read
    in_flight: int
    in_retry: int
    dead: int


class _Head(NamedTuple):
    """Age of the oldest unread message as of one scan."""

    mark: bytes
    since_boot_ms: int | None
    look: int


class _Wanted(NamedTuple):
    """Pair of topic and group with an oldest unread message to read; ``last_look`` 0: never read before."""

    last_look: int
    topic_id: int
    group_id: int
    mark: bytes


class Lags:
    """Lag of all groups. Its methods run on any thread except the event loop's, unless noted."""

    def __init__(self, store: Store, names: Names, subscriptions: Subscriptions) -> None:
        self._store = store
        self._names = names
        self._subscriptions = subscriptions
        self._lock = threading.RLock()
        self._heads: dict[tuple[int, int], _Head] = {}  # by topic and group, only with unread messages
        self._looks = 0
        self._recent: Sequence[Lag] = ()
        self._recent_until_s = 0.0

    def close(self) -> None:
        """Return no lag to metrics from now on; wait for a scan in progress."""
        with self._lock:
            self._recent, self._recent_until_s = (), math.inf

    def leased(self) -> Counter[tuple[int, int]]:
        """Return the number of leased messages by topic and group; may be called on the event loop."""
        return Counter(
            {
                (found.topic.topic_id, found.group_id): sum(len(queue.leases) for queue in found.all_queues)
                for found in self._subscriptions.all()
            }
        )

    def recent(self) -> Sequence[Lag]:
        """Return the result of ``look``, cached for 19 times the duration of the scan and at most 60 s.

        So scans use at most a twentieth of the time, until the limit of 60 s applies. Return an empty result if the
        ledger cannot be read or has too many rows.
        """
        clock = self._store.clock
        with self._lock:
            began_s = clock.monotonic_s()
            if began_s >= self._recent_until_s:
                try:
                    self._recent = self.look(rows_max=LEDGER_ROWS_MAX)
                except (StoreError, Overloaded):
                    self._recent = ()
                ended_s = clock.monotonic_s()
                self._recent_until_s = ended_s + min(_REST_S_MAX, _REST_PART * (ended_s - began_s))
            return self._recent

    def look(self, *, topic_id: int = 0, group_id: int = 0, rows_max: int = 2**31) -> list[Lag]:
        """Return the lag of each topic and group, or only of one topic or group, by topic; empty without a ledger.

        Raise ``Overloaded`` if the ledger has more than ``rows_max`` rows.
        """
        if self._store.ledger_head is None:
            return []
        with self._lock:
            leased = self.leased()  # read slightly before the ledger
            ledger = read_books(self._store, rows_max)
            pairs = list(ledger.pairs(only_topic=topic_id, only_group=group_id))
            now = moment(self._store.clock)
            self._read_heads(ledger, pairs, now)
            if not (topic_id or group_id):  # forget removed pairs and those without unread messages
                there = {(found_id, book.group_id) for found_id, book in pairs if book.unread > 0}
                self._heads = {pair: head for pair, head in self._heads.items() if pair in there}
            return [self._lag(ledger, *pair, leased=leased, now=now) for pair in pairs]

    def _lag(
        self, ledger: Ledger, topic_id: int, book: GroupBook, *, leased: Counter[tuple[int, int]], now: Moment
    ) -> Lag:
        topic, unread = ledger.name(topic_id), max(0, book.unread)
        is_known = self._names.reads(book.group_id, topic)
        return Lag(
            topic,
            ledger.name(book.group_id),
            unread if is_known else None,
            self._age_ms(topic_id, book, now) if is_known else None,
            in_flight(book, leased[topic_id, book.group_id]),
            book.in_retry,
            book.dead,
        )

    def _age_ms(self, topic_id: int, book: GroupBook, now: Moment) -> int | None:
        if book.unread <= 0:
            return 0
        head = self._heads.get((topic_id, book.group_id))
        if head is None or head.since_boot_ms is None:
            return None
        return max(0, now.boot_ms - head.since_boot_ms)

    # -- oldest unread messages ---------------------------------------------------------------------------------------

    def _read_heads(self, ledger: Ledger, pairs: Sequence[tuple[int, GroupBook]], now: Moment) -> None:
        """Read the oldest unread message of groups that have moved; the least recently read groups come first."""
        wanted = []
        for topic_id, book in pairs:
            if book.unread <= 0 or not self._names.reads(book.group_id, ledger.name(topic_id)):
                self._heads.pop((topic_id, book.group_id), None)
                continue
            mark, head = ledger.mark(topic_id, book.group_id), self._heads.get((topic_id, book.group_id))
            if head is None or head.since_boot_ms is None or head.mark != mark:
                wanted.append(_Wanted(head.look if head is not None else 0, topic_id, book.group_id, mark))
        self._looks += 1
        reads = _Reads(self._store)
        for each in sorted(wanted, key=attrgetter("last_look")):
            if reads.count >= READS_MAX or reads.size_bytes >= READ_BYTES_MAX:
                return
            stored_at_ms = min(filter(None, self._stored_at(reads, each)), default=None)
            since_ms = None if stored_at_ms is None else now.boot_ms - max(0, now.wall_ms - stored_at_ms)
            self._heads[each.topic_id, each.group_id] = _Head(each.mark, since_ms, self._looks)

    def _stored_at(self, reads: _Reads, pair: _Wanted) -> Iterator[int | None]:
        """Yield the store time of the first unread message in each queue of a pair, including its retry lane."""
        found = self._subscriptions.get(pair.group_id, pair.topic_id)
        if found is not None and found.is_loaded.is_set() and not found.is_retired:
            for queue in found.all_queues:
                if queue.floor < queue.end:
                    yield reads.stored_at_ms(queue.topic_id, queue.queue_id, queue.floor)
            return
        topic, lane = self._names.topics_by_id.get(pair.topic_id), self._names.lanes.get((pair.group_id, pair.topic_id))
        places = [(pair.topic_id, queue_id) for queue_id in range(topic.queues if topic is not None else 0)]
        for place in [*places, *([(lane.topic_id, 0)] if lane is not None else [])]:
            floor = reads.floor(pair.group_id, *place)
            if floor is not None:
                yield reads.stored_at_ms(*place, floor)


class _Reads:
    """Counted and cached reads of one scan."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[int, int, int], int | None] = {}  # many groups may have the same position
        self.count = self.size_bytes = 0

    def stored_at_ms(self, topic_id: int, queue_id: int, offset: int) -> int | None:
        """Return the store time of the first message from an offset on, or None if there is none."""
        place = topic_id, queue_id, offset
        if place not in self._known:
            self._known[place] = self._read(*place)
        return self._known[place]

    def _read(self, topic_id: int, queue_id: int, offset: int) -> int | None:
        value = self._value(topic_id, queue_id, offset)
        if value is None:  # removed by retention, or not stored yet
            begin = self._store.queue_begin(topic_id, queue_id)
            self.count += 1
            value = self._value(topic_id, queue_id, begin) if begin > offset else None
        try:
            return decode_queued(value).stored_at_ms if value is not None else None
        except StoreCorrupt:  # reported by the read that needs the message
            return None

    def _value(self, topic_id: int, queue_id: int, offset: int) -> bytes | None:
        (value,) = self._store.get_many(Family.QUEUE, [pack_queue_key(topic_id, queue_id, offset)])
        self.count += 1
        self.size_bytes += len(value) if value is not None else 0
        return value

    def floor(self, group_id: int, topic_id: int, queue_id: int) -> int | None:
        """Return the stored floor of a group on a queue, or None if the group has no progress there."""
        start, stop = (
            pack_group_key(group_id, topic_id, queue_id, kind, 0) for kind in (GroupKind.FLOOR, GroupKind.EXCEPTION)
        )
        rows = self._store.scan(Family.GROUP, start, stop, limit=2).rows  # the floor row and the first bitmap row
        self.count += 1
        queue = GroupQueue(group_id, topic_id, queue_id)
        queue.load(rows)
        return queue.floor if rows else None


def in_flight(book: GroupBook, leased: int) -> int:
    """Return the number of unread messages that are leased; ``leased`` may be slightly older than ``book``."""
    return max(0, min(leased, book.unread))
