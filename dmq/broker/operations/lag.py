"""How far groups are behind: what the ledger says of each topic and group, and since when the oldest unread waits.

The counts are the ledger's, which are kept anyway. Since when a message waits is read where the group stands, a row for
each queue, and only once the group has moved: its row of the ledger tells that. From then on the age is told by the
boot clock, so that a step of the wall clock changes none that is known. Reads block: not for the event loop.
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
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.subscriptions import Subscriptions
from dmq.broker.topics.registry import Names
from dmq.errors import StoreCorrupt, StoreError
from dmq.store.schema.group import GroupKind, pack_group_key
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.record import decode_queued
from dmq.store.store import Store
from dmq.trail.ledger import GroupBook, Ledger, read_books

LEDGER_ROWS_MAX = 50_000  # of a ledger that is looked through for metrics
READS_MAX = 10_000  # in one look
READ_BYTES_MAX = 16 * 1024 * 1024  # a row comes with its message
_REST_PART = 19  # so many times as long as a look took nobody looks for metrics again
_REST_S_MAX = 60.0  # a look seems to have taken longer where the process was stopped in the middle of it


class Lag(NamedTuple):
    """How far a group is behind in a topic. ``None`` is what is not known here: the cluster has those messages."""

    topic: str
    group: str
    unread: int | None
    oldest_unread_age_ms: int | None  # 0: nothing is unread; also not known while too much is to be read
    in_flight: int
    in_retry: int
    dead: int


class _Head(NamedTuple):
    """Since when the oldest unread message waits, as of a look."""

    mark: bytes
    since_boot_ms: int | None
    look: int


class _Wanted(NamedTuple):
    """A pair whose head is to be read; ``last_look`` 0: it never was."""

    last_look: int
    topic_id: int
    group_id: int
    mark: bytes


class Lags:
    """Tells how far groups are behind, from any thread but the event loop's."""

    def __init__(self, store: Store, names: Names, subscriptions: Subscriptions) -> None:
        self._store = store
        self._names = names
        self._subscriptions = subscriptions
        self._lock = threading.RLock()
        self._heads: dict[tuple[int, int], _Head] = {}  # by topic and group, of those that have something unread
        self._looks = 0
        self._recent: Sequence[Lag] = ()
        self._recent_until_s = 0.0

    def close(self) -> None:
        """Let metrics tell nothing from here on; a look for them that is under way is waited for."""
        with self._lock:
            self._recent, self._recent_until_s = (), math.inf

    def leased(self) -> Counter[tuple[int, int]]:
        """Return how many messages are in the hands of consumers, by topic and group; also for the event loop."""
        return Counter(
            {
                (found.topic.topic_id, found.group_id): sum(len(queue.leases) for queue in found.all_queues)
                for found in self._subscriptions.all()
            }
        )

    def recent(self) -> Sequence[Lag]:
        """Return what ``look`` did, now or a moment ago: looking takes at most a twentieth of the time, or is
        a minute old.

        What cannot be read, or is too much to be read, is not told.
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
        """Return what there is of each topic and group, or of one topic or group, by topic; nothing without a ledger.

        ``Overloaded`` for a ledger of more than ``rows_max`` rows.
        """
        if self._store.ledger_head is None:
            return []
        with self._lock:
            leased = self.leased()  # known a moment before the rest
            ledger = read_books(self._store, rows_max)
            pairs = list(ledger.pairs(only_topic=topic_id, only_group=group_id))
            now = moment(self._store.clock)
            self._read_heads(ledger, pairs, now)
            if not (topic_id or group_id):  # what is gone, or has nothing unread, is forgotten
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

    # -- where groups stand -------------------------------------------------------------------------------------------

    def _read_heads(self, ledger: Ledger, pairs: Sequence[tuple[int, GroupBook]], now: Moment) -> None:
        """Read where those groups stand that have moved; of too many, those first that were not read for longest."""
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
        """Find when the first unread message of each queue of a pair came into it, of its retries as well."""
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
    """Reads of one look, counted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[int, int, int], int | None] = {}  # many groups may stand at one message
        self.count = self.size_bytes = 0

    def stored_at_ms(self, topic_id: int, queue_id: int, offset: int) -> int | None:
        """Return when the first message from an offset on came into its queue; ``None`` if there is none."""
        place = topic_id, queue_id, offset
        if place not in self._known:
            self._known[place] = self._read(*place)
        return self._known[place]

    def _read(self, topic_id: int, queue_id: int, offset: int) -> int | None:
        value = self._value(topic_id, queue_id, offset)
        if value is None:  # removed for its age, or not there yet
            begin = self._store.queue_begin(topic_id, queue_id)
            self.count += 1
            value = self._value(topic_id, queue_id, begin) if begin > offset else None
        try:
            return decode_queued(value).stored_at_ms if value is not None else None
        except StoreCorrupt:  # is told by who needs the message
            return None

    def _value(self, topic_id: int, queue_id: int, offset: int) -> bytes | None:
        (value,) = self._store.get_many(Family.QUEUE, [pack_queue_key(topic_id, queue_id, offset)])
        self.count += 1
        self.size_bytes += len(value) if value is not None else 0
        return value

    def floor(self, group_id: int, topic_id: int, queue_id: int) -> int | None:
        """Return below which offset a group has finished all by what is stored; ``None`` if it does not read there."""
        start, stop = (
            pack_group_key(group_id, topic_id, queue_id, kind, 0) for kind in (GroupKind.FLOOR, GroupKind.EXCEPTION)
        )
        rows = self._store.scan(Family.GROUP, start, stop, limit=2).rows  # the floor, and the bitmap behind it
        self.count += 1
        queue = GroupQueue(group_id, topic_id, queue_id)
        queue.load(rows)
        return queue.floor if rows else None


def in_flight(book: GroupBook, leased: int) -> int:
    """Return how much of what is unread is in the hands of consumers, where ``leased`` was known a moment before."""
    return max(0, min(leased, book.unread))
