"""Verdict of a run: figures, exit code and result lines, computed from the reports of the clients. Pure.

The verdict relies on the observations of the *clients*. The daemon is trusted only for the delivery time that it
stamped on a message, which is checked against the producer's send time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_SHOWN_MAX = 10


class AnsweredSend(NamedTuple):
    """A send was answered OK. ``asked_ms`` is the requested delivery timestamp, 0 if a delay was requested."""

    number: int
    message_id: str
    asked_ms: int
    started_ms: int  # before its first attempt
    answered_ms: int
    attempts: int  # calls of ``send``, all with the same message id


class Reception(NamedTuple):
    """A message was delivered to the consumer."""

    number: int
    at_ms: int
    deliver_at_ms: int  # from the daemon; 0 from a cluster, whose topic accepts no delayed messages


class DaemonOutage(NamedTuple):
    """The kill, and the time of the next service."""

    killed_at_ms: int
    serving_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoVerdict:
    """Figures of a run."""

    planned: int
    sends: Mapping[int, AnsweredSend]  # the accepted ones by number
    delivered: int  # of those, at least once
    lost: Sequence[int]  # numbers that were accepted and never received
    early: Sequence[int]
    duplicates: int  # deliveries after the first one of a message
    late_ms: Sequence[int]  # sorted; of each message at its first delivery
    late_of_outage_ms: Sequence[int]  # the same, of messages that were due while the daemon or its consumer was away
    back_ms: int = 0  # from the kill to the next delivery; 0: none

    @property
    def faults(self) -> list[str]:
        """Reasons of failure; none if all messages were accepted, and delivered in time."""
        found = {
            "messages were lost": self.lost,
            "messages were early": self.early,
            "not all sends were accepted": len(self.sends) < self.planned,
        }
        return [fault for fault, is_so in found.items() if is_so]


def judge(
    planned_ms: Mapping[int, int], reports: Sequence[Sequence[Any]], outage: DaemonOutage | None = None
) -> DemoVerdict:
    """Judge a run by the reports of the client process. ``planned_ms`` is the delay of each number."""
    sends = {each.number: each for each in (AnsweredSend(*fields) for kind, *fields in reports if kind == "sent")}
    received = sorted((Reception(*fields) for kind, *fields in reports if kind == "received"), key=lambda it: it.at_ms)
    back_at_ms = next((each.at_ms for each in received if outage and each.at_ms > outage.serving_at_ms), 0)
    first = {each.number: each for each in reversed(received)}
    early: list[int] = []
    usual_ms: list[int] = []
    outage_ms: list[int] = []
    for number, each in first.items():
        due_ms = _due_ms(planned_ms.get(number, 0), sends.get(number), each)
        if each.at_ms < due_ms:
            early.append(number)
        was_away = outage and each.at_ms >= outage.killed_at_ms and due_ms <= (back_at_ms or outage.serving_at_ms)
        (outage_ms if was_away else usual_ms).append(max(0, each.at_ms - due_ms))
    return DemoVerdict(
        planned=len(planned_ms),
        sends=sends,
        delivered=len(sends.keys() & first.keys()),
        lost=sorted(sends.keys() - first.keys()),
        early=sorted(early),
        duplicates=len(received) - len(first),
        late_ms=sorted(usual_ms),
        late_of_outage_ms=sorted(outage_ms),
        back_ms=back_at_ms - outage.killed_at_ms if outage is not None and back_at_ms else 0,
    )


def _due_ms(delay_ms: int, sent: AnsweredSend | None, first: Reception) -> int:
    """Return the due time of a message.

    A delay counts from the acceptance by the daemon, which is between the first send attempt and the answer. The
    daemon's stamp is trusted only within these bounds. Without a stamp, from a cluster, a message is early before the
    first bound and late after the second.
    """
    due_ms = first.deliver_at_ms or first.at_ms
    if sent is None:  # not answered OK yet, but stored nevertheless
        return due_ms
    return sent.asked_ms or min(max(due_ms, sent.started_ms + delay_ms), sent.answered_ms + delay_ms)


def lines_of(verdict: DemoVerdict, restart: str = "") -> list[str]:
    """Return the result, line by line; the positions of the figures are fixed. ``restart`` describes the kill."""
    accepted, resent = len(verdict.sends), sum(each.attempts > 1 for each in verdict.sends.values())
    of_planned = "" if accepted == verdict.planned else f"of {verdict.planned:,}; "
    again = f"; {resent:,} of them sent repeatedly" if resent else ""
    back = f"{'':<11}next delivery {verdict.back_ms / 1000:.2f} s after the kill"
    return [
        _line("accepted", accepted, f"{of_planned}answered OK by the daemon{again}"),
        _line("delivered", verdict.delivered, "to the official client, at least once"),
        _line("lost", len(verdict.lost), _numbers(verdict.lost)),
        _line("duplicates", verdict.duplicates, ""),
        _line("early", len(verdict.early), _numbers(verdict.early)),
        f"{'lateness':<11}{'p50':>7} {'p99':>11} {'max':>11}   at the consumer",
        *_percentiles(verdict.late_ms, "messages"),
        *_percentiles(verdict.late_of_outage_ms, "due during the outage"),
        *([f"{'kill':<11}{restart}"] if restart else []),
        *([back] if verdict.back_ms else []),
        f"FAILED: {', '.join(verdict.faults)}" if verdict.faults else "OK: nothing lost, nothing early",
    ]


def _line(name: str, count: int, about: str) -> str:
    return f"{name:<11}{count:>7,}   {about}".rstrip()


def _numbers(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN_MAX} more" if len(numbers) > _SHOWN_MAX else ""
    return "messages " + ", ".join(map(str, numbers[:_SHOWN_MAX])) + more if numbers else ""


def _percentiles(ordered_ms: Sequence[int], of: str) -> list[str]:
    """Return the line of percentiles, by nearest rank; none without values."""
    if not ordered_ms:
        return []
    ranks = (ordered_ms[-(-len(ordered_ms) * percent // 100) - 1] for percent in (50, 99, 100))
    return [f"{'':<7}" + " ".join(f"{rank:>8,} ms" for rank in ranks) + f"   {len(ordered_ms):,} {of}"]
