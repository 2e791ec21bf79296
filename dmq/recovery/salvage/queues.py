"""Salvage of queues and of every row with their offsets (``reading.offset_map`` explains the changes)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby

from dmq.broker.groups import GroupQueue
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.look import Look
from dmq.recovery.reading.loss_report import LossReport
from dmq.recovery.reading.names import KnownNames
from dmq.recovery.reading.offset_map import MovedMessages, MovedRange, OffsetMap, Place
from dmq.recovery.reading.places import place_of
from dmq.recovery.reading.rows import ProgressRow, epoch_of, read_begin, read_index, read_progress
from dmq.recovery.salvage.figures import BadRow, SalvagedFigures
from dmq.recovery.salvage.names import RequiredNames
from dmq.recovery.salvage.replay import Replay
from dmq.store.schema import keys
from dmq.store.schema.accounting.outbox import NOT_APPLICABLE, block_head, decode_block
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.record import QueuedMessage, decode_queued
from dmq.store.schema.topics.group import GroupKind, pack_group_key
from dmq.store.writer.operations import Op, Put
from dmq.trail.events import EventKind, decode_event

_ARRIVALS = frozenset({EventKind.QUEUED, EventKind.DELIVERED})
_OF_PROGRESS = frozenset({GroupKind.FLOOR, GroupKind.CHUNK, GroupKind.EXCEPTION})


def measure(look: Look, names: KnownNames, figures: SalvagedFigures, bad_row: BadRow) -> MovedMessages:
    """Determine the readable offsets of each queue, and its end according to all rows."""
    return _Measure(look, names, figures, bad_row).run()


class _Measure:
    def __init__(self, look: Look, names: KnownNames, figures: SalvagedFigures, bad_row: BadRow) -> None:
        self._look = look
        self._names = names
        self._figures = figures
        self._bad_row = bad_row
        self._spans: dict[Place, OffsetMap] = {}
        self._begins: dict[Place, int] = {}

    def run(self) -> MovedMessages:
        for key, value in self._look.rows(Family.META, *keys.meta_range(keys.META_BEGIN)):
            with suppress(StoreCorrupt):  # reported when the figures are saved
                place, begin = read_begin(key, value)
                self._begins[place] = begin
        for family, saw in (
            (Family.QUEUE, self._queued),
            (Family.GROUP, self._progress),
            (Family.INDEX, self._indexed),
            (Family.AUDIT, self._arrived),
        ):
            for key, value in self._look.rows(family):
                try:
                    saw(key, value)
                except StoreCorrupt as error:
                    if family is not Family.AUDIT:  # reported when the outbox is saved
                        self._bad_row(family, key, str(error))
        return MovedMessages(self._spans)

    def _queued(self, key: bytes, value: bytes) -> None:
        place, _ = _read_queued(key, value)
        self._of(place).add(keys.queue_offset_of(key))

    def _progress(self, key: bytes, value: bytes) -> None:
        row = read_progress(key, value)
        self._reaches(row.place, row.end)
        if row.kind is GroupKind.EXCEPTION:
            self._figures.saw_boot(epoch_of(row) >> 32)

    def _indexed(self, key: bytes, value: bytes) -> None:
        row = read_index(key, value)
        self._figures.saw_index(row)
        place = place_of(row, self._names)
        if place is None and not self._names.has(row.scope):  # a topic without a record, if it has messages
            place = (row.scope, row.receipt.queue_id)
            place = place if place in self._spans else None
        if place is not None:
            self._reaches(place, row.receipt.queue_offset + 1)

    def _arrived(self, key: bytes, block: bytes) -> None:
        self._figures.saw_boot(block_head(block).boot)
        for record in decode_block(key, block):
            event = decode_event(record.event)
            if event.kind in _ARRIVALS and record.queue_offset != NOT_APPLICABLE:
                self._reaches((event.topic_id, event.queue_id), record.queue_offset + 1)

    def _reaches(self, place: Place, end: int) -> None:
        """Record the end of a queue, unless its topic was removed: other rows of such a topic may remain."""
        if place in self._spans or self._names.is_live(place[0]) or not self._names.has(place[0]):
            self._of(place).reaches(end)

    def _of(self, place: Place) -> OffsetMap:
        spans = self._spans.get(place)
        if spans is None:
            # A queue that does not begin at 0 has a begin row, which may be lost.
            unknown = None if self._look.has_holes(Family.META) else 0
            spans = self._spans[place] = OffsetMap(self._begins.get(place, unknown))
        return spans


def save_queues(look: Look, moves: MovedMessages, new: Replay, lost: LossReport, needed: RequiredNames) -> None:
    """Write the readable messages of all queues, and report the missing ones."""
    for page in look.pages(Family.QUEUE):
        for key, value in page:
            try:
                place, message = _read_queued(key, value)
            except StoreCorrupt:  # reported when the queues were measured
                continue
            offset = keys.queue_offset_of(key)
            if offset >= (moves.spans[place].begin or 0):
                needed.of_queued(place[0], message)
                new.put(Family.QUEUE, moves.queue_key(place, offset), value)
    for place, spans in sorted(moves.spans.items()):
        where = {"topic": needed.name(place[0]), "queue_id": place[1]}
        for first, end in spans.gaps():
            lost.tell("offsets", **where, first=first, end=end, is_certain=True)
            lost.offsets += end - first
        if spans.assumed_begin:
            lost.tell("offsets", **where, first=0, end=spans.assumed_begin, is_certain=False)
        move = moves.of(place)
        for run in move.runs if move is not None else ():
            lost.tell("moved", **where, first=run.first, end=run.end, to=run.to)


def _read_queued(key: bytes, value: bytes) -> tuple[Place, QueuedMessage]:
    if len(key) != keys.QUEUE_KEY_BYTES:
        raise StoreCorrupt(f"a queue key of {len(key)} bytes")
    topic_id, queue_id, _ = keys.unpack_queue_key(key)
    return (topic_id, queue_id), decode_queued(value)


def save_progress(look: Look, moves: MovedMessages, new: Replay, names: KnownNames, needed: RequiredNames) -> None:
    """Write the progress of groups, the outcomes of dead letters, and the committed offsets of pulling groups."""
    begun: dict[tuple[int, int], set[int]] = {}  # queues by group and topic
    for (group_id, topic_id, queue_id), rows in groupby(_progress(look), key=lambda row: row[:3]):
        found = list(rows)
        needed.topic(topic_id)
        if group_id:
            needed.group(group_id)
            begun.setdefault((group_id, topic_id), set()).add(queue_id)
        move = moves.of(found[0].place)
        for key, value in _moved(found, move) if move is not None else map(_row, found):
            new.put(Family.GROUP, key, value)
    if not look.has_holes(Family.GROUP):
        return
    # A group without a row for a queue would start there like a new group, possibly at its end.
    for (group_id, topic_id), queue_ids in begun.items():
        for queue_id in set(range(names.topics_by_id[topic_id].queues)) - queue_ids:
            move = moves.of((topic_id, queue_id))
            key = pack_group_key(group_id, topic_id, queue_id, GroupKind.FLOOR, 0)
            new.put(Family.GROUP, key, keys.pack_u64(move.begin if move is not None else 0))


def _progress(look: Look) -> Iterator[ProgressRow]:
    for page in look.pages(Family.GROUP):
        for key, value in page:
            try:
                yield read_progress(key, value)
            except StoreCorrupt:  # reported when the queues were measured
                continue


def _row(row: ProgressRow) -> tuple[bytes, bytes]:
    return pack_group_key(row.group_id, row.topic_id, row.queue_id, row.kind, row.number), row.value


def _moved(rows: list[ProgressRow], move: MovedRange) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of one group and queue with the new offsets."""
    group_id, topic_id, queue_id = rows[0][:3]
    of_group = [row for row in rows if row.kind in _OF_PROGRESS]
    if of_group:
        old, new = GroupQueue(group_id, topic_id, queue_id), GroupQueue(group_id, topic_id, queue_id)
        old.load([_row(row) for row in of_group])
        ops: list[Op] = [*new.start_at(move.begin)]
        done = (move.of(offset) for offset in move.offsets() if old.is_finished(offset))
        ops += new.finish([offset for offset in done if offset is not None])
        puts = {op.key: op.value for op in ops if isinstance(op, Put)}
        yield from ((key, puts[key]) for key in sorted(puts))
        rows = [row for row in rows if row.kind is not GroupKind.EXCEPTION or not old.is_finished(row.number)]
    for row in rows:
        if row.kind is GroupKind.COMMITTED:
            yield _row(row)[0], keys.pack_u64(move.place(keys.unpack_u64(row.value)))
        elif row.kind in {GroupKind.EXCEPTION, GroupKind.OUTCOME} and (to := move.of(row.number)) is not None:
            yield _row(row._replace(number=to))
