"""Cells of trails in which events disagree with what came before them."""

from __future__ import annotations

from typing import Any

from support.forges.trail.hand import START_MS, Hand


def delivered(hand: Hand, entry: int, at_ms: int, due_ms: int, offset: int | None = None) -> None:
    """Hand a message over; entries are numbered from 1, offsets from 0."""
    ids: dict[str, Any] = {"topic": hand.topic, "entry": entry, "message_id": hand.id_of(entry)}
    hand.add(
        "DELIVERED",
        at_ms,
        **ids,
        due_ms=START_MS + due_ms,
        queue_id=0,
        queue_offset=entry - 1 if offset is None else offset,
    )


def of_transaction(hand: Hand, kind: str, number: int) -> None:
    """Let a transaction go on."""
    hand.add(kind, 10, topic=hand.topic, entry=number if kind == "HALF" else None, message_id=hand.id_of(number))


def other_times(hand: Hand) -> None:
    for entry, at_ms in ((1, 5_000), (2, 610_000)):  # due at 10 s
        hand.scheduled(entry, 10_000)
        delivered(hand, entry, at_ms, at_ms)


def other_places(hand: Hand) -> None:
    hand.subscribed()
    for number in range(4):
        hand.queued(number, number)
    for number, offset in ((0, 1), (1, 0), (2, 2)):
        hand.of_group("ACKED", number, queue_id=0, queue_offset=offset)
    hand.of_group("NACKED", 3, queue_id=0, entry=13, attempt=1)
    hand.of_group("RETRIED", 3, queue_id=-1, queue_offset=0, entry=13, attempt=2)
    hand.of_group("ACKED", 3, queue_id=-1, queue_offset=7, attempt=2)


def other_copies(hand: Hand) -> None:
    """Fail a message four times: one copy comes as it should, others early, for another time, as another attempt."""
    hand.subscribed()
    for number, (at_ms, due_ms, attempt) in enumerate(((50, 50, 2), (40, 50, 2), (60, 60, 2), (50, 50, 3))):
        hand.queued(number, number)
        copy: dict[str, Any] = {"queue_id": -1, "queue_offset": number}
        failed_due: dict[str, Any] = {"due_ms": START_MS + 50, "attempt": 1}
        hand.of_group("NACKED", number, 10, queue_id=0, entry=10 + number, **failed_due)
        back: dict[str, Any] = {"due_ms": START_MS + due_ms, "attempt": attempt}
        hand.of_group("RETRIED", number, at_ms, entry=10 + number, **copy, **back)
        hand.of_group("ACKED", number, 70, attempt=attempt, **copy)


def transactions(hand: Hand) -> None:
    for number in range(1, 7):
        of_transaction(hand, "HALF", number)
    for number in (1, 2, 3):
        of_transaction(hand, "COMMITTED", number)
    hand.queued(1, 0)  # well
    hand.queued(2, 1)
    of_transaction(hand, "ROLLED_BACK", 2)  # ended twice; 3 is committed, and nobody has it
    of_transaction(hand, "ROLLED_BACK", 4)  # well; 5 is gone
    of_transaction(hand, "ROLLED_BACK", 9)  # never began
    hand.snapshot([hand.held(6, 20_000, "TRANSACTION")])


def absorbed(hand: Hand) -> None:
    """Commit a message whose own key another one waits under, which is to stay."""
    hand.scheduled(1, 700_000)
    of_transaction(hand, "HALF", 2)
    of_transaction(hand, "COMMITTED", 2)
    ids: dict[str, Any] = {"topic": hand.topic, "entry": 1, "message_id": hand.id_of(2)}
    hand.add("ABSORBED", 10, **ids, due_ms=START_MS + 700_000)


def kept_back(hand: Hand) -> None:
    """Change topics after their messages are in a snapshot, which is taken at 0, and before or after these are due."""
    names = ("paused", "slowed", "in turns", "gone on", "paused too late", "due before the snapshot")
    held = []
    for number, name in enumerate(names):
        due_ms, topic = -200_000 if name == names[-1] else 100_000, name + hand.of
        ids: dict[str, Any] = {"topic": topic, "entry": number, "message_id": hand.id_of(number)}
        hand.add("SCHEDULED", 0, due_ms=START_MS + due_ms, **ids)
        held.append(hand.held(number, due_ms, topic=topic))
    hand.snapshot(held)
    for name, at_ms, what in (
        ("due before the snapshot", -100_000, "paused"),
        ("paused", 50_000, "paused"),
        ("slowed", 50_000, "deliver_rate=1"),
        ("in turns", 50_000, "paused"),
        ("gone on", 50_000, "paused"),
        ("in turns", 300_000, "resumed"),
        ("gone on", 300_000, "resumed"),
        ("in turns", 310_000, "deliver_rate=5"),
        ("paused too late", 400_000, "paused"),
    ):
        hand.add("TOPIC_CHANGED", at_ms, topic=name + hand.of, message_id=b"\0" + what.encode())


def made_anew(hand: Hand) -> None:
    """Accept messages before and after the topic is removed, some of them twice there; the clock is set back then."""

    def accept(number: int, entry: int, at_ms: int) -> None:
        ids: dict[str, Any] = {"topic": hand.topic, "entry": entry, "message_id": hand.id_of(number)}
        hand.add("SCHEDULED", at_ms, **ids, due_ms=START_MS + 900_000)

    before, after = (1, 2, 2, 4), (1, 3, 3, 4, 4)
    for entry, number in enumerate(before):
        accept(number, entry, 100)
    hand.add("TOPIC_REMOVED", 150, topic=hand.topic)
    for entry, number in enumerate(before):
        ids: dict[str, Any] = {"topic": hand.topic, "entry": entry, "message_id": hand.id_of(number)}
        hand.add("RECALLED", 160, **ids, due_ms=START_MS + 900_000)
    for entry, number in enumerate(after, start=len(before)):
        accept(number, entry, 120)


def many_times(hand: Hand) -> None:
    """Accept a message once more than the counts of the first look have room for: they begin again at 1."""
    for offset in range(33):
        hand.queued(1, offset)


DISAGREEMENTS = (other_times, other_places, other_copies, transactions, absorbed, kept_back, made_anew, many_times)
