"""Salvage of the audit outbox and the figures of a store: lost figures are derived from the saved rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.topics import Names
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.look import Look
from dmq.recovery.reading.loss_report import LossReport
from dmq.recovery.reading.names import NAME_LETTERS
from dmq.recovery.reading.offset_map import MovedMessages
from dmq.recovery.reading.rows import Indexed, read_begin, read_figure
from dmq.recovery.salvage.replay import Replay
from dmq.store.schema import keys
from dmq.store.schema.accounting.outbox import (
    NOT_APPLICABLE,
    OutboxState,
    decode_block,
    decode_state,
    encode_block,
    encode_state,
    pack_record_head,
)
from dmq.store.schema.keys import FORMAT_VERSION, Family, pack_pair, pack_u64
from dmq.store.schema.operators.orders import Procedure, decode_job, decode_procedure, encode_job, encode_procedure
from dmq.store.writer.operations import Delete
from dmq.trail.events import decode_event, gap_event

BadRow = Callable[[Family, bytes, str], None]

_FIRST_GENERATION = 2


@dataclass(slots=True)
class SalvagedFigures:
    """Values from which the writer continues, raised by the rows read; 0 if unknown."""

    boot: int
    sequence: int
    generation: int
    outbox: OutboxState | None
    now_ms: int

    @classmethod
    def of(cls, look: Look, now_ms: int) -> Self:
        """Read the stored figures."""
        found = {key: value for key, value in look.rows(Family.META, b"A", b"Z") if len(key) == 1}

        def number(key: bytes) -> int:
            return int.from_bytes(found.get(key, b""), "big")

        try:
            outbox = decode_state(found[keys.META_OUTBOX]) if keys.META_OUTBOX in found else None
        except StoreCorrupt:
            outbox = None
        generation = max(number(keys.META_GENERATION) >> 64, _FIRST_GENERATION)
        return cls(number(keys.META_BOOT), number(keys.META_SEQUENCE), generation, outbox, now_ms)

    def saw_index(self, row: Indexed) -> None:
        """Record an index row."""
        self.sequence = max(self.sequence, row.receipt.sequence)
        self.generation = max(self.generation, row.generation)

    def saw_boot(self, boot: int) -> None:
        """Record a run of the daemon."""
        self.boot = max(self.boot, boot)

    def rows(self) -> list[tuple[bytes, bytes]]:
        """Return the rows from which the new store starts; it counts the bytes of all entries."""
        return [
            (keys.META_FORMAT, pack_u64(FORMAT_VERSION)),
            (keys.META_BOOT, pack_u64(self.boot)),
            (keys.META_BYTES_HEAD, pack_pair(self.boot, 0)),
            (keys.META_SEQUENCE, pack_u64(self.sequence)),
            (keys.META_GENERATION, pack_pair(self.generation, 0)),
        ]


def save_audit(look: Look, new: Replay, lost: LossReport, figures: SalvagedFigures) -> None:
    """Write the outbox, followed by a gap event for each missing range."""
    state = figures.outbox
    at = state.first_sequence if state is not None else None
    first, size = at, 0
    missing: list[tuple[int, int]] = []
    for page in look.pages(Family.AUDIT):
        for key, block in page:
            sequence = int.from_bytes(key, "big")
            try:
                events = [decode_event(record.event) for record in decode_block(key, block)]
            except StoreCorrupt as error:
                lost.tell("row", family="audit", key=key.hex(), error=str(error))
                continue
            if at is None:
                first = at = sequence
            if sequence < at:  # exported and dropped; the deletion was in a lost table
                continue
            if sequence > at:
                missing.append((at, sequence - at))
            new.put(Family.AUDIT, key, block)
            size += len(block)
            at = sequence + len(events)
    at, first = at or 1, first or 1
    if state is not None and state.next_sequence > at:
        missing.append((at, state.next_sequence - at))
        at = state.next_sequence
    records: list[bytes] = []
    for start, count in missing:
        lost.tell("audit", first=start, end=start + count)
        event = gap_event(start, count)
        records += (pack_record_head(len(event), NOT_APPLICABLE, NOT_APPLICABLE), event)
    if records:
        block = encode_block(figures.boot, figures.now_ms, len(missing), records)
        new.put(Family.AUDIT, pack_u64(at), block)
        at, size = at + len(missing), size + len(block)
    gone = (state.lost if state is not None else 0) + sum(count for _, count in missing)
    figures.outbox = OutboxState(first, at, size, gone)


def save_meta(
    look: Look, moves: MovedMessages, new: Replay, names: Names, figures: SalvagedFigures, bad_row: BadRow
) -> None:
    """Write the figures, and the unfinished jobs and procedures of operators."""
    moved = moves.begins()
    for place, begin in moved.items():
        new.put(Family.META, keys.begin_key(*place), pack_u64(begin))
    for key, value in look.rows(Family.META):
        if key[:1] in NAME_LETTERS:
            continue
        try:
            kind = read_figure(key, value)
        except StoreCorrupt as error:
            bad_row(Family.META, key, str(error))
            continue
        if kind == "job":
            new.put(Family.META, key, _job(value, moves, names))
        elif kind == "procedure":
            new.put(Family.META, key, _procedure(decode_procedure(key, value), moves))
        elif kind in {"other", "reset", "activity", "notification", "message job"} or (
            kind == "begin" and read_begin(key, value)[0] not in moved
        ):
            new.put(Family.META, key, value)
    assert figures.outbox is not None
    new.put(Family.META, keys.META_OUTBOX, encode_state(figures.outbox))
    new.put(Family.META, keys.META_GENERATION, pack_pair(figures.generation, 0))  # no time of it has passed
    new.add(Delete(Family.META, keys.META_CLOCK))  # that of this command


def _job(value: bytes, moves: MovedMessages, names: Names) -> bytes:
    """Return a dead-letter job, adjusted to the new offsets of its queue."""
    job = decode_job(value)
    topic = names.topics.get(dead_letter_topic(job.group))
    move = moves.of((topic.topic_id, 0)) if topic is not None else None
    if move is None:
        return value
    first, following, end = (move.place(each) for each in (job.first_offset, job.next_offset, job.end_offset))
    return encode_job(replace(job, first_offset=first, next_offset=following, end_offset=end))


def _procedure(procedure: Procedure, moves: MovedMessages) -> bytes:
    """Return a removal unchanged, a reset with the new offsets of its topic's queues."""

    def placed(offsets: tuple[int, ...]) -> tuple[int, ...]:
        found = [moves.of((procedure.topic_id, queue_id)) for queue_id in range(len(offsets))]
        return tuple(move.place(at) if move is not None else at for move, at in zip(found, offsets, strict=True))

    return encode_procedure(procedure._replace(first=placed(procedure.first), end=placed(procedure.end)))
