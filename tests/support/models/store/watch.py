"""An engine that compares what each batch does to the rows with what its audit events say."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dmq.store.engines.engine import Batch, Engine, EngineStats, Rows
from dmq.store.schema.accounting.outbox import NOT_APPLICABLE, decode_block
from dmq.store.schema.keys import Family, pack_queue_key, unpack_u64
from dmq.store.schema.messages.record import decode_queued
from dmq.store.schema.topics.group import pack_group_key
from dmq.trail.events import LANE, AuditEvent, EventKind, decode_event

Queue = bytes  # group_id 4 | topic_id 4 | queue_id 2, as keys of the group family begin
_TOPIC, _GROUP, _LANE = 1, 2, 3  # kinds of names
_FLOOR, _CHUNK, _EXCEPTION, _OUTCOME = 1, 2, 3, 4  # kinds of rows of the group family
DEAD = {
    EventKind.DEAD_EXHAUSTED,
    EventKind.DEAD_TOO_OLD,
    EventKind.DEAD_TOO_LATE,
    EventKind.DEAD_FORWARDED,
    EventKind.DEAD_SENT_BACK,
    EventKind.DEAD_BY_OPERATOR,
}
_ENDS = {EventKind.ACKED, EventKind.FILTERED, EventKind.REDRIVEN, EventKind.PURGED}
_HIDES = {EventKind.INVISIBLE_CHANGED, EventKind.POSTPONED}
_COMES = {EventKind.QUEUED, EventKind.DELIVERED, EventKind.RETRIED, EventKind.RETRY_MOVED, EventKind.QUEUED_FOR_GROUP}
_RETURNS = {EventKind.LEASE_EXPIRED, EventKind.GIVEN_BACK}
_OF_PROGRESS = _ENDS | _HIDES | _RETURNS | {EventKind.NACKED} | DEAD - {EventKind.DEAD_BY_OPERATOR}


class Told(NamedTuple):
    """One event of a batch."""

    event: AuditEvent
    queue_offset: int

    @property
    def is_copy(self) -> bool:
        """Whether it says that a copy waits, and the original is finished."""
        assert (self.event.kind is not EventKind.NACKED) or self.queue_offset == NOT_APPLICABLE
        return self.event.kind is EventKind.NACKED


class WatchedEngine:
    """Compares each batch with its events; says which kinds it has seen, and what was wrong. Begins with nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: set[EventKind] = set()
        self.broken: list[str] = []
        self._lanes: dict[tuple[int, int], int] = {}  # (group, topic) to the lane's topic id
        self._letters: dict[int, int] = {}  # group to the topic id of its dead-letter queue
        self._groups: dict[str, int] = {}

    def write(self, batch: Batch) -> None:
        """Look at a batch before and after it is applied."""
        told = [
            Told(decode_event(record.event), record.queue_offset)
            for family, key, value in batch.puts
            if family == Family.AUDIT
            for record in decode_block(key, value)
        ]
        self.seen |= {each.event.kind for each in told}
        self._learn(batch)
        by_queue: defaultdict[Queue, list[Told]] = defaultdict(list)
        for each in told:
            if each.event.kind in _OF_PROGRESS:
                by_queue[self._queue(each.event)].append(each)
        before = {queue: self._progress(queue) for queue in _queues(batch) | by_queue.keys()}
        try:
            self._check_messages(batch, told)
            _check_names(batch, told)
        except AssertionError as error:
            self.broken.append(f"{error} in {told}")
        self.engine.write(batch)
        for queue, was in before.items():
            try:
                self._check_progress(queue, was, self._progress(queue), by_queue[queue])
            except AssertionError as error:
                self.broken.append(f"{error} in {by_queue[queue]}")

    def flush(self) -> None:
        """Pass on."""
        self.engine.flush()

    def sync(self) -> None:
        """Pass on."""
        self.engine.sync()

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        """Pass on."""
        return self.engine.get_many(family, keys)

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        """Pass on."""
        return self.engine.scan(family, start, stop, limit=limit, bytes_max=bytes_max)

    def last(self, family: Family, start: bytes, stop: bytes) -> tuple[bytes, bytes] | None:
        """Pass on."""
        return self.engine.last(family, start, stop)

    def clear(self, family: Family) -> None:
        """Pass on."""
        self.engine.clear(family)

    def stats(self) -> EngineStats:
        """Pass on."""
        return self.engine.stats()

    def close(self) -> None:
        """Pass on."""
        self.engine.close()

    # -- whose ---------------------------------------------------------------------------------------------------------

    def _learn(self, batch: Batch) -> None:
        """Note new names: events name a lane by its topic, and a dead-letter queue by its group."""
        for name_id, kind, rest in sorted(_names(batch)):
            if kind == _LANE:
                self._lanes[_number(rest[:4]), _number(rest[4:])] = name_id
            elif kind == _GROUP:
                self._groups[rest.decode()] = name_id
            elif rest.startswith(b"%DLQ%"):
                self._letters[self._groups[rest[5:].decode()]] = name_id

    def _queue(self, event: AuditEvent) -> Queue:
        """Return whose progress an event is about, if it is about any."""
        if event.kind in {EventKind.REDRIVEN, EventKind.PURGED}:  # of a ledger
            return pack_group_key(0, self._letters[event.group_id], 0, 0, 0)[:10]
        topic_id, queue_id = self._place(event)
        return pack_group_key(event.group_id, topic_id, queue_id, 0, 0)[:10]

    def _place(self, event: AuditEvent) -> tuple[int, int]:
        if event.queue_id == LANE:
            return self._lanes[event.group_id, event.topic_id], 0
        return event.topic_id, event.queue_id

    def _progress(self, queue: Queue) -> dict[bytes, bytes]:
        return dict(self.engine.scan(Family.GROUP, queue, queue + b"\xff" * 10, limit=10_000).rows)

    # -- what must agree -----------------------------------------------------------------------------------------------

    def _check_messages(self, batch: Batch, told: list[Told]) -> None:
        """A timeline row comes and goes with its event, and so does a message of a queue."""
        kinds = Counter(each.event.kind for each in told)
        entered = sum(family == Family.TIMELINE for family, _, _ in batch.puts)
        left = sum(family == Family.TIMELINE for family, _ in batch.deletes)
        assert entered == kinds[EventKind.SCHEDULED] + sum(each.is_copy for each in told), "a timeline row came"
        over = (EventKind.DELIVERED, EventKind.RETRIED, EventKind.RETRY_MOVED, EventKind.DEAD_BY_OPERATOR)
        assert left == sum(kinds[kind] for kind in over), "a timeline row went"
        placed = sorted(key for family, key, _ in batch.puts if family == Family.QUEUE)
        assert placed == sorted(self._placed(told)), "messages of queues"

    def _placed(self, told: list[Told]) -> Iterable[bytes]:
        """The rows of queues that the events speak of."""
        for event, queue_offset in told:
            if event.kind in DEAD or event.kind is EventKind.PURGED:
                yield pack_queue_key(self._letters[event.group_id], 0, queue_offset)
            elif event.kind in _COMES:
                yield pack_queue_key(*self._place(event), queue_offset)

    def _check_progress(
        self, queue: Queue, before: dict[bytes, bytes], after: dict[bytes, bytes], told: list[Told]
    ) -> None:
        """What a group finished, and what it hides or gets back, is what its events say, offset by offset.

        Of a message that went on as a copy the event has no offset in its queue: those are counted.
        """
        copies = sum(each.is_copy or each.event.kind in DEAD for each in told)
        by_offset: defaultdict[int, list[AuditEvent]] = defaultdict(list)
        for each in told:
            if each.event.kind not in DEAD and not each.is_copy:
                by_offset[each.queue_offset].append(each.event)
        ended = {offset for offset, events in by_offset.items() if any(each.kind in _ENDS for each in events)}
        finished = _finished(after) - _finished(before)
        assert ended <= finished, "an end without its row"
        assert len(finished - ended) == copies, "copies and what they left behind"
        was, now = _exceptions(before), _exceptions(after)
        changed = {offset for offset in now if was.get(offset) != now[offset]}
        assert changed <= by_offset.keys(), "rows without an event"
        assert not now.keys() & finished, "a row of what is finished"
        assert was.keys() - now.keys() <= finished, "a row went"
        for offset, events in by_offset.items():
            assert sum(each.kind in _ENDS for each in events) <= 1, "two ends"
            last = events[-1]
            if offset not in finished:
                made_before = self._made_before(queue, offset)
                visible_at_ms = last.time_ms if last.kind in _HIDES else 0
                assert now[offset] == (last.attempt - made_before, visible_at_ms), f"the row of {offset}"
        if queue[:4] == bytes(4) and _number(queue[8:]) == 0:
            rows = queue[:8] + b"\0\1"
            assert sum(key[10] == _OUTCOME for key in self._progress(rows)) == len(_finished(after)), "outcomes"

    def _made_before(self, queue: Queue, offset: int) -> int:
        """Return how often a message was handed out to its group before it came to this queue."""
        (value,) = self.engine.get_many(Family.QUEUE, [queue[4:] + offset.to_bytes(8, "big")])
        assert value is not None, f"no message at {offset}"
        return decode_queued(value).attempts_so_far


