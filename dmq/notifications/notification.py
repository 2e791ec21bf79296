"""Content of notifications, as JSON in the envelope of Standard Webhooks: type, timestamp, data. Pure.

No notification contains a body, a key or a property of a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dmq.broker.operations import Letter
from dmq.config.units import format_time

SAMPLES_MAX: Final = 5  # message ids of each error, and of overdue messages
ERRORS_MAX: Final = 10
NAMES_MAX: Final = 20  # topics and groups with overdue messages
_ERROR_CHARS_MAX: Final = 300


class Notification(NamedTuple):
    """Notification to deliver. A receiver can drop a repetition by its id."""

    kind: str
    notification_id: str
    body: bytes


class DeadLetterRange(NamedTuple):
    """New dead letters of a group: the offsets in its dead-letter queue, and the first letters, which were read."""

    group: str
    first: int
    end: int
    total: int
    letters: Sequence[Letter]


class OverdueCounts(NamedTuple):
    """Overdue messages by topic, overdue retries by group, and the ids of the oldest ones."""

    topics: Mapping[str, int]
    groups: Mapping[str, int]
    oldest_due_ms: int
    message_ids: Sequence[str]


def of_dead_letters(cell_id: str, found: DeadLetterRange, now_ms: int) -> Notification:
    """Return the notification of new dead letters. The same letters have the same id."""
    errors: dict[tuple[str, str, str], list[str]] = {}
    for letter in found.letters:
        dead = letter.dead
        error = dead.failure.error[:_ERROR_CHARS_MAX] if dead.failure is not None else ""
        reason = dead.reason.name.lower() if dead.reason is not None else ""
        errors.setdefault((dead.origin_topic, reason, error), []).append(dead.message_id)
    frequent = sorted(errors.items(), key=lambda each: -len(each[1]))
    data = {
        "cell": cell_id,
        "group": found.group,
        "count": found.total,
        "first_offset": found.first,
        "end_offset": found.end,
        "errors": [
            {"topic": topic, "reason": reason, "error": error, "count": len(ids), "message_ids": ids[:SAMPLES_MAX]}
            for (topic, reason, error), ids in frequent[:ERRORS_MAX]
        ],
        "count_without_error": found.total - sum(len(ids) for _, ids in frequent[:ERRORS_MAX]),
    }
    place = f"{cell_id}_{found.group}_{found.first}_{found.end}"  # no dot: it separates the parts of a signed text
    return _notification("dead_letter", f"dead_letter_{place}", now_ms, data)


def of_overdue(cell_id: str, found: OverdueCounts, now_ms: int) -> Notification:
    """Return a new notification of overdue messages."""
    data = {
        "cell": cell_id,
        "count": sum(found.topics.values()) + sum(found.groups.values()),
        "oldest_due": format_time(found.oldest_due_ms),
        "topics": [{"topic": name, "count": count} for name, count in _most(found.topics)],
        "groups": [{"group": name, "retries": count} for name, count in _most(found.groups)],
        "message_ids": list(found.message_ids),
    }
    return _notification("overdue", _overdue_id(cell_id, now_ms), now_ms, data)


def stored_overdue(cell_id: str, made_at_ms: int, body: bytes) -> Notification:
    """Return a notification of overdue messages that was made and stored before."""
    return Notification("overdue", _overdue_id(cell_id, made_at_ms), body)


def _overdue_id(cell_id: str, made_at_ms: int) -> str:
    return f"overdue_{cell_id}_{made_at_ms}"


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:NAMES_MAX]


def _notification(kind: str, notification_id: str, now_ms: int, data: Mapping[str, object]) -> Notification:
    plain = {"type": f"rockdmq.{kind}", "timestamp": format_time(now_ms), "data": data}
    return Notification(kind, notification_id, json.dumps(plain, ensure_ascii=False).encode())
