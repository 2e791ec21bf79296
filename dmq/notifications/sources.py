"""Sources: dead-letter queues beyond a durable position, and overdue messages of the timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Protocol

from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX, dead_letter_topic
from dmq.broker import EmbeddedBroker
from dmq.broker.io import Place
from dmq.broker.pulling import Tail
from dmq.notifications.notification import (
    SAMPLES_MAX,
    DeadLetterRange,
    Notification,
    OverdueCounts,
    of_dead_letters,
    of_overdue,
    stored_overdue,
)
from dmq.store import Store
from dmq.store.schema.keys import META_OVERDUE, Family, pack_u64, timeline_key, timeline_mark, unpack_u64
from dmq.store.schema.messages.index import ids_of
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.topics.notified import OverdueNotification, decode_overdue, encode_overdue, notified_key
from dmq.store.writer.operations import Put
from retry.dead_letter import DeadFilter

LETTERS_READ_MAX: Final = 200  # of one notification: the others are only counted
_SAMPLE_BYTES_MAX: Final = 1024 * 1024
_SCOPES_MAX: Final = 2_000  # topics and groups looked at for overdue messages
_ALL: Final = DeadFilter()


class NotificationReport(NamedTuple):
    """Next notification of a source.

    ``progress`` is committed after its delivery. ``events`` is the number of dead letters that it stands for.
    """

    subject: str
    notification: Notification
    progress: Sequence[Put]
    events: int = 1


class Source(Protocol):
    """Source of notifications. It belongs to the event loop."""

    async def report(self, is_due: Callable[[str], bool]) -> NotificationReport | None:
        """Return the next notification of a subject that ``is_due``, or None."""
        ...

    def delivered(self, report: NotificationReport) -> None:
        """Continue after a report: it was delivered, and its progress is durable."""
        ...


@dataclass(slots=True)
class _LetterQueue:
    """Dead-letter queue of a group: all letters below ``position`` were reported, or need no report."""

    topic_id: int
    group: str
    position: int
    end_at_first: int  # when the queue was found
    tail: Tail  # of later letters

    @property
    def end(self) -> int:
        """Offset after the last letter."""
        return max(self.end_at_first, self.tail.end)


class DeadLetterSource:
    """New dead letters of all groups, each group a subject.

    Letters with an outcome are left out, and letters of ``own_topics``, the topics of notifications: a consumer that
    fails notifications must not cause more of them.
    """

    def __init__(self, broker: EmbeddedBroker, own_topics: frozenset[str]) -> None:
        self._broker = broker
        self._own_topics = own_topics
        self._queues: dict[int, _LetterQueue] = {}  # by topic id; the one reported longest ago first

    async def report(self, is_due: Callable[[str], bool]) -> NotificationReport | None:
        """As ``Source.report``."""
        await self._find_queues()
        for queue in list(self._queues.values()):
            if queue.position < queue.end and is_due(queue.group):
                report = await self._report(queue, queue.end)
                if report is not None:
                    self._queues[queue.topic_id] = self._queues.pop(queue.topic_id)
                    return report
        return None

    def delivered(self, report: NotificationReport) -> None:
        """As ``Source.delivered``."""
        for queue in self._queues.values():
            if queue.group == report.subject:
                queue.position = max(queue.position, *(unpack_u64(each.value) for each in report.progress))

    async def _find_queues(self) -> None:
        """Add new dead-letter queues, and drop removed ones."""
        topics = self._broker.names.topics
        there = {each.topic_id: name for name, each in topics.items() if name.startswith(DEAD_LETTER_PREFIX)}
        for topic_id in self._queues.keys() - there.keys():
            del self._queues[topic_id]
        new = [topic_id for topic_id in there if topic_id not in self._queues]
        if not new:
            return
        # Tails before the read: no later letter is missed.
        tails = {topic_id: self._broker.pulls.tails.of(Place(topic_id, 0)) for topic_id in new}
        for topic_id, position, end in await self._broker.reader.run(lambda store: _positions(store, new)):
            group = there[topic_id].removeprefix(DEAD_LETTER_PREFIX)
            self._queues[topic_id] = _LetterQueue(topic_id, group, position, end, tails[topic_id])

    async def _report(self, queue: _LetterQueue, end: int) -> NotificationReport | None:
        broker = self._broker
        topic = broker.names.topics.get(dead_letter_topic(queue.group))
        if topic is None or topic.topic_id != queue.topic_id:  # removed since the queue was found
            return None
        page = await broker.dead_letters.page(
            queue.group, _ALL, offset=queue.position, limit=LETTERS_READ_MAX, with_outcome=False
        )
        letters = [each for each in page.letters if each.dead.offset < end]
        is_complete = not 0 <= page.next_offset < end
        foreign = [each for each in letters if each.dead.origin_topic not in self._own_topics]
        if not foreign:
            queue.position = end if is_complete else page.next_offset
            return None
        first = foreign[0].dead.offset
        count = len(foreign) if is_complete else len(foreign) + end - page.next_offset
        found = DeadLetterRange(queue.group, first, end, count, foreign)
        notification = of_dead_letters(broker.store.cell_id, found, broker.store.clock.now_ms())
        row = Put(Family.META, notified_key(queue.topic_id), pack_u64(end))
        return NotificationReport(queue.group, notification, [row], count)


def _positions(store: Store, topic_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the id, the reported position and the end of each dead-letter queue."""
    rows = store.get_many(Family.META, [notified_key(each) for each in topic_ids])
    return [
        (topic_id, unpack_u64(row) if row is not None else 0, store.queue_end(topic_id, 0))
        for topic_id, row in zip(topic_ids, rows, strict=True)
    ]


