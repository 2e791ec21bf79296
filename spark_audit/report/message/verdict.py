"""Verdict on one message: the rules of the audit, applied to a single message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_audit.report import text
from spark_audit.report.message import words
from spark_audit.report.message.files import FileGap, MessageSnapshot, Row
from spark_audit.schema import ABSORBED, ACCEPTS, COMMITTED, GIVEN_UP, HALF
from spark_audit.stops import Stop

LANE = -1  # the queue of a group's retry lane
_ENDS = {
    "DELIVERED": "was handed over", "RECALLED": "was cancelled", "SENT": "was sent",
    "REPLACED": "was replaced by a message with its own key",
    "ABSORBED": "was not stored, since another message waited under its own key",
    "COMMITTED": "was committed", "ROLLED_BACK": "was rolled back",
    "SEND_DEAD": "is in the dead set", "DROPPED": "was dropped, as configured",
}  # fmt: skip
_BESIDE = {"OCCURRED", "FETCHED", "EXPIRED"}  # origin and removal of the message, not its outcome
_GROUP_ENDS = {
    "ACKED": "finished it", "FORWARDED": "brought it to the cluster", "FILTERED": "passed it over",
    "REDRIVEN": "sent its dead letter again", "PURGED": "had its dead letter thrown away",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOutcome:
    """Final state of the message for its topic or for one group, and the rule that proves it."""

    cell: str
    topic: str
    group: str | None
    verdict: str
    words: str
    rule: str


class Judge:
    """Audit rules for one message."""

    def __init__(
        self,
        *,
        shots: dict[str, MessageSnapshot],
        gaps: list[FileGap],
        context: list[Row],
        as_of_ms: dict[str, int | None],
        grace_ms: int,
        stops: Sequence[Stop] = (),
    ) -> None:
        self._shots = shots
        self._gaps = gaps
        self._subscribed = [row for row in context if row["kind"] in {"SUBSCRIBED", "RESET"}]
        self._as_of_ms = as_of_ms
        self._grace_ms = grace_ms
        self._stops = stops

    def gaps_that_matter(self, found: Sequence[Row]) -> list[FileGap]:
        """Return the gaps after the first event of the message in its cell, which may hide events of it."""
        first = {row["cell"]: row["sequence"] for row in reversed(found)}
        return [gap for gap in self._gaps if gap.last > first[gap.cell]]

    def outcomes(self, found: Sequence[Row]) -> list[MessageOutcome]:
        """Return one outcome per entry of a topic, then one per group."""
        waits: defaultdict[tuple[str, str, Any], list[Row]] = defaultdict(list)
        ways: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
        places: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in found:
            cell, topic = row["cell"], str(row["topic"])
            if row["group"] is not None and row["kind"] not in GIVEN_UP:
                ways[cell, topic, row["group"]].append(row)
            elif row["kind"] not in _BESIDE:
                waits[cell, topic, row["entry"]].append(row)
            if row["kind"] in {"QUEUED", "DELIVERED"}:
                places[cell, topic].append(row)
        for (cell, topic), visible in places.items():
            for group in self._readers(cell, topic, visible[-1]):
                ways.setdefault((cell, topic, group), visible[-1:])
        expired = {_place(row) for row in found if row["kind"] == "EXPIRED"}
        accepted = {(row["cell"], row["topic"]) for row in found if row["kind"] in {*ACCEPTS, ABSORBED}}
        known = [
            *(self._of_wait(rows, accepted) for _, rows in sorted(waits.items(), key=str)),
            *(self._of_group(group, rows, expired) for (_, _, group), rows in sorted(ways.items())),
        ]
        return known or [_orphan(row) for row in found[-1:]]

    def undone(self, found: Sequence[Row]) -> list[MessageOutcome]:
        """Return an outcome for each topic if all events of the message are undone, because its store was
        rolled back.
        """
        why = "TAIL_LOST names its events, and none came after it"
        said = "lost with the undone events: the store was restored to a state before its acceptance"
        topics = {(row["cell"], str(row["topic"])): row for row in found}
        return [_outcome(row, None, "undone", said, why) for _, row in sorted(topics.items())]

    def _readers(self, cell: str, topic: str, visible: Row) -> list[str]:
        """Return the groups that read the queue of the message from its offset or an earlier one."""
        return sorted(
            {
                row["group"]
                for row in self._subscribed
                if (row["cell"], row["topic"], row["queue_id"]) == (cell, topic, visible["queue_id"])
                and (row["queue_offset"] or 0) <= (visible["queue_offset"] or 0)
            }
        )

    def _of_wait(self, rows: list[Row], accepted: set[tuple[str, Any]]) -> MessageOutcome:
        last = rows[-1]
        if last["kind"] == COMMITTED and (last["cell"], last["topic"]) not in accepted:
            return self._unaccepted(last)
        if last["kind"] == "QUEUED":
            return _outcome(last, None, "done", "was in its queue at once", "QUEUED needs no waiting")
        if (end := _ENDS.get(last["kind"])) is not None:
            is_timed = last["kind"] in {"DELIVERED", "SENT"}
            late = words.late_in_words(last) + words.cause_in_words(last, self._stops) if is_timed else ""
            return _outcome(last, None, "done", end + late, f"{last['kind']} ends the waiting")
        if last["kind"] in GIVEN_UP:
            said = f"is a dead letter in %DLQ%{last['group']}"
            return _outcome(last, None, "dead", said, f"{last['kind']} ends the waiting")
        if last["kind"] in {HALF, "TX_CHECKED"}:
            return self._of_half(last)
        if all(row["kind"] not in {"SCHEDULED", "REQUEUED", "SEND_FAILED"} for row in rows):
            return _orphan(last)
        shot = self._shots.get(last["cell"])
        held = [entry for entry in shot.entries if entry["entry"] == last["entry"]] if shot else []
        return self._of_waiting(last, None, held, last["due_ms"])

    def _unaccepted(self, last: Row) -> MessageOutcome:
        if any(gap.cell == last["cell"] and gap.first > last["sequence"] for gap in self._gaps):
            said = "unknown: the trail has a gap"
            return _outcome(last, None, "inconclusive", said, "committed, and never accepted, but a gap follows")
        return _outcome(last, None, "lost", "LOST", "committed, and never accepted")

    def _of_half(self, last: Row) -> MessageOutcome:
        shot, said = self._shots.get(last["cell"]), "waits for the outcome of its transaction"
        if shot is None or shot.sequence < last["sequence"]:
            return _outcome(last, None, "pending", said, "no snapshot is newer")
        if any(entry["kind"] == "TRANSACTION" for entry in shot.entries):
            return _outcome(last, None, "pending", said, "the snapshot holds it")
        return self._missing(last, None, shot, "the newer snapshot does not contain it")

    def _of_waiting(self, last: Row, group: str | None, held: list[Row], due_ms: int | None) -> MessageOutcome:
        cell, shot = last["cell"], self._shots.get(last["cell"])
        as_of_ms = self._as_of_ms.get(cell)
        is_past = due_ms is not None and as_of_ms is not None and as_of_ms > due_ms + self._grace_ms
        if shot is None or shot.sequence < last["sequence"]:
            if is_past:
                return _outcome(last, group, "inconclusive", "should be finished; unknown", "no snapshot is newer")
            return _outcome(last, group, "pending", "waits, by its last event", "it is not due yet, with grace")
        if held and held[0].get("is_stranded"):
            why = "the snapshot calls it stranded"
            return _outcome(last, group, "lost", "LOST: in the store, where no scan reaches it", why)
        if held and held[0].get("kind") == "HELD":
            why = "by the snapshot its topic holds it: paused, or above its rate"
            return _outcome(last, group, "pending", "waits, and is due", why)
        if held:
            if is_past:
                why = "the snapshot holds it, and due time and grace have passed"
                return _outcome(last, group, "overdue", "OVERDUE: still pending", why)
            return _outcome(last, group, "pending", "waits", "the snapshot holds it, and it is not due yet, with grace")
        return self._missing(last, group, shot, "the newer snapshot does not contain it")

    def _of_group(self, group: str, rows: list[Row], expired: set[tuple[Any, ...]]) -> MessageOutcome:
        last = rows[-1]
        kind, cell = last["kind"], last["cell"]
        if (end := _GROUP_ENDS.get(kind)) is not None:
            return _outcome(last, group, "done", end, f"{kind} is an end")
        if kind.startswith("DEAD_") or kind == "FORWARD_REFUSED":
            return _outcome(last, group, "dead", f"has it as a dead letter in %DLQ%{group}", f"{kind} is an exit")
        shot = self._shots.get(cell)
        if kind == "NACKED":
            held = [each for each in shot.entries if each["kind"] == "RETRY" and each["group"] == group] if shot else []
            return self._of_waiting(last, group, held, last["due_ms"])
        queue, offset = last["queue_id"], last["queue_offset"]
        if _place(last) in expired:
            return _outcome(last, group, "done", "did not read it before retention removed it", "EXPIRED is an end")
        if shot is None or shot.sequence < last["sequence"]:
            return _outcome(last, group, "open", f"can see it in {words.place_in_words(last)}", "no snapshot is newer")
        return self._at_place(last, group, shot, queue, offset)

    def _at_place(
        self, last: Row, group: str, shot: MessageSnapshot, queue: int | None, offset: int | None
    ) -> MessageOutcome:
        where = words.place_in_words(last)
        key = (last["topic"], queue)
        of_group = group if queue == LANE else None
        ends = [
            row["end_offset"]
            for row in shot.queues
            if (row["topic"], row["queue_id"]) == key and row["group"] == of_group
        ]
        if offset is not None and ends and max(ends) <= offset:
            why = f"in the newer snapshot the queue ends at offset {text.count(max(ends))}"
            return self._missing(last, group, shot, why)
        known = [row for row in shot.progress if (row["topic"], row["queue_id"]) == key and row["group"] == group]
        if not known or offset is None:
            return _outcome(last, group, "unread", f"has not read it, {where}", "the snapshot knows no progress there")
        at = known[0]
        if offset < at["floor"] or offset in (at["done"] or []):
            why = "the snapshot counts its place as finished, and no event finished it"
            return self._missing(last, group, shot, why)
        if offset in (at["hidden"] or []) or (at["cursor"] is not None and offset < at["cursor"]):
            return _outcome(
                last, group, "in flight", f"works on it, {where}", "handed out and not finished in the snapshot"
            )
        return _outcome(last, group, "unread", f"has not read it, {where}", "not handed out yet in the snapshot")

    def _missing(self, last: Row, group: str | None, shot: MessageSnapshot, why: str) -> MessageOutcome:
        if any(gap.cell == last["cell"] and last["sequence"] < gap.first <= shot.sequence for gap in self._gaps):
            said = "unknown: the trail has a gap"
            return _outcome(last, group, "inconclusive", said, f"{why}, but a gap lies between")
        return _outcome(last, group, "lost", "LOST", f"{why}, and no gap lies between")


def _place(row: Row) -> tuple[Any, ...]:
    return (row["cell"], row["topic"], row["queue_id"], row["queue_offset"])


def _orphan(last: Row) -> MessageOutcome:
    return _outcome(last, None, "inconsistent", "has no beginning in the trail", "ORPHAN")


def _outcome(last: Row, group: str | None, verdict: str, said: str, rule: str) -> MessageOutcome:
    return MessageOutcome(
        cell=last["cell"], topic=str(last["topic"]), group=group, verdict=verdict, words=said, rule=rule
    )
