"""Times in which a topic kept back due messages, from the events of operators' changes: reasons for late deliveries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

_NO_END = 2**63 - 1
# Held messages resume slowly: for this long after the end of a pause or a rate limit, it still explains lateness.
_DRAIN_MS = 15_000
PAUSED, SLOWED = "paused", "slowed"


class TopicPause(NamedTuple):
    """Period in which a topic was ``why`` (paused or slowed)."""

    topic: str
    from_ms: int
    to_ms: int
    why: str


def pauses_of(events: Iterable[Any]) -> dict[str, list[TopicPause]]:
    """Return the pauses of topics by cell. ``events`` are rows of any kinds, sorted by cell and sequence."""
    found: dict[str, list[TopicPause]] = {}
    for row in events:
        if row["kind"] == "TOPIC_REMOVED":
            said = ["resumed", "deliver_rate=0"]
        elif row["kind"] == "TOPIC_CHANGED":
            said = bytes(row["message_id"] or b"")[1:].decode(errors="replace").split()
        else:
            continue
        for word in said:
            _take(found.setdefault(row["cell"], []), row["topic"], row["at_ms"], word)
    return found


def joined(pauses: Iterable[TopicPause], *, within_ms: int) -> list[tuple[str, int, int]]:
    """Return (topic, from, to) of the pauses, merged across reasons and across breaks of at most ``within_ms``."""
    found: list[tuple[str, int, int]] = []
    for topic, from_ms, to_ms, _ in sorted(pauses):
        if found and found[-1][0] == topic and from_ms <= found[-1][2] + within_ms:
            found[-1] = (topic, found[-1][1], max(found[-1][2], to_ms))
        else:
            found.append((topic, from_ms, to_ms))
    return found


def _take(pauses: list[TopicPause], topic: str, at_ms: int, word: str) -> None:
    why = SLOWED if word.startswith("deliver_rate=") else PAUSED
    begins = word == PAUSED or (why is SLOWED and word != "deliver_rate=0")
    if not begins and why is PAUSED and word != "resumed":
        return
    is_open = [(each.topic, each.to_ms, each.why) == (topic, _NO_END, why) for each in pauses]
    number = is_open.index(True) if any(is_open) else None
    if begins and number is None:
        pauses.append(TopicPause(topic, at_ms, _NO_END, why))
    elif not begins and number is not None:
        pauses[number] = pauses[number]._replace(to_ms=at_ms + _DRAIN_MS)
