"""Schedules in the store of a stopped daemon: three rows each, and an entry of the timeline while they wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker_adapter.contracts.message import pack_id
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.damage_reader import DamageReader
from dmq.recovery.reading.loss_report import LossReport
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.new_store import NewStore
from dmq.recovery.reading.rows import Waiting
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.recurring import (
    Phase,
    Schedule,
    ScheduleProgress,
    decode_message,
    decode_progress,
    decode_schedule,
    encode_progress,
    schedule_keys,
    schedule_name,
)

SCHEDULE_LETTERS = (keys.META_SCHEDULE, keys.META_PROGRESS, keys.META_RECURRING)
_LOST_ENTRY = "its entry was lost, and how often it occurred since; resume it"


class Parts(NamedTuple):
    """Readable parts of a schedule."""

    schedule: Schedule
    progress: ScheduleProgress


def parts_of(rows: list[bytes | None]) -> Parts:
    """Decode the three rows of a schedule; raise ``StoreCorrupt`` if one is missing or damaged."""
    if None in rows:
        raise StoreCorrupt("a part of it is gone")
    schedule, progress, message = (row or b"" for row in rows)
    decode_message(message)
    return Parts(decode_schedule(schedule), decode_progress(progress))


class ScheduleRows:
    """Collects the rows of each schedule, and reports inconsistent ones."""

    def __init__(self) -> None:
        self._rows: dict[bytes, dict[bytes, object]] = {}  # by encoded name, as in keys, and by letter
        self._entries: dict[bytes, int] = {}  # topic ids by packed name

    def saw_row(self, key: bytes, value: bytes) -> None:
        """Record a readable row; messages are not kept."""
        letter = key[:1]
        found: object = None
        if letter == keys.META_SCHEDULE:
            found = decode_schedule(value)
        elif letter == keys.META_PROGRESS:
            found = decode_progress(value)
        self._rows.setdefault(key[1:], {})[letter] = found

    def saw_entry(self, each: Waiting) -> None:
        """Record an entry of the timeline."""
        self._entries[each.message_id] = each.entry.topic_id

    def problems(self, names: KnownNames) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each finding."""
        for name, rows in sorted(self._rows.items()):
            try:
                shown = f"the schedule {name.decode()!r}"
                entry = self._entries.pop(pack_id(name.decode()), None)
            except UnicodeDecodeError:
                yield "row", f"the schedule {name.hex()} has a name that is no text"
                continue
            if rows.keys() != set(SCHEDULE_LETTERS):
                yield "row", f"{shown} is not whole"
                continue
            schedule, progress = rows[keys.META_SCHEDULE], rows[keys.META_PROGRESS]
            assert isinstance(schedule, Schedule)
            assert isinstance(progress, ScheduleProgress)
            if schedule.topic_id not in names.topics_by_id:
                yield "name", f"{shown} is of topic {schedule.topic_id}, which has no record"
            if (progress.phase is Phase.WAITING) != (entry is not None):
                has = "no entry" if entry is None else "an entry"
                yield "row", f"{shown} is {progress.phase.name.lower()}, and has {has}"
            elif entry is not None and entry != schedule.topic_id:
                yield "row", f"{shown} is of topic {schedule.topic_id}, and its entry of topic {entry}"
        for packed in self._entries:
            yield "row", f"the schedule {shown_id(packed)!r} has an entry, and is not there"


def save_schedules(pieces: DamageReader, new: NewStore, names: KnownNames, lost: LossReport) -> None:
    """Write complete schedules. A schedule without its entry is paused: its occurrences since then are unknown."""
    found = {key[1:] for letter in SCHEDULE_LETTERS for key, _ in pieces.rows(Family.META, *keys.meta_range(letter))}
    for encoded in sorted(found):
        rows = [letter + encoded for letter in SCHEDULE_LETTERS]
        values = pieces.get_many(Family.META, rows)
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


def is_whole(pieces: DamageReader, each: Waiting) -> bool:
    """Return True if the schedule of an entry can be read and is active."""
    rows = schedule_keys(shown_id(each.message_id))
    try:
        parts = parts_of(pieces.get_many(Family.META, rows))
    except StoreCorrupt:
        return False
    return parts.progress.phase is Phase.WAITING and parts.schedule.topic_id == each.entry.topic_id