def _check_names(batch: Batch, told: list[Told]) -> None:
    """A new topic or group comes with its event, and so do new settings; a lane is nobody's news."""
    made = sorted(name_id for name_id, kind, _ in _names(batch) if kind != _LANE)
    assert made == _named(told, EventKind.TOPIC_CREATED, EventKind.GROUP_CREATED), "names"
    settings = {_number(key[1:]) for family, key, _ in batch.puts if family == Family.META and key[:1] == b"p"}
    assert sorted(settings) == sorted(set(_named(told, EventKind.GROUP_CHANGED))), "settings"


def _named(told: list[Told], *kinds: EventKind) -> list[int]:
    return sorted(each.event.topic_id or each.event.group_id for each in told if each.event.kind in kinds)


def _names(batch: Batch) -> list[tuple[int, int, bytes]]:
    """Id, kind and what the record of each new name ends with."""
    records = [(key, value) for family, key, value in batch.puts if family == Family.META and key[:1] == b"n"]
    return [(_number(key[1:]), value[1], value[12:]) for key, value in records]


def _queues(batch: Batch) -> set[Queue]:
    """Whose progress a batch touches; outcomes of dead letters lie beside their ledger."""
    touched = [(family, key) for family, key, _ in batch.puts] + batch.deletes
    return {key[:10] for family, key in touched if family == Family.GROUP and key[10] != _OUTCOME}


def _finished(rows: dict[bytes, bytes]) -> set[int]:
    found: set[int] = set()
    for key, value in rows.items():
        kind, number = key[10], _number(key[11:])
        if kind == _FLOOR:
            found |= set(range(unpack_u64(value)))
        elif kind == _CHUNK:
            found |= {number * 1024 + at for at in range(1024) if value[at >> 3] >> (at & 7) & 1}
    return found


def _exceptions(rows: dict[bytes, bytes]) -> dict[int, tuple[int, int]]:
    """Offset to (attempt in this queue, visible at)."""
    return {
        _number(key[11:]): (_number(value[:2]), _number(value[2:10]))
        for key, value in rows.items()
        if key[10] == _EXCEPTION
    }


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "big")
