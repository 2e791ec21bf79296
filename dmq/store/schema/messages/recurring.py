"""Rows of recurring messages in the meta family, keyed by schedule name: the schedule, its progress and its message.

schedule   version 1 | JSON: topic_id, every_ms or cron and zone, start_ms, end_ms, count, jitter_ms, catch_up,
           message_group, created_at_ms; fields that are 0 or empty are left out
progress   version 1 | phase 1 | occurrences 8 | last_ms 8 | next_ms 8 | why, as text
message    version 1 | body, as in a timeline value; its message has no id yet

An active schedule has a timeline entry of kind RECURRING, in a separate scope per topic. The body of the entry has only
a message id, which is the schedule's name, and the message group.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import META_PROGRESS, META_RECURRING, META_SCHEDULE

VERSION = 1
_VERSION = bytes((VERSION,))
_PROGRESS = struct.Struct(">BBQQQ")


class CatchUp(IntEnum):
    """Policy for occurrences that were due while nothing could be sent."""

    ONE = 1  # the last of them is sent, late
    ALL = 2  # each is sent
    SKIP = 3  # none is sent


class RecurrenceRule(NamedTuple):
    """Rule of a recurring message: every ``every_ms``, or ``cron`` in time zone ``zone``. 0: no start, end or count."""

    topic_id: int
    every_ms: int = 0
    cron: str = ""
    zone: str = ""
    start_ms: int = 0
    end_ms: int = 0
    count: int = 0  # type: ignore[assignment]  # hides an unused method of tuples
    jitter_ms: int = 0
    catch_up: CatchUp = CatchUp.ONE
    message_group: str = ""
    created_at_ms: int = 0


class Phase(IntEnum):
    """Phase of a schedule: active, paused or ended."""

    WAITING = 1  # it has a timeline entry
    PAUSED = 2
    ENDED = 3


class ScheduleProgress(NamedTuple):
    """Progress of a schedule. Times are those of its rule, without jitter; 0: none."""

    phase: Phase
    occurrences: int = 0  # sent so far; occurrences are numbered from 1
    last_ms: int = 0
    next_ms: int = 0
    why: str = ""  # reason of a pause by the daemon itself


def encode_schedule(schedule: RecurrenceRule) -> bytes:
    """Return the value of a schedule's row."""
    return _VERSION + json.dumps({name: value for name, value in schedule._asdict().items() if value}).encode()


def decode_schedule(value: bytes) -> RecurrenceRule:
    """Decode a schedule's row; raise ``StoreCorrupt`` if it is invalid."""
    try:
        if value[:1] != _VERSION:
            raise ValueError("unknown version")
        found = RecurrenceRule(**json.loads(value[1:]))
        for default, given in zip(RecurrenceRule(0), found, strict=True):
            if type(given) is not (str if isinstance(default, str) else int) or (isinstance(given, int) and given < 0):
                raise ValueError(f"{given!r:.60} is no part of it")
        if bool(found.every_ms) == bool(found.cron):
            raise ValueError("it has no rule, or two")
        return found._replace(catch_up=CatchUp(found.catch_up))
    except (ValueError, TypeError) as error:
        raise StoreCorrupt(f"a schedule cannot be read: {error}") from error


def encode_progress(progress: ScheduleProgress) -> bytes:
    """Return the value of a schedule's progress row."""
    return _PROGRESS.pack(VERSION, *progress[:-1]) + progress.why.encode()


def decode_progress(value: bytes) -> ScheduleProgress:
    """Decode a schedule's progress row; raise ``StoreCorrupt`` if it is invalid."""
    try:
        version, phase, occurrences, last_ms, next_ms = _PROGRESS.unpack_from(value)
        if version != VERSION:
            raise ValueError("unknown version")
        return ScheduleProgress(Phase(phase), occurrences, last_ms, next_ms, value[_PROGRESS.size :].decode())
    except (struct.error, ValueError) as error:
        raise StoreCorrupt(f"how far a schedule is cannot be read: {error}") from error


def encode_message(body: bytes) -> bytes:
    """Return the value of the row of a schedule's message."""
    return _VERSION + body


def decode_message(value: bytes) -> bytes:
    """Return the body of a schedule's message; raise ``StoreCorrupt`` if the version is unknown."""
    if value[:1] != _VERSION:
        raise StoreCorrupt(f"the message of a schedule, {len(value)} bytes, has no version {VERSION} header")
    return value[1:]


def schedule_keys(name: str) -> tuple[bytes, bytes, bytes]:
    """Return the meta keys of a schedule, of its progress and of its message."""
    encoded = name.encode()
    return META_SCHEDULE + encoded, META_PROGRESS + encoded, META_RECURRING + encoded


def schedule_name(key: bytes) -> str:
    """Return the schedule name in a meta key; raise ``StoreCorrupt`` if it is not UTF-8."""
    try:
        return key[1:].decode()
    except UnicodeDecodeError as error:
        raise StoreCorrupt(f"the key {key.hex()} holds a name that is no text") from error
