"""Schedules in the store of a stopped daemon: three rows each, and an entry of the timeline while they wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker_adapter.contracts.message import pack_id
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.rows import TimelineRow
from dmq.store.schema import keys
from dmq.store.schema.messages.recurring import (
    Phase,
    RecurrenceRule,
    ScheduleProgress,
    decode_message,
    decode_progress,
    decode_schedule,
)

SCHEDULE_LETTERS = (keys.META_SCHEDULE, keys.META_PROGRESS, keys.META_RECURRING)


class Parts(NamedTuple):
    """Readable parts of a schedule."""

    schedule: RecurrenceRule
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

    def saw_entry(self, each: TimelineRow) -> None:
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
            assert isinstance(schedule, RecurrenceRule)
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
