"""When topics kept back what was due, by what the trail says of changes."""

from __future__ import annotations

from spark_audit.jobs.pauses import TopicPause, joined, pauses_of

FOREVER = 2**63 - 1


def test_pauses_and_rates_have_a_beginning_and_an_end() -> None:
    """Twice is once; a pause is over a little after it was resumed, or with its topic; other changes say nothing."""

    def row(at_ms: int, topic: str, said: str, kind: str = "TOPIC_CHANGED", cell: str = "c") -> dict[str, object]:
        return {"cell": cell, "kind": kind, "topic": topic, "at_ms": at_ms, "message_id": b"\0" + said.encode()}

    found = pauses_of(
        [
            row(1, "a", "paused"),
            row(2, "a", "paused deliver_rate=7"),
            row(3, "b", "paused"),
            row(4, "b", "paused", cell="other"),
            row(5, "b", "", kind="OPENED"),
            row(6, "a", "resumed"),
            row(7, "a", "") | {"message_id": None},
            row(8, "b", "", kind="TOPIC_REMOVED"),
            row(9, "a", "deliver_rate=9"),
            row(10, "a", "paused"),
            row(11, "b", "resumed deliver_rate=0"),
            row(12, "b", "\udc00?".encode("utf-8", "replace").decode()),
        ]
    )
    assert found["c"] == [
        TopicPause("a", 1, 15_006, "paused"),
        TopicPause("a", 2, FOREVER, "slowed"),
        TopicPause("b", 3, 15_008, "paused"),
        TopicPause("a", 10, FOREVER, "paused"),
    ]
    assert found["other"] == [TopicPause("b", 4, FOREVER, "paused")]


def test_consecutive_obstacles_of_a_topic_are_one() -> None:
    """Pauses and rates that overlap, or follow each other soon, whichever began first; topics apart."""
    pauses = [
        TopicPause("a", 50, 60, "slowed"),
        TopicPause("a", 10, 20, "paused"),
        TopicPause("b", 15, 25, "paused"),
        TopicPause("a", 30, 35, "slowed"),
        TopicPause("a", 12, 13, "slowed"),
        TopicPause("a", 71, FOREVER, "paused"),
    ]
    assert joined(pauses, within_ms=10) == [("a", 10, 35), ("a", 50, 60), ("a", 71, FOREVER), ("b", 15, 25)]
