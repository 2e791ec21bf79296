"""Correction after a wall clock step: the step is recorded, and delays that it stretched are shifted back.

Some delays count from their start: a delay level, ``TIMER_DELAY_MS``, a retry, the next check of a half message. Such a
delay is stored as the wall-clock time of its end. If it started while the clock was ahead, a step back makes it too
long by that step.

After each step back the timeline is therefore scanned once, from now on. Entries with an acceptance time in the future
are shifted by the step, at most to their own delay from now. A delivery timestamp given by a sender is never changed.

The work is done in the scheduler's thread, a little in each turn. The unfinished steps and the progress of the first
one are stored in a row. A kill therefore repeats at most a scan of entries that are already corrected.
"""

from __future__ import annotations

import structlog

from broker_adapter.contracts.message import pack_id
from dmq.store import Store
from dmq.store.files.steady_clock import STEP_MS, ClockNews, News
from dmq.store.schema.cell.clock import Move, decode_moves, encode_clock, encode_moves
from dmq.store.schema.keys import META_CLOCK, META_MOVES, TIMELINE_END, Family, timeline_key, timeline_mark
from dmq.store.schema.messages.index import ids_of
from dmq.store.schema.messages.own_keys import row_of
from dmq.store.schema.messages.record import (
    HALF_KINDS,
    WAITING_HEADER_BYTES,
    EntryKind,
    WaitingEntry,
    decode_waiting,
    encode_waiting,
)
from dmq.store.writer.operations import Delete, Emit, IfKnown, Op, Put, Reschedule
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

log = structlog.get_logger("dmq.scheduler")

ROWS_PER_TURN = 512
BYTES_PER_TURN = 2 * 1024 * 1024
_MOVES_MAX = 64  # further steps are dropped: the oldest ones have the most progress
_RELATIVE = frozenset((int(EntryKind.RETRY), int(EntryKind.DELAYED_FOR)))


class ClockStepCorrection:
    """Corrects delays after backward steps of a store's clock. Used only by the scheduler's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clock = store.clock
        (kept,) = store.get_many(Family.META, [META_MOVES])
        self._moves = decode_moves(kept) if kept is not None else []
        self.moved_total = 0

    def turn(self, now_ms: int) -> bool:
        """Record new clock events and shift a few delays, durable on return; return True if there is more to do."""
        if self._clock.has_news:
            self._record()
        if not self._moves:
            return False
        move = self._moves[0]
        start = max(move.mark, timeline_mark(now_ms + 1, 0))
        found = self._store.scan(
            Family.TIMELINE, timeline_key(start), TIMELINE_END, limit=ROWS_PER_TURN, bytes_max=BYTES_PER_TURN
        )
        now_ms = self._clock.now_ms()  # read after the scan: entries accepted since the step are then not in the future
        ops: list[Op] = []
        for key, value in found.rows:
            if (op := moved(key, value, move.by_ms, now_ms)) is not None:
                ops.append(op)
        self.moved_total += len(ops)
        if found.is_complete:
            moves = self._moves[1:]
        else:
            moves = [Move(move.by_ms, int.from_bytes(found.rows[-1][0], "big") + 1), *self._moves[1:]]
        if ops or found.is_complete:  # otherwise a kill only repeats the scan
            self._store.commit([*ops, _kept(moves)], is_urgent=True)
        self._moves = moves
        if found.is_complete:
            log.info("delays_moved", step_ms=-move.by_ms, moved_total=self.moved_total)
        return bool(moves)

    def _record(self) -> None:
        news, row = self._clock.news()
        ops: list[Op] = [Emit(_event(each)) for each in news]
        moves = [*self._moves, *(Move(-each.moved_ms, 0) for each in news if each.moved_ms <= -STEP_MS)][:_MOVES_MAX]
        ops += [Put(Family.META, META_CLOCK, encode_clock(row)), _kept(moves)]
        self._store.commit(ops, is_urgent=True)
        self._clock.recorded(len(news))
        self._moves = moves
        for each in news:
            _log(each)


def moved(key: bytes, value: bytes, by_ms: int, now_ms: int) -> Reschedule | None:
    """Return the op that shifts a delay after a step back by ``by_ms``; ``None`` if the entry needs no change."""
    entry = decode_waiting(value)
    own_ms = entry.deliver_at_ms - entry.accepted_at_ms
    if entry.kind in HALF_KINDS:
        # The time when its next check was set is not stored. A check that was due by the clock before the step
        # was set after it: otherwise it would have been done already.
        if entry.deliver_at_ms <= now_ms + by_ms:
            return None
        due_ms, accepted_ms = max(now_ms + 1, entry.deliver_at_ms - by_ms), min(entry.accepted_at_ms, now_ms)
    elif entry.kind in _RELATIVE and entry.accepted_at_ms > now_ms:
        due_ms = max(now_ms + 1, min(entry.deliver_at_ms - by_ms, now_ms + own_ms))
        accepted_ms = due_ms - own_ms
    else:
        return None
    if due_ms >= entry.deliver_at_ms:
        return None
    record = _with_times(entry, due_ms, accepted_ms, value[WAITING_HEADER_BYTES:])
    message_id, entry_id, _ = ids_of(entry, value)
    event = b""
    if entry.kind == EntryKind.DELAYED_FOR:
        event = encode_event(EventKind.RESCHEDULED, entry.topic_id, 0, NO_QUEUE, 0, due_ms, message_id)
    times = entry.deliver_at_ms, due_ms
    return Reschedule(
        *(key, entry.scope, entry_id, *times, record, event), if_gone=IfKnown.ANSWER, own_key=row_of(value)
    )


def _with_times(entry: WaitingEntry, due_ms: int, accepted_ms: int, rest: bytes) -> bytes:
    return encode_waiting(entry.kind, entry.retry_count, entry.topic_id, entry.scope, due_ms, max(0, accepted_ms), rest)


def _event(news: ClockNews) -> bytes:
    kind = EventKind.CLOCK_ACCEPTED if news.news is News.ACCEPTED else EventKind.CLOCK_CHANGED
    said = f"{news.news.value} step_ms={news.step_ms} moved_ms={news.moved_ms}"
    said += f" why={news.why}" if news.why else ""
    return encode_event(kind, 0, 0, NO_QUEUE, 0, news.wall_ms, pack_id(said))


def _log(news: ClockNews) -> None:
    said = {"step_ms": news.step_ms, "moved_ms": news.moved_ms, "wall_ms": news.wall_ms, "was_down": news.was_down}
    match news.news:
        case News.STEPPED:
            log.warning("clock_stepped", **said)
        case News.HELD:
            log.error("clock_held", **said)
        case News.BELIEVED:
            log.warning("clock_believed", **said)
        case News.STEADY:
            log.info("clock_steady", **said)
        case News.ACCEPTED:
            log.warning("clock_accepted", why=news.why, **said)


def _kept(moves: list[Move]) -> Op:
    if not moves:
        return Delete(Family.META, META_MOVES)
    return Put(Family.META, META_MOVES, encode_moves(moves))
