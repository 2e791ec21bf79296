"""Descriptions of trail events, for a person who traces one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spark_audit.report import text
from spark_audit.stops import Stop

Event = Mapping[str, Any]
_Words = Callable[[Event], str]
_TIMED = ("DELIVERED", "RETRIED", "SENT")  # after their ``due_ms``


def event_in_words(event: Event) -> str:
    """Describe an event; an unknown kind by its name."""
    said = _WORDS.get(str(event["kind"]))
    return said(event) + _reason(event) if said else f"an event of the unknown kind {event['kind']}"


def _reason(event: Event) -> str:
    """Return the failure reason and the client that reported it; trails of earlier builds have neither."""
    error, client = event.get("error"), event.get("client")
    if not error and not client:
        return ""
    said = f"error: {error}" if error else "reason not reported by the client"
    return f"; {said} ({client})" if client else f"; {said}"


def place_in_words(event: Event) -> str:
    """Return the place of a message: ``queue 2 at offset 17``, or the retry lane."""
    queue, offset = event.get("queue_id"), event.get("queue_offset")
    if queue is None:
        return "an unknown place"
    name = "its retry lane" if queue == -1 else f"queue {queue}"
    return name if offset is None else f"{name} at offset {text.count(offset)}"


def late_in_words(event: Event) -> str:
    """Return the lateness of an event relative to its delivery time."""
    if event.get("due_ms") is None:
        return ""
    late_ms = event["at_ms"] - event["due_ms"]
    if late_ms == 0:
        return " on time"
    return f" {text.duration(late_ms)} late" if late_ms > 0 else f" {text.duration(-late_ms)} EARLY"


def cause_in_words(event: Event, stops: Iterable[Stop]) -> str:
    """Return the process stop that explains why an event came after its due time; empty if there is none."""
    if event.get("due_ms") is None or event["kind"] not in _TIMED:
        return ""
    found = (each for each in stops if each.cell == event["cell"] and each.delayed(event["due_ms"], event["at_ms"]))
    first = next(found, None)
    process = "its process" if event["kind"] == "SENT" else "the daemon"
    return "" if first is None else f" ({process} was {text.downtime(first)})"


def _due(event: Event) -> str:
    return text.utc(event.get("due_ms"))


def _who(event: Event) -> str:
    return f"group {event['group']}" if event.get("group") else "an unknown group"


def _attempt(event: Event) -> str:
    return f"attempt {event.get('attempt')}"


def _dead(why: str) -> _Words:
    def said(event: Event) -> str:
        source = "while its copy waited" if event.get("queue_id") is None else f"from {place_in_words(event)}"
        offset = "" if event.get("detail") is None else f" at offset {text.count(event['detail'])}"
        letters = f"%DLQ%{event.get('group')}{offset}"
        return f"{_who(event)}: dead letter after {_attempt(event)}, {why}; {source} to {letters}"

    return said


def _refused(event: Event) -> str:
    letters = f"%DLQ%{event.get('group')} at offset {text.count(event.get('detail') or 0)}"
    return f"the cluster refuses it with code {event.get('attempt')}: from {place_in_words(event)} to {letters}"


def _there(event: Event) -> str:
    offset = event.get("detail")
    return "" if offset is None or offset < 0 else f" at offset {text.count(offset)} of a queue there"


def _times(event: Event) -> str:
    times = event.get("attempt") or 1
    return "sent once" if times == 1 else f"sent {times} times"


def _again(what: str, *, is_timed: bool = False) -> _Words:
    def said(event: Event) -> str:
        late = late_in_words(event) if is_timed else ""
        return f"{_who(event)} {what}{late} for {_attempt(event)}, {place_in_words(event)}"

    return said


def _undecided(why: str) -> _Words:
    def said(event: Event) -> str:
        letters = f"%DLQ%{event.get('group')} at offset {text.count(event.get('detail') or 0)}"
        return f"its transaction was not decided{why.format(event.get('attempt'))}: to {letters}"

    return said


def _asked(event: Event) -> str:
    return f"its producers are asked for its outcome, check {event.get('attempt')}; the next one is at {_due(event)}"


def _redriven(event: Event) -> str:
    source = f"%DLQ%{event.get('group')} at offset {text.count(event.get('detail') or 0)}"
    return f"made of the dead letter in {source}, for {_who(event)} alone, in {place_in_words(event)}"


def _hidden(event: Event) -> str:
    return f", hidden in {place_in_words(event)} until {_due(event)}"


_WORDS: Mapping[str, _Words] = {
    "SCHEDULED": lambda event: f"accepted, to be delivered at {_due(event)}",
    "QUEUED": lambda event: f"accepted, at once in {place_in_words(event)}",
    "DELIVERED": lambda event: f"handed over{late_in_words(event)} to {place_in_words(event)}",
    "HALF": lambda event: f"accepted as a half message: invisible; its producers are asked at {_due(event)}",
    "TX_CHECKED": _asked,
    "COMMITTED": lambda _: "its transaction was committed",
    "ROLLED_BACK": lambda _: "its transaction was rolled back",
    "TX_GIVEN_UP": _undecided(", after check {}"),
    "TX_TOO_OLD": _undecided(" in time"),
    "OCCURRED": lambda event: f"sent by its schedule, as occurrence {text.count(event.get('detail') or 0)}",
    "RESCHEDULED": lambda event: f"to be delivered at {_due(event)} instead",
    "RECALLED": lambda _: "cancelled",
    "REPLACED": lambda _: "cancelled, since a message with the same own key took its place",
    "ABSORBED": lambda event: f"not stored: another message with its own key waits until {_due(event)}",
    "EXPIRED": lambda event: f"removed from {place_in_words(event)}",
    "ACKED": lambda event: f"{_who(event)} finished {_attempt(event)}, {place_in_words(event)}",
    "NACKED": lambda event: f"{_who(event)} failed {_attempt(event)}, a copy waits until {_due(event)}",
    "QUEUED_FOR_GROUP": _redriven,
    "TAKEN_OVER": lambda event: f"{_who(event)} failed {_attempt(event)} out of sight{_there(event)}: it is here now",
    "RETRIED": _again("sees it again", is_timed=True),
    "RETRY_MOVED": _again("sees it again, moved by hand,"),
    "DEAD_EXHAUSTED": _dead("no attempts left"),
    "DEAD_TOO_OLD": _dead("too old"),
    "DEAD_TOO_LATE": _dead("its sender did not want it that late"),
    "DEAD_FORWARDED": _dead("given up by its consumer"),
    "DEAD_SENT_BACK": _dead("sent back for good"),
    "DEAD_BY_OPERATOR": _dead("by hand"),
    "FORWARDED": lambda event: f"the cluster has it{_there(event)}, from {place_in_words(event)}, {_times(event)}",
    "FORWARD_REFUSED": _refused,
    "FORWARD_IN_DOUBT": lambda _: "sent to the cluster without an answer: it may be there, and is sent again",
    "FETCHED": lambda event: f"taken from the inner topic of the cluster{_there(event)}",
    "FILTERED": lambda event: f"{_who(event)} passed it over, by its filter or by hand, {place_in_words(event)}",
    "LEASE_EXPIRED": _again("did not finish in time; it comes back"),
    "GIVEN_BACK": _again("gave it back at once; it comes back"),
    "POSTPONED": lambda event: f"{_who(event)} failed {_attempt(event)}{_hidden(event)}",
    "INVISIBLE_CHANGED": lambda event: f"{_who(event)} changed how long it is hidden{_hidden(event)}",
    "REDRIVEN": lambda event: f"dead letter of {_who(event)} sent again as a new message",
    "PURGED": lambda event: f"dead letter of {_who(event)} thrown away by hand",
    "SENT": lambda event: f"sent by its handler at {_attempt(event)},{late_in_words(event) or ' no due time'}",
    "SEND_FAILED": lambda event: f"{_attempt(event)} to send it failed, pending until {_due(event)}",
    "SEND_DEAD": lambda event: f"given up after {_attempt(event)}, in the dead set",
    "REQUEUED": lambda event: f"requeued from the dead set, pending until {_due(event)}",
    "DROPPED": lambda _: "thrown away because a bound was reached, as configured",
}  # fmt: skip
