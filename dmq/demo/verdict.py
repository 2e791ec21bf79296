"""Verdict of a run: figures and exit code, computed from the facts of the clients. Pure.

The verdict relies on the observations of the *clients*. The daemon is trusted only for the delivery time that it
stamped on a message, which is checked against the producer's send time. In front of a cluster its trail is also trusted
for sends without an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from dmq.demo.facts import Acked, Received, Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The kill: its time, the time of the next service, and of the next message received (0: never)."""

    killed_at_ms: int
    serving_at_ms: int
    received_at_ms: int = 0
    is_of_broker: bool = False  # a broker of the cluster was killed with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Lateness of messages at the consumer; figures are 0 if ``count`` is."""

    count: int = 0
    p50_ms: int = 0
    p99_ms: int = 0
    max_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Figures of a run."""

    planned: int
    sent: int  # answered OK
    received: int  # of those, at least once
    lost: tuple[int, ...]  # numbers that were answered OK and never received
    early: tuple[int, ...]
    repeated_unacked: int  # redelivered: the first delivery was not acknowledged when the daemon was killed
    repeated_expired: int  # redelivered: the invisible duration expired
    repeated_in_doubt: int  # duplicate: sent to the cluster without a known answer
    repeated_forgotten: int  # redelivered although acknowledged: the killed broker lost the acknowledgement
    unexplained: tuple[int, ...]  # redelivered although acknowledged, or stored twice
    resent: int  # sends that needed more than one attempt
    lateness: Lateness = field(default_factory=Lateness)
    lateness_of_outage: Lateness = field(default_factory=Lateness)

    @property
    def duplicated(self) -> int:
        """Number of redeliveries."""
        explained = self.repeated_unacked + self.repeated_expired + self.repeated_in_doubt + self.repeated_forgotten
        return explained + len(self.unexplained)

    @property
    def is_complete(self) -> bool:
        """True if every message of the plan was accepted."""
        return self.sent == self.planned

    @property
    def exit_code(self) -> int:
        """0 if every message was accepted and received, none early, and every redelivery has a known reason."""
        return 0 if self.is_complete and not (self.lost or self.early or self.unexplained) else 1


def judge(
    planned_ms: Mapping[int, int],
    sent: Iterable[Sent],
    received: Iterable[Received],
    acked: Iterable[Acked],
    outage: Outage | None,
    in_doubt: Mapping[str, int] = MappingProxyType({}),
) -> Verdict:
    """Judge a run. ``planned_ms`` is the delay of each number, ``in_doubt`` the number of possible extra copies of each
    id.
    """
    sent_by_number = {each.number: each for each in sent}
    acked_at_ms = {each.reception: each.at_ms for each in acked}
    by_number: dict[int, list[Received]] = {}
    for each in sorted(received, key=lambda each: (each.at_ms, each.reception)):
        by_number.setdefault(each.number, []).append(each)

    early, unexplained = [], []
    unacked = expired = doubtful = forgotten = 0
    doubts = Counter(in_doubt)
    usual_ms: list[int] = []
    outage_ms: list[int] = []
    for number, receptions in by_number.items():
        first = receptions[0]
        due_ms, is_early = _due(planned_ms.get(number, 0), sent_by_number.get(number), first)
        if is_early or any(each.at_ms < due_ms for each in receptions):
            early.append(number)
        late_ms = max(0, first.at_ms - due_ms)
        (outage_ms if _is_of_outage(due_ms, first, outage) else usual_ms).append(late_ms)
        for before, again in pairwise(receptions):
            ack_ms = acked_at_ms.get(before.reception)
            is_finished = ack_ms is not None and ack_ms < again.at_ms
            if before.message_id != again.message_id:
                unexplained.append(number)
            elif is_finished and doubts[again.message_id]:
                doubts[again.message_id] -= 1
                doubtful += 1
            elif is_finished and outage is not None and outage.is_of_broker and before.at_ms <= outage.serving_at_ms:
                forgotten += 1
            elif is_finished:
                unexplained.append(number)
            elif outage is not None and before.at_ms <= outage.serving_at_ms <= again.at_ms:
                unacked += 1
            else:
                expired += 1
    return Verdict(
        planned=len(planned_ms),
        sent=len(sent_by_number),
        received=len(sent_by_number.keys() & by_number.keys()),
        lost=tuple(sorted(sent_by_number.keys() - by_number.keys())),
        early=tuple(sorted(early)),
        repeated_unacked=unacked,
        repeated_expired=expired,
        repeated_in_doubt=doubtful,
        repeated_forgotten=forgotten,
        unexplained=tuple(sorted(unexplained)),
        resent=sum(each.attempts > 1 for each in sent_by_number.values()),
        lateness=spread(usual_ms),
        lateness_of_outage=spread(outage_ms),
    )


def _due(delay_ms: int, sent: Sent | None, first: Received) -> tuple[int, bool]:
    """Return the due time of a message, and whether its stamp (or, without one, its arrival) is too early.

    A delay counts from the acceptance by the daemon, which is between the first send attempt and the answer. The
    daemon's stamp is trusted only within these bounds. Without a stamp, from a cluster, a message is early before the
    first bound and late after the second.
    """
    stamp_ms = first.deliver_at_ms
    if sent is None:  # not answered OK yet, but stored nevertheless
        return stamp_ms or first.at_ms, False
    if sent.asked_ms:
        return sent.asked_ms, 0 < stamp_ms < sent.asked_ms
    earliest_ms, latest_ms = sent.started_ms + delay_ms, sent.answered_ms + delay_ms
    if not stamp_ms:
        return min(latest_ms, max(earliest_ms, first.at_ms)), first.at_ms < earliest_ms
    if stamp_ms < earliest_ms:
        return earliest_ms, True
    return (stamp_ms if stamp_ms <= latest_ms else earliest_ms), False


def _is_of_outage(due_ms: int, first: Received, outage: Outage | None) -> bool:
    """Return True if a message could not come in time because of the outage of the daemon or of its consumer."""
    return (
        outage is not None
        and first.at_ms >= outage.killed_at_ms
        and due_ms <= (outage.received_at_ms or outage.serving_at_ms)
    )


def spread(values_ms: Sequence[int]) -> Lateness:
    """Return the lateness figures of a list; percentiles by nearest rank."""
    if not values_ms:
        return Lateness()
    ordered = sorted(values_ms)

    def rank(percent: int) -> int:
        return ordered[-(-len(ordered) * percent // 100) - 1]

    return Lateness(count=len(ordered), p50_ms=rank(50), p99_ms=rank(99), max_ms=ordered[-1])
