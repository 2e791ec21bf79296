"""Held topics: due messages of paused topics, and of topics with more due messages than their delivery rate allows.

Held entries stay on the timeline but sort after all times. They remain the same pending entries for every other caller;
only the timeline's reader no longer finds them. Entries of a topic are adjacent in the order of their due times, so
they are released oldest first. While a topic holds entries, its newly due entries queue behind them.

A topic that is neither paused nor rate-limited, and holds nothing, costs one lookup per message. It costs none while no
topic is.

The pause is in the topic's settings and the held entries are on disk, so a kill leaves no work undone. Held entries of
a topic that is no longer paused are released at the next start, slowly at first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from broker_adapter.runtime.log import LibraryLog
from dmq.broker.limits import Flow, full, ramp, refilled, taken, wait_s
from dmq.broker.topics import Topic
from dmq.errors import StoreNoDescriptors
from dmq.store import Store
from dmq.store.schema.keys import Family, held_mark, held_range, timeline_key, timeline_mark
from dmq.store.schema.messages.record import DELAYED_KINDS, WAITING_HEADER_BYTES, body_facts, waiting_topic_id
from dmq.store.writer.operations import Hold

BYTES_PER_TURN_MAX = 8 * 1024 * 1024
_PAUSE_S = 0.2  # before a read is tried again
_DELAYED = frozenset(map(int, DELAYED_KINDS))

Row = tuple[bytes, bytes]
log = LibraryLog("dmq.scheduler")


class ReadSoFar(NamedTuple):
    """Position of the timeline's reader at the beginning of its turn.

    All keys below ``low`` were read, and all below ``live`` except the backlog. As far as the backlog was examined, it
    has messages of the topics ``left`` to it. ``left`` is ``None`` if part of the backlog was not examined.

    In a flood that is too large to be read through, messages are not examined one by one. Messages of other topics
    within it are late, but delay no others.
    """

    low: int
    live: int
    left: Collection[bytes] | None

    def may_have_older(self, topic_id: int) -> bool:
        """Return True if the backlog may have messages of a topic, which are older than those of the live cursor."""
        return self.left is None or topic_id.to_bytes(4, "big") in self.left


class HeldTopics:
    """Decides which due rows are held and which held rows are released. Used only by the scheduler's thread."""

    def __init__(self, store: Store, slowed: Mapping[int, Topic]) -> None:
        """Load the topics with held entries.

        ``slowed`` maps ids to the paused or rate-limited topics; other threads may change it at any time.
        """
        self._store = store
        self._clock = store.clock
        self._slowed = slowed
        # First held key of each topic with held entries. A scan from there skips the tombstones of deleted rows.
        self._first = {topic_id: held_range(topic_id)[0] for topic_id in store.held()}
        self._paused: set[int] = set()  # topics of ``_first`` that were paused at their last check
        self._flows: dict[int, Flow] = {}
        self.wait_s: float | None = None  # until more rows may be released, by the last ``take``

    @property
    def is_idle(self) -> bool:
        """Whether no topic is paused or rate-limited, and no topic holds entries."""
        return not (self._first or self._slowed or self._flows)

    def take(self, read: ReadSoFar, now_ms: int, limit: int) -> list[Row]:
        """Return at most ``limit`` held rows that may be released, oldest of each topic first.

        Rows that were due after the reader's position for their topic are left, since older messages may still be
        unread. So are rows that are not due by the current clock, after a step back.
        """
        self.wait_s = None
        if self._flows:
            self._flows = {
                each: flow for each, flow in self._flows.items() if each in self._slowed or each in self._first
            }
        due, now_s = timeline_mark(now_ms + 1, 0), self._clock.monotonic_s()
        rows: list[Row] = []
        size = 0
        for topic_id in list(self._first):
            allowed = min(self._allowed(topic_id, now_s), limit - len(rows))
            if allowed > 0 and size < BYTES_PER_TURN_MAX:
                mark = min(due, read.low if read.may_have_older(topic_id) else read.live)
                try:
                    found = self._take_of(topic_id, mark, allowed, BYTES_PER_TURN_MAX - size)
                except StoreNoDescriptors as error:  # the rows are undamaged, and are read again shortly
                    log.warning("scheduler_read_failed", error=str(error))
                    self._wait(_PAUSE_S)
                    break
                size += sum(len(value) for _, value in found)
                rows += found
        return rows

    def _allowed(self, topic_id: int, now_s: float) -> int:
        """Return the number of held rows of a topic that may be released now."""
        topic = self._slowed.get(topic_id)
        if topic is not None and topic.paused_since_ms is not None:
            self._paused.add(topic_id)
            return 0
        rate = topic.deliver_rate if topic is not None else None
        flow = self._flows.get(topic_id)
        if topic_id in self._paused or flow is None or (rate is None and flow.ramp_since_s is None):
            is_ramped = rate is None or topic_id in self._paused
            self._paused.discard(topic_id)
            flow = ramp(now_s) if is_ramped else full(rate or 0, now_s)
        flow = self._flows[topic_id] = refilled(flow, rate, now_s)
        if left_s := wait_s(flow, rate, now_s):
            self._wait(left_s)
            return 0
        return int(flow.allowed)

    def _wait(self, left_s: float) -> None:
        self.wait_s = left_s if self.wait_s is None else min(self.wait_s, left_s)

    def _take_of(self, topic_id: int, mark: int, limit: int, bytes_max: int) -> Sequence[Row]:
        start, end = self._first[topic_id], held_range(topic_id)[1]
        stop = min(end, timeline_key(held_mark(topic_id, mark)))
        self._store.marks.read_held(start, stop)
        rows: list[Row] = []
        if start < stop:
            rows = self._store.scan(Family.TIMELINE, start, stop, limit=limit, bytes_max=bytes_max).rows
        flow = self._flows[topic_id]
        if rows:
            del self._first[topic_id]  # moves the topic to the end of the round
            self._first[topic_id] = timeline_key(int.from_bytes(rows[-1][0], "big") + 1)
            self._flows[topic_id] = taken(flow, len(rows))
        elif not self._store.scan(Family.TIMELINE, start, end, limit=1).rows:
            del self._first[topic_id]
            self._flows[topic_id] = flow._replace(ramp_since_s=None)
        return rows

    def divide(self, rows: list[Row], ahead: int, read: ReadSoFar) -> tuple[list[Row], list[Hold]]:
        """Return the due rows to hand over, and the ops that hold the others.

        The first ``ahead`` rows are read before older rows of the backlog. Among these, rows of a rate-limited topic
        that may have messages in the backlog are held, to keep the order.
        """
        passing: list[Row] = []
        held: list[Hold] = []
        now_s = self._clock.monotonic_s()
        for number, row in enumerate(rows):
            key, value = row
            topic_id = waiting_topic_id(value)
            is_ahead = number < ahead and topic_id in self._slowed and read.may_have_older(topic_id)
            if value[1] not in _DELAYED or not self._holds(topic_id, now_s, is_ahead):
                passing.append(row)
                continue
            first = timeline_key(held_mark(topic_id, int.from_bytes(key, "big")))
            self._first[topic_id] = min(first, self._first.get(topic_id, first))
            held.append(Hold(key, topic_id, body_facts(value[WAITING_HEADER_BYTES:])[0], value))
        return passing, held

    def _holds(self, topic_id: int, now_s: float, is_ahead: bool) -> bool:
        if topic_id in self._first:
            return True
        topic = self._slowed.get(topic_id)
        if topic is None:
            return False
        if topic.paused_since_ms is not None or is_ahead:
            return True
        rate = topic.deliver_rate
        if rate is None:  # its limit was just removed
            return False
        flow = refilled(self._flows.get(topic_id) or full(rate, now_s), rate, now_s)
        is_held = flow.allowed < 1
        self._flows[topic_id] = flow if is_held else taken(flow, 1)
        return is_held
