"""Verdicts on hand-made trails: one message, one question, one answer.

Scenarios that say nothing about the trail as a whole are cells of one trail, each with a topic, a group and ids of its
own, and share an audit: that is what takes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.effort import at_length
from support.forges.trail.hand import GROUP, START_MS, TOPIC, Hand
from support.forges.trail.read_back import Lies, Range, write_read_back

from spark_audit.engines.table import TableEngine
from spark_audit.jobs.audit import run_audit
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome
from spark_audit.report.sections.ledgers import CLUSTER, residue

pytestmark = pytest.mark.spark
_DAY_MS = 86_400_000


Scenario = Callable[[Hand], None]
_SCENARIOS: list[Scenario] = []


def scenario(write: Scenario) -> Scenario:
    """Have a function's events be a cell of the trail that is audited once."""
    _SCENARIOS.append(write)
    return write


def said(outcome: AuditOutcome) -> list[tuple[str, str, str]]:
    """Return kind, rule and id of all findings."""
    return [(each["kind"], each["rule"], each["message_id"] or "") for each in outcome.findings]


class Found(NamedTuple):
    """What an audit of several scenarios says of one."""

    hand: Hand
    report: dict[str, Any]
    findings: list[dict[str, Any]]

    @property
    def said(self) -> list[tuple[str, str, str]]:
        """Kind, rule and id of its findings."""
        return [(each["kind"], each["rule"], each["message_id"].removesuffix(self.hand.of)) for each in self.findings]

    @property
    def fired(self) -> list[dict[str, Any]]:
        """The rows of its topic."""
        return [row for row in self.report["fired"] if row["topic"] == self.hand.topic]

    @property
    def dead(self) -> list[dict[str, Any]]:
        """The row of its group."""
        return [row for row in self.report["dead"] if row["group"] == self.hand.group]


class Audited:
    """All scenarios, each a cell of one trail, and what the audit says of it."""

    def __init__(self, engine: TableEngine, trail: Path) -> None:
        self._hands: dict[Scenario, Hand] = {}
        for write in _SCENARIOS:
            self._hands[write] = hand = Hand(trail, write.__name__, of=f" of {write.__name__}")
            write(hand)
            hand.end(1_000)
        self._outcome = run_audit(engine, str(trail), Options())
        hands = self._hands.values()
        assert {each["cell"] for each in self._outcome.findings} <= {hand.cell for hand in hands}
        assert {row["topic"] for row in self._outcome.report["fired"]} <= {hand.topic for hand in hands}

    def of(self, write: Scenario) -> Found:
        """Return what it says of a scenario."""
        hand = self._hands[write]
        findings = [each for each in self._outcome.findings if each["cell"] == hand.cell]
        return Found(hand, self._outcome.report, findings)