class OverdueSource:
    """Messages and retries on the timeline that are late by ``after_ms`` or more; all together are one subject.

    Messages held by a pause or a rate of their topic are late on purpose, and are left out.

    A notification is stored before its delivery, so that it is delivered also after a kill, and after the messages.
    Within ``every_ms`` there is no other one. While the store accepts no writes, which makes messages late, it is
    delivered without being stored.
    """

    subject: Final = "overdue"

    def __init__(self, broker: EmbeddedBroker, own_topics: frozenset[str], after_ms: int, *, every_ms: int) -> None:
        self._broker = broker
        self._own_topics = own_topics
        self._after_ms = after_ms
        self._every_ms = every_ms
        self._last: OverdueNotification | None = None  # None: not read yet

    async def report(self, is_due: Callable[[str], bool]) -> NotificationReport | None:
        """As ``Source.report``."""
        if not is_due(self.subject):
            return None
        store = self._broker.store
        last = self._last if self._last is not None else await self._broker.reader.run(_last_overdue)
        self._last = last
        if last.body:
            return self._report(last)
        now_ms = store.clock.now_ms()
        if last.made_at_ms <= now_ms < last.made_at_ms + self._every_ms:
            return None
        found = await asyncio.to_thread(self._find, now_ms - self._after_ms)
        if found is None:
            return None
        last = OverdueNotification(now_ms, of_overdue(store.cell_id, found, now_ms).body)
        if not store.write_obstacle():
            await self._broker.commits.commit([_overdue_row(last)])
        self._last = last
        return self._report(last)

    def _report(self, last: OverdueNotification) -> NotificationReport:
        store = self._broker.store
        progress = [] if store.write_obstacle() else [_overdue_row(last._replace(body=b""))]
        return NotificationReport(self.subject, stored_overdue(store.cell_id, *last), progress)

    def delivered(self, report: NotificationReport) -> None:  # noqa: ARG002 - the only subject
        """As ``Source.delivered``."""
        assert self._last is not None
        self._last = self._last._replace(body=b"")

    def _find(self, before_ms: int) -> OverdueCounts | None:
        """Return the messages due before a time, or None; reads one row if there are none."""
        store, names = self._broker.store, self._broker.names
        oldest_ms = store.next_due_ms()
        if oldest_ms is None or oldest_ms >= before_ms:
            return None
        held, topics, groups = store.held(), dict[str, int](), dict[str, int]()
        for scope in islice(store.pending(), _SCOPES_MAX):
            due = sum(each.count for each in store.due_counts(scope, 0, before_ms) if each.until_ms <= before_ms)
            count = due - held.get(scope, 0)
            if count <= 0:
                continue
            if (topic := names.topics_by_id.get(scope)) is not None:
                topics[topic.name] = count
            elif (group := names.groups_by_id.get(scope)) is not None:
                groups[group.name] = count
        topics = {name: count for name, count in topics.items() if name not in self._own_topics}
        return OverdueCounts(topics, groups, oldest_ms, _oldest_ids(store, before_ms)) if topics or groups else None


def _last_overdue(store: Store) -> OverdueNotification:
    (row,) = store.get_many(Family.META, [META_OVERDUE])
    return decode_overdue(row) if row is not None else OverdueNotification(0, b"")


def _overdue_row(last: OverdueNotification) -> Put:
    return Put(Family.META, META_OVERDUE, encode_overdue(last))


def _oldest_ids(store: Store, before_ms: int) -> list[str]:
    start, stop = timeline_key(store.marks.low()), timeline_key(timeline_mark(before_ms, 0))
    rows = store.scan(Family.TIMELINE, start, stop, limit=SAMPLES_MAX, bytes_max=_SAMPLE_BYTES_MAX).rows
    return [unpack_id(ids_of(decode_waiting(value), value)[0]) for _, value in rows]
