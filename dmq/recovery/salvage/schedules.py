"""Salvage of schedules: their three rows, as a whole or not at all."""

from __future__ import annotations

from broker_adapter.contracts.message import pack_id
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.look import Look
from dmq.recovery.reading.loss_report import LossReport
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.rows import TimelineRow
from dmq.recovery.reading.schedules import SCHEDULE_LETTERS, parts_of
from dmq.recovery.salvage.replay import Replay
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.recurring import Phase, encode_progress, schedule_keys, schedule_name

_LOST_ENTRY = "its entry was lost, and how often it occurred since; resume it"


def save_schedules(look: Look, new: Replay, names: KnownNames, lost: LossReport) -> None:
    """Write complete schedules. A schedule without its entry is paused: its occurrences since then are unknown."""
    found = {key[1:] for letter in SCHEDULE_LETTERS for key, _ in look.rows(Family.META, *keys.meta_range(letter))}
    for encoded in sorted(found):
        rows = [letter + encoded for letter in SCHEDULE_LETTERS]
        values = look.find_many(Family.META, rows)
        try:
            name = schedule_name(rows[0])
            schedule, progress = parts_of(values)
            if not names.is_live(schedule.topic_id):
                raise StoreCorrupt("its topic is gone")
        except StoreCorrupt as error:
            lost.tell("schedule", name=encoded.decode(errors="replace"), error=str(error))
            continue
        index_key = keys.pack_index_prefix(0, keys.recurring_scope(schedule.topic_id)) + pack_id(name)
        if progress.phase is Phase.WAITING and new.get_many(Family.INDEX, [index_key])[0] is None:
            progress = progress._replace(phase=Phase.PAUSED, next_ms=0, why=_LOST_ENTRY)
            lost.tell("schedule", name=name, error=_LOST_ENTRY)
        for row, value in zip(rows, values, strict=True):
            new.put(Family.META, row, encode_progress(progress) if row == rows[1] else value or b"")


def is_whole(look: Look, each: TimelineRow) -> bool:
    """Return True if the schedule of an entry can be read and is active."""
    rows = schedule_keys(shown_id(each.message_id))
    try:
        parts = parts_of(look.find_many(Family.META, rows))
    except StoreCorrupt:
        return False
    return parts.progress.phase is Phase.WAITING and parts.schedule.topic_id == each.entry.topic_id
