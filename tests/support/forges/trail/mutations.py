"""Lies about messages: each mutator changes ``count`` messages of a cell, and says which ones an audit must find.

They work on any trail in the format of docs/reference/trail.md. ``avoid`` holds messages that an earlier mutator took,
so that several can be laid over one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from support.forges.trail.bend import Bent, Life
from support.forges.trail.files import HOUR_MS, Event, text_of

LATE_AFTER_MS = 60_000
_EXITS = {"ACKED", "FILTERED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """What must be found: findings of ``kind`` about these messages (of a group, where it is one's loss).

    ``message_ids`` holds all; ``findings`` the (kind, group, message id) that must be there and no other.
    """

    kind: str
    cell: str
    findings: frozenset[tuple[str, str | None, str]]

    @property
    def message_ids(self) -> frozenset[str]:
        """The messages concerned."""
        return frozenset(message_id for _, _, message_id in self.findings)


Mutator = Callable[[Path, str, int, int, Iterable[str]], Lie]


def _lie(kind: str, bent: Bent, found: Iterable[tuple[str | None, str]]) -> Lie:
    return Lie(kind=kind, cell=bent.cell, findings=frozenset((kind, group, each) for group, each in found))


def lose_hand_over(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Messages were scheduled and never handed over; the store does not hold them any more."""
    bent = Bent(trail, cell)
    chosen = bent.pick(count, seed, bent.lives(avoid))
    for life in chosen:
        bent.drop_place(life)
        for event in (life.delivered, *life.later):
            bent.drop(event)
    bent.save()
    return _lie("LOST", bent, ((None, life.message_id) for life in chosen))


def lose_exit(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """A group never finished messages, although the store believes that it did."""
    bent = Bent(trail, cell)
    random = Random(seed)
    exits = {life.message_id: [each for each in life.later if _is_exit(each, bent)] for life in bent.lives(avoid)}
    chosen = bent.pick(count, seed, [life for life in bent.lives(avoid) if exits[life.message_id]])
    found = []
    for life in chosen:
        left = random.choice(exits[life.message_id])
        bent.drop(left)
        found.append((left.group, life.message_id))
    bent.save()
    return _lie("LOST", bent, found)


def _is_exit(event: Event, bent: Bent) -> bool:
    return event.kind in _EXITS and event.sequence <= bent.snapshot_sequence


def double_delivery(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Entries were handed over twice; every group went through both."""
    bent = Bent(trail, cell)
    chosen = bent.pick(count, seed, bent.lives(avoid))
    _double(bent, chosen, lambda life: (life.delivered, *life.later))
    bent.save()
    return _lie("DUPLICATE_DELIVERY", bent, ((None, life.message_id) for life in chosen))


def double_accept(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Messages were accepted twice, as two entries, and both went the whole way."""
    bent = Bent(trail, cell)
    entry = max(event.entry or 0 for event in bent.events)
    chosen = bent.pick(count, seed, bent.lives(avoid))
    entries = {life.message_id: entry + number for number, life in enumerate(chosen, start=1)}
    for life in chosen:
        bent.add_entry(life.scheduled.entry or 0, entries[life.message_id])
    _double(bent, chosen, lambda life: (life.scheduled, life.delivered, *life.later), entries)
    bent.save()
    return _lie("DUPLICATE_ACCEPT", bent, ((None, life.message_id) for life in chosen))


def _double(
    bent: Bent,
    chosen: list[Life],
    events_of: Callable[[Life], tuple[Event, ...]],
    entries: Mapping[str, int] | None = None,
) -> None:
    for life in chosen:
        bent.double_place(life)
    for life in chosen:
        for event in events_of(life):
            twin = event
            if event.queue_offset is not None:
                twin = bent.added_offset(event, event.queue_offset)
            if entries is not None and event.entry is not None:
                twin = twin._replace(entry=entries[life.message_id])
            bent.add(event, twin)


def double_exit(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """A group left the same place twice."""
    bent = Bent(trail, cell)
    random = Random(seed)
    lives = [life for life in bent.lives(avoid) if any(event.kind == "ACKED" for event in life.later)]
    chosen, found = bent.pick(count, seed, lives), []
    for life in chosen:
        left = random.choice([event for event in life.later if event.kind == "ACKED"])
        bent.add(left, left)
        found.append((left.group, life.message_id))
    bent.save()
    return _lie("DUPLICATE_EXIT", bent, found)


def delay(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Messages were handed over long after they were due."""
    bent = Bent(trail, cell)
    random = Random(seed)
    last_ms = bent.events[-1].at_ms
    lives = [life for life in bent.lives(avoid) if _due_ms(life) + 2 * LATE_AFTER_MS < last_ms]
    chosen = bent.pick(count, seed, lives)
    for life in chosen:
        at_ms = _due_ms(life) + LATE_AFTER_MS + 1 + random.randrange(LATE_AFTER_MS // 2)
        bent.put(life.delivered._replace(at_ms=at_ms))
    bent.save()
    return _lie("LATE", bent, ((None, life.message_id) for life in chosen))


def hasten(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Messages were handed over before they were due."""
    bent = Bent(trail, cell)
    random = Random(seed)
    lives = [life for life in bent.lives(avoid) if _due_ms(life) - life.scheduled.at_ms > 2]
    chosen = bent.pick(count, seed, lives)
    for life in chosen:
        bent.put(life.delivered._replace(at_ms=random.randrange(life.scheduled.at_ms, _due_ms(life))))
    bent.save()
    return _lie("EARLY", bent, ((None, life.message_id) for life in chosen))


def misdate(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Hand-overs name another delivery time than the one that was set: nobody could say how late they were."""
    bent = Bent(trail, cell)
    chosen = bent.pick(count, seed, bent.lives(avoid))
    for life in chosen:
        bent.put(life.delivered._replace(due_ms=_due_ms(life) - 1))
    bent.save()
    return _lie("ILLEGAL", bent, ((None, life.message_id) for life in chosen))


def reorder(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Messages were handed over before they were accepted, by the numbers of the events."""
    bent = Bent(trail, cell)
    lives = [life for life in bent.lives(avoid) if _is_within_an_hour(life)]
    chosen = bent.pick(count, seed, lives)
    for life in chosen:
        first, second = life.scheduled, life.delivered
        bent.put(second._replace(sequence=first.sequence, boot=first.boot))
        bent.put(first._replace(sequence=second.sequence, boot=second.boot))
    bent.save()
    return _lie("ILLEGAL", bent, ((None, life.message_id) for life in chosen))


def lose_sent(trail: Path, cell: str, count: int, seed: int, avoid: Iterable[str] = ()) -> Lie:
    """Entries of a spool were never sent; the store does not hold them any more."""
    bent = Bent(trail, cell)
    avoided, entries = set(avoid), defaultdict[bytes, list[Event]](list)
    for event in bent.events:
        if event.message_id is not None:
            entries[event.message_id].append(event)
    ends = [
        events
        for message_id, events in entries.items()
        if (events[0].kind, events[-1].kind) == ("SCHEDULED", "SENT")
        and events[-1].sequence < bent.snapshot_sequence
        and text_of(message_id) not in avoided
    ]
    chosen = Random(seed).sample(ends, count)
    for events in chosen:
        for event in events[1:]:
            bent.drop(event)
    bent.save()
    return _lie("LOST", bent, ((None, text_of(events[0].message_id or b"")) for events in chosen))


def _due_ms(life: Life) -> int:
    assert life.scheduled.due_ms is not None
    return life.scheduled.due_ms


def _is_within_an_hour(life: Life) -> bool:
    return life.scheduled.at_ms // HOUR_MS == life.delivered.at_ms // HOUR_MS


MUTATORS: Mapping[str, Mutator] = {
    "lose_hand_over": lose_hand_over,
    "lose_exit": lose_exit,
    "double_delivery": double_delivery,
    "double_accept": double_accept,
    "double_exit": double_exit,
    "delay": delay,
    "hasten": hasten,
    "reorder": reorder,
    "misdate": misdate,
}
SPOOL_MUTATORS: Mapping[str, Mutator] = {"lose_sent": lose_sent}