@pytest.fixture(scope="module")
def audited(engine: TableEngine, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """One audit of all scenarios."""
    return Audited(engine, tmp_path_factory.mktemp("scenarios"))


def test_open_entries_by_the_snapshot(engine: TableEngine, tmp_path: Path) -> None:
    """Not in it: lost. In it: pending, overdue after its time, lost when stranded. Accepted behind it: no proof.

    What its topic keeps back after its time is pending.
    """
    hand = Hand(tmp_path)
    for entry, due_ms in ((1, 1_000), (2, 1_000), (3, 1_000), (4, 900_000), (7, 1_000)):
        hand.scheduled(entry, due_ms)
    kept = [hand.held(4, 900_000), hand.held(7, 1_000, "HELD")]
    hand.snapshot([hand.held(2, 1_000), hand.held(3, 1_000, is_stranded=True), *kept])
    hand.scheduled(5, 1_000)
    hand.scheduled(6, 900_000)
    hand.end(500_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert said(outcome) == [
        ("INCONCLUSIVE", "no snapshot", "message-5"),
        ("LOST", "not in the snapshot", "message-1"),
        ("LOST", "stranded in the store", "message-3"),
        ("OVERDUE", "in the snapshot after its time", "message-2"),
    ]
    assert outcome.exit_code == 20
    rows = outcome.report["scheduled"]
    names = ("scheduled", "pending", "overdue", "lost", "inconclusive")
    assert [sum(row[name] for row in rows) for name in names] == [7, 3, 1, 2, 1]


def test_a_gap_takes_the_proof_away(engine: TableEngine, tmp_path: Path) -> None:
    """What was accepted before a gap may have ended in it; what was accepted behind it is lost all the same."""
    hand = Hand(tmp_path)
    hand.scheduled(1, 1_000)
    hand.skip(3)
    hand.scheduled(2, 1_000)
    hand.snapshot([])
    hand.end(500_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    found = said(outcome)
    assert ("INCONCLUSIVE", "gap", "message-1") in found
    assert ("LOST", "not in the snapshot", "message-2") in found
    assert [each["detail"] for each in outcome.findings if each["kind"] == "TRAIL_GAP"] == ["sequences 3 to 5"]
    (gap,) = outcome.report["cells"][0]["gaps"]
    assert (gap["first"], gap["last"], gap["why"]) == (3, 5, "records missing")
    assert (gap["after_ms"], gap["before_ms"]) == (START_MS, START_MS + 500_000)  # of the events of its file


@pytest.mark.parametrize("steps", [1, 2])
def test_a_late_delivery_names_the_stop(engine: TableEngine, tmp_path: Path, steps: int) -> None:
    """The daemon was down at the due time, killed or in order; what was late without a stop has none.

    Read in one go, and in two runs of which the second has the events after the stop.
    """
    trail, state = tmp_path / "trail", str(tmp_path / "state")
    for cell, last in (("in-order", "CLOSED"), ("killed", "HEARTBEAT")):
        hand = Hand(trail, cell, of=f" of {cell}")
        for entry, due_ms in ((1, 1_000), (2, 100_000), (3, 600_000)):
            hand.scheduled(entry, due_ms)
        deliver(hand, 1, 1_000, 70_000)
        hand.add(last, 90_500)
        hand.writer.close()
        if steps > 1:
            run_audit(engine, str(trail), Options(), state=state)
        hand.add("OPENED", 200_900, boot=2)
        deliver(hand, 2, 100_000, 201_000)
        deliver(hand, 3, 600_000, 700_000)
        hand.end(700_000)
    outcome = run_audit(engine, str(trail), Options(), state=state if steps > 1 else None)
    late = [(each["message_id"].split(" ")[0], each["rule"], each["detail"]) for each in outcome.findings]
    down = "101000 ms; down 2026-11-21 08:01:30 to 08:03:20 UTC"
    rule = "fired late: its daemon was down"
    for number, kill in enumerate(("", ", counted from its last event before a kill")):
        assert late[3 * number : 3 * number + 3] == [
            ("message-1", "fired late", "69000 ms"),
            ("message-2", rule, down + kill),
            ("message-3", "fired late", "100000 ms"),
        ]
    assert {each["kind"] for each in outcome.findings} == {"LATE"}


def deliver(hand: Hand, entry: int, due_ms: int, at_ms: int) -> None:
    """Deliver a message that waited."""
    ids: dict[str, Any] = {"topic": hand.topic, "entry": entry, "message_id": hand.id_of(entry)}
    hand.add("DELIVERED", at_ms, **ids, due_ms=START_MS + due_ms, queue_id=0, queue_offset=entry - 1)


@at_length
def test_a_gap_excuses_an_exit_too_much(engine: TableEngine, tmp_path: Path) -> None:
    """A second nack in the lane may be of a visit that lies in the gap; a second ack of one place is one too much."""
    hand = Hand(tmp_path)
    hand.subscribed()
    lane: dict[str, Any] = {"queue_id": -1}
    for number in (1, 2):
        hand.queued(number, number)
    hand.of_group("NACKED", 1, queue_id=0, entry=11, attempt=1)
    hand.of_group("RETRIED", 1, **lane, queue_offset=0, entry=11, attempt=2)
    hand.of_group("NACKED", 1, **lane, entry=12, attempt=2)
    hand.skip(1)  # RETRIED of 12
    hand.of_group("NACKED", 1, **lane, entry=13, attempt=3)
    hand.of_group("RETRIED", 1, **lane, queue_offset=2, entry=13, attempt=4)
    hand.of_group("ACKED", 1, **lane, queue_offset=2)
    for _ in range(2):
        hand.of_group("ACKED", 2, queue_id=0, queue_offset=2)
    hand.end(1_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert [each for each in said(outcome) if each[2]] == [
        ("DUPLICATE_EXIT", "a place was left more than once", "message-2"),
        ("INCONCLUSIVE", "gap", "message-1"),
    ]
    (row,) = outcome.report["fired"]
    assert (row["fired"], row["acked"], row["duplicated"]) == (2, 2, 1)


@scenario
def redriven(hand: Hand) -> None:
    def read_by_another(number: int) -> None:
        place: dict[str, Any] = {"queue_id": 0, "queue_offset": number}
        hand.add("ACKED", 0, topic=hand.topic, group="other", message_id=hand.id_of(number), **place)

    hand.subscribed()
    hand.add("SUBSCRIBED", 0, topic=hand.topic, group="other", queue_id=0, queue_offset=0)
    for number in range(3):
        hand.queued(number, number)
        read_by_another(number)
        hand.of_group("DEAD_FORWARDED", number, queue_id=0, attempt=1, detail=number)
        lane: dict[str, Any] = {"queue_id": -1, "queue_offset": number}
        hand.of_group("QUEUED_FOR_GROUP", 10 + number, entry=20 + number, attempt=1, detail=number, **lane)
        hand.of_group("REDRIVEN", number, detail=number)
    hand.of_group("ACKED", 10, queue_id=-1, queue_offset=0)
    hand.of_group("ACKED", 10, queue_id=-1, queue_offset=0)
    hand.of_group("NACKED", 11, queue_id=-1, entry=31, attempt=1)
    hand.of_group("RETRIED", 11, queue_id=-1, queue_offset=3, entry=31, attempt=2)
    hand.of_group("ACKED", 11, queue_id=-1, queue_offset=3)
    hand.queued(3, 3)
    read_by_another(3)
    hand.of_group("DEAD_FORWARDED", 3, queue_id=0, attempt=1, detail=3)
    # by an earlier build, of a removed group
    hand.add("PURGED", 0, topic=hand.topic, message_id=hand.id_of(3), detail=3)
    hand.queued(4, 4)  # it dies anew at the same place: the dead letter queue was removed, and began again
    read_by_another(4)
    hand.of_group("DEAD_FORWARDED", 4, queue_id=0, attempt=1, detail=0)


def test_a_message_redriven_to_a_group_is_that_groups_alone(audited: Audited) -> None:
    """Finished, failed and finished, open; left twice is too much. The letters are redriven, also without a group."""
    found = audited.of(redriven)
    assert found.said == [("DUPLICATE_EXIT", "a place was left more than once", "message-10")]
    mine, other = sorted(found.fired, key=lambda row: row["group"])
    assert (mine["fired"], mine["acked"], mine["dead"], mine["unread"]) == (8, 2, 5, 1)
    assert (other["fired"], other["acked"]) == (5, 5)
    (dead,) = found.dead
    assert (dead["count"], dead["redriven"], dead["purged"]) == (5, 3, 1)


@scenario
def sent_on(hand: Hand) -> None:
    hand.subscribed()
    for number in range(5):
        hand.queued(number, number)
    hand.of_group("FORWARDED", 0, queue_id=0, queue_offset=0, attempt=1, detail=7)
    hand.of_group("FORWARD_IN_DOUBT", 1, queue_id=0, queue_offset=1, attempt=1)
    hand.of_group("FORWARDED", 1, queue_id=0, queue_offset=1, attempt=2, detail=-1)
    hand.of_group("FORWARD_REFUSED", 2, queue_id=0, attempt=40014, detail=0)
    hand.of_group("FORWARD_REFUSED", 3, queue_id=0, attempt=40014, detail=1)
    hand.of_group("QUEUED_FOR_GROUP", 13, entry=23, attempt=1, detail=1, queue_id=-1, queue_offset=0)
    hand.of_group("REDRIVEN", 3, detail=1)
    hand.of_group("FORWARDED", 13, queue_id=-1, queue_offset=0, attempt=1, detail=9)
    hand.add("FETCHED", 0, topic=hand.topic, message_id=hand.id_of(4), attempt=1, detail=3)


def test_messages_for_a_cluster(audited: Audited) -> None:
    """Forwarded is finished, refused is dead, in doubt changes nothing, and one that was not forwarded is open."""
    found = audited.of(sent_on)
    assert found.said == []
    (row,) = [row for row in found.fired if row["group"] == found.hand.group]
    assert (row["acked"], row["dead"], row["in_flight"] + row["unread"]) == (3, 2, 1)
    assert "cluster" not in found.report


def test_messages_read_back_are_compared(engine: TableEngine, tmp_path: Path) -> None:
    """Lost only where every queue rules it out; copies are explained by doubt; the rest was not read back."""
    hand = Hand(tmp_path / "trail")
    numbers = range(13)
    for number in numbers:
        hand.queued(number, number)

    def forwarded(number: int, offset: int, topic: str = TOPIC) -> None:
        hand.add("FORWARDED", 1, topic=topic, group=GROUP, message_id=hand.id_of(number), attempt=1, detail=offset)

    def doubted(number: int) -> None:
        hand.of_group("FORWARD_IN_DOUBT", number, at_ms=1, attempt=1)

    forwarded(0, 5)  # there, where it was said
    forwarded(1, 7)  # there, elsewhere
    forwarded(2, 8)  # lost: another one lies there, and the other queue does not reach so far
    forwarded(3, 2)  # not read back: may have lain in front of what is left of queue 1
    forwarded(4, -1)  # not read back: nobody knows where, and queue 1 lost its beginning
    forwarded(5, 9)  # not read back: one that cannot be read lies at that offset
    doubted(6)  # three copies, all explained
    doubted(6)
    forwarded(6, 10)
    doubted(7)  # three copies, one not explained
    forwarded(7, 11)
    doubted(8)  # there, though nobody said so
    doubted(9)  # not known
    forwarded(10, 0, "gone")  # its topic could not be read
    forwarded(11, 0, "slow")  # not read back: time ran out in front of it
    forwarded(11, 3, "quick")  # lost: all of the topic was read
    doubted(12)
    doubted(13)
    hand.add("QUEUED", 1, topic="quick", queue_id=0, queue_offset=0, entry=99, message_id=hand.id_of(12))
    hand.add("FORWARD_IN_DOUBT", 1, topic="quick", group=GROUP, message_id=hand.id_of(12), attempt=1)  # not there
    hand.add("FORWARD_IN_DOUBT", 1, topic="slow", group=GROUP, message_id=hand.id_of(12), attempt=1)  # not known
    before = hand.sequence
    forwarded(14, 99)  # told after the reading began
    hand.end(1_000)
    places = [(0, 0, 5), (1, 1, 6), (6, 0, 10), (6, 0, 12), (6, 1, 4), (7, 0, 11), (7, 0, 13), (7, 0, 14), (8, 0, 6)]
    messages = [Lies(TOPIC, queue, offset, hand.id_of(number)) for number, queue, offset in places]
    messages += [Lies(TOPIC, 0, 8, hand.id_of(100)), Lies(TOPIC, 0, 9, None), Lies("quick", 0, 3, hand.id_of(100))]
    queues = [
        Range(TOPIC, 0, 0, 15, 15),
        Range(TOPIC, 1, 4, 7, 7, None),
        Range("gone", None, 0, 0, 0, None, "topic not found"),
        Range("slow", 0, 0, 0, 4, 0, "no time was left"),
        Range("quick", 0, 0, 4, 4),
    ]
    write_read_back(tmp_path / "cluster", messages, queues, {"one": before})
    outcome = run_audit(engine, str(tmp_path / "trail"), Options(), read_back=str(tmp_path / "cluster"))
    of_cluster = [each for each in outcome.findings if "cluster" in each["rule"]]
    assert [(each["kind"], each["topic"], each["message_id"], each["detail"]) for each in of_cluster] == [
        ("DUPLICATE_DELIVERY", TOPIC, "message-7", "3 copies, 2 explained"),
        ("LOST", TOPIC, "message-2", "forwarded to offset 8; every queue of the topic rules it out"),
        ("LOST", "quick", "message-11", "forwarded to offset 3; every queue of the topic rules it out"),
    ]
    assert [[event["kind"] for event in each["history"]] for each in of_cluster] == [
        ["QUEUED", "FORWARD_IN_DOUBT", "FORWARDED"],
        ["QUEUED", "FORWARDED"],
        ["FORWARDED"],
    ]
    ledger = {row["topic"]: row for row in outcome.report["cluster"]}
    names = ("sent", "there", "not_there", "not_read_back", "lost", "in_doubt", "elsewhere", "copies", "duplicated")
    assert {topic: tuple(row[name] for name in names) for topic, row in ledger.items()} == {
        TOPIC: (12, 5, 0, 6, 1, 6, 1, 3, 1),
        "gone": (1, 0, 0, 1, 0, 0, 0, 0, 0),
        "slow": (2, 0, 0, 2, 0, 1, 0, 0, 0),
        "quick": (2, 0, 1, 0, 1, 1, 0, 0, 0),
    }
    assert ledger["slow"]["why"] == "no time was left"
    assert [residue(CLUSTER, row) for row in ledger.values()] == [0, 0, 0, 0]


@scenario
def taken_over(hand: Hand) -> None:
    for number, copies in ((1, 2), (2, 1), (3, 1)):
        hand.of_group("TAKEN_OVER", number, queue_id=-1, attempt=1, detail=number)
        hand.of_group("NACKED", number, queue_id=-1, entry=10 * number, attempt=1, due_ms=START_MS)
        for copy in range(copies - 1):
            lane: dict[str, Any] = {"queue_id": -1, "queue_offset": copy}
            hand.of_group("RETRIED", number, entry=10 * number, attempt=2, due_ms=START_MS, **lane)
            hand.of_group("TAKEN_OVER", number, queue_id=-1, attempt=2, detail=9)  # it was there once more
            hand.of_group("NACKED", number, queue_id=-1, entry=10 * number + 1, attempt=2, due_ms=START_MS)
            hand.of_group("ACKED", number, attempt=2, **lane)
    hand.of_group("TAKEN_OVER", 4, queue_id=-1, attempt=3, detail=4)
    hand.of_group("DEAD_EXHAUSTED", 4, queue_id=-1, attempt=3, detail=0)
    hand.of_group("NACKED", 5, queue_id=-1, entry=50, attempt=1, due_ms=START_MS)
    hand.snapshot(
        [
            hand.held(number, 10, "RETRY", group=hand.group, message_id=hand.id_of(of))
            for number, of in ((11, 1), (20, 2), (50, 5))
        ]
    )


def test_messages_taken_over_from_a_cluster(audited: Audited) -> None:
    """It is fired for its group alone and fails at once; a copy that is nowhere is lost, a failure without it odd."""
    found = audited.of(taken_over)
    assert sorted(found.said) == [
        ("LOST", "a copy is not in the snapshot", "message-3"),
        ("ORPHAN", "left a place it was not at", "message-5"),
    ]
    (row,) = [row for row in found.fired if row["group"] == found.hand.group]
    assert (row["fired"], row["acked"], row["dead"], row["lost"]) == (5, 1, 1, 1)


@scenario
def passes(hand: Hand) -> None:
    hand.subscribed()
    for number in range(2):
        hand.queued(number, number)

    def retry(number: int, copy: int) -> None:
        hand.of_group("NACKED", number, queue_id=0, entry=copy, attempt=1)
        hand.of_group("RETRIED", number, queue_id=-1, queue_offset=0, entry=copy, attempt=2)
        hand.of_group("ACKED", number, queue_id=-1, queue_offset=0, attempt=2)

    hand.of_group("DEAD_FORWARDED", 0, queue_id=0, attempt=1, detail=0)
    retry(1, 100)
    hand.add("RESET", 0, topic=hand.topic, group=hand.group, queue_id=0, queue_offset=2**63 - 1, detail=2)
    hand.add("GROUP_REMOVED", 0, group=hand.group)
    hand.subscribed()
    hand.of_group("DEAD_FORWARDED", 0, queue_id=0, attempt=1, detail=1)
    retry(1, 200)
    hand.add("RESET", 0, topic=hand.topic, group=hand.group, queue_id=0, queue_offset=0, detail=2)


def test_a_place_is_left_once_in_each_pass(audited: Audited) -> None:
    """A group is reset, and removed and made anew: it reads the queue three times, and its lane begins at 0 again."""
    found = audited.of(passes)
    assert found.said == []
    (row,) = found.fired
    assert {name: count for name, count in row.items() if count and isinstance(count, int)} == {
        "fired": 6,
        "acked": 2,
        "dead": 2,
        "unread": 2,
    }


@scenario
def open_places(hand: Hand) -> None:
    hand.subscribed()
    for entry in range(6):
        hand.queued(entry, entry)
    hand.of_group("ACKED", 1, queue_id=0, queue_offset=1)
    hand.snapshot([], floor=2, done=[3], cursor=4, hidden=[], end=5)


def test_open_places_of_a_group(audited: Audited) -> None:
    """Below the floor or done: lost. Handed out: in flight. Else unread; beyond the end of its queue: lost."""
    found = audited.of(open_places)
    finished = "finished by the snapshot, without an exit"
    assert found.said == [
        ("LOST", finished, "message-0"),
        ("LOST", finished, "message-3"),
        ("LOST", "not in its queue by the snapshot", "message-5"),
    ]
    (row,) = found.fired
    assert {name: count for name, count in row.items() if count and isinstance(count, int)} == {
        "fired": 6,
        "acked": 1,
        "in_flight": 1,
        "unread": 1,
        "lost": 3,
    }


@scenario
def copies(hand: Hand) -> None:
    hand.subscribed()
    for entry in range(3):
        hand.queued(entry, entry)
    for entry in range(2):
        hand.of_group("NACKED", entry, queue_id=0, entry=10 + entry, attempt=1)
    hand.snapshot([hand.held(10, 0, "RETRY", group=hand.group, message_id=hand.id_of(0))], floor=2, end=3)
    hand.of_group("NACKED", 2, queue_id=0, entry=12, attempt=1)


def test_copies_that_wait(audited: Audited) -> None:
    """A copy in the snapshot is in retry, one that is nowhere is lost, one made behind the snapshot waits."""
    found = audited.of(copies)
    assert found.said == [("LOST", "a copy is not in the snapshot", "message-1")]
    (row,) = found.fired
    assert (row["fired"], row["in_retry"], row["lost"]) == (3, 2, 1)
    assert [each["kind"] for each in found.findings[0]["history"]] == ["QUEUED", "NACKED"]


@at_length
def test_messages_unknown_to_the_trail(engine: TableEngine, tmp_path: Path) -> None:
    """An entry nobody accepted, and one that was handed over before the snapshot, are orphans."""
    hand = Hand(tmp_path)
    hand.scheduled(1, 1_000)
    place: dict[str, Any] = {"queue_id": 0, "queue_offset": 0}
    ids: dict[str, Any] = {"topic": TOPIC, "entry": 1, "message_id": hand.id_of(1), "due_ms": START_MS + 1_000}
    hand.add("DELIVERED", 1_000, **ids, **place)
    hand.snapshot([hand.held(1, 1_000), hand.held(7, 1_000)])
    hand.end(2_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    rule = "in the snapshot, not waiting by the trail"
    assert said(outcome) == [("ORPHAN", rule, "message-1"), ("ORPHAN", rule, "message-7")]
    assert outcome.exit_code == 40


@at_length
def test_the_watermark_waits_for_slow_cells_and_not_for_dead_ones(engine: TableEngine, tmp_path: Path) -> None:
    """It is that of the slowest cell; one silent for too long holds nobody up, and its own entries stay open."""
    for cell, at_ms in (("quick", 1_000_000), ("slow", 700_000), ("silent", 0)):
        hand = Hand(tmp_path, cell)
        hand.scheduled(1 if cell == "silent" else 2, 900_000)
        hand.end(at_ms)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert outcome.report["range"]["watermark_ms"] == START_MS + 700_000
    kinds = [(each["kind"], each["cell"], each["rule"]) for each in outcome.findings]
    assert kinds == [
        ("DUPLICATE_ACCEPT", "slow", "in more than one cell"),
        ("INCONCLUSIVE", "silent", "silent cell"),
    ]


@at_length
def test_events_without_a_beginning(engine: TableEngine, tmp_path: Path) -> None:
    """They are orphans, unless the beginning was retired."""
    for cell, first in (("whole", 0), ("retired", 10)):
        hand = Hand(tmp_path, cell)
        ids: dict[str, Any] = {
            "topic": TOPIC,
            "entry": 1,
            "message_id": hand.id_of(first),
            "due_ms": START_MS + _DAY_MS,
        }
        hand.add("DELIVERED", _DAY_MS, **ids, queue_id=0, queue_offset=0)
        hand.of_group("ACKED", 50 + first, _DAY_MS, queue_id=0, queue_offset=9)
        hand.scheduled(100 + first, _DAY_MS + 9_000, _DAY_MS)
        hand.end(_DAY_MS, retired_sequence=1 if first else 0)
    (opened,) = (tmp_path / "events" / "cell=retired").rglob(f"{1:020}-*.parquet")
    opened.unlink()
    outcome = run_audit(engine, str(tmp_path), Options())
    assert {(each["kind"], each["cell"]) for each in outcome.findings} == {("ORPHAN", "whole")}
    assert [each["message_id"] for each in outcome.findings] == ["message-0", "message-50"]


@at_length
def test_a_spool_directory_that_was_taken_over(engine: TableEngine, tmp_path: Path) -> None:
    """What another spool goes on with is neither lost nor counted twice; a parked one is not overdue."""
    first = Hand(tmp_path, "first", "spool")
    for entry in (1, 2):
        first.scheduled(entry, 1_000)
    first.snapshot([])
    first.end(1_000)
    second = Hand(tmp_path, "second", "spool")
    ids: dict[str, Any] = {"topic": TOPIC, "message_id": second.id_of(1)}
    second.add("SCHEDULED", 500, **ids, entry=8, due_ms=START_MS)
    second.add("SENT", 900, **ids, entry=8, due_ms=START_MS)
    second.scheduled(3, 0)
    second.snapshot([second.held(3, 0, "PARKED")])
    second.end(500_000)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert said(outcome) == [("LOST", "not in the snapshot", "message-2")]
    table = {
        row["cell"]: (row["spooled"], row["sent"], row["pending"], row["lost"]) for row in outcome.report["spooled"]
    }
    assert table == {"first": (1, 0, 0, 1), "second": (2, 1, 1, 0)}


@at_length
def test_unknown_kinds_are_reported(engine: TableEngine, tmp_path: Path) -> None:
    """They are kept, counted, and change nothing."""
    hand = Hand(tmp_path)
    hand.add("KIND_99", 0, topic=TOPIC, message_id=hand.id_of(1))
    hand.end(0)
    outcome = run_audit(engine, str(tmp_path), Options())
    assert said(outcome) == [("UNKNOWN_KIND", "KIND_99", "")]
    assert outcome.exit_code == 0
