"""The promises of docs/reference/guarantees.md, held against what clients saw and against the audit trail.

Each rule returns what broke it, one line each, so that a failing run shows all that went wrong and not the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from support.clients.load.crash import ATTEMPTS_MAX, INVISIBLE_MS, Ledger, Seen
from support.models.store.outbox import TrailEvent

from broker_adapter.contracts.message import unpack_id
from dmq.broker.handles.receipt_handle import read_receipt
from dmq.trail.events import EventKind

# A lease begins when the server hands a message out; what a client can see is the time at the end of the answer.
_ANSWER_MS_MAX = 1_000
_ARRIVALS = {EventKind.QUEUED, EventKind.DELIVERED}
_RETURNS = {EventKind.LEASE_EXPIRED, EventKind.GIVEN_BACK}
_OF_PLACES = {EventKind.ACKED, EventKind.POSTPONED, EventKind.INVISIBLE_CHANGED} | _RETURNS


def broken_promises(ledger: Ledger, trail: list[TrailEvent]) -> list[str]:
    """Return everything that is not as promised."""
    deliveries: dict[str, list[Seen]] = defaultdict(list)
    for seen in ledger.seen:
        deliveries[seen.received.message_id].append(seen)
    for each in deliveries.values():
        each.sort(key=lambda seen: (seen.boot, seen.received.answered_at_ms))
    told = _Told(_of_the_load(ledger, trail))
    return [
        *ledger.refusals,
        *_lost(ledger, deliveries),
        *_early(ledger),
        *_after_ack(ledger),
        *_unexplained(ledger, deliveries, told),
        *_stored_twice(deliveries),
        *_too_often(ledger),
        *_out_of_order(ledger, deliveries),
        *_trail_gaps(trail),
        *_trail_disagrees(ledger, deliveries, told),
    ]


def _lost(ledger: Ledger, deliveries: dict[str, list[Seen]]) -> Iterator[str]:
    """Accepted means kept: every acknowledged send arrives, and nothing arrives that nobody sent."""
    for message_id, sent in ledger.sent.items():
        if sent.accepted and message_id not in deliveries and message_id not in ledger.dead:
            yield f"lost: {message_id} was accepted and never arrived"
    for message_id, seen in deliveries.items():
        wanted = ledger.sent.get(message_id)
        if wanted is None:
            yield f"foreign: {message_id} was never sent"
        elif any(each.received.body.split() != [message_id.encode(), b"%d" % wanted.deliver_at_ms] for each in seen):
            yield f"damaged: {message_id} has another body"


def _early(ledger: Ledger) -> Iterator[str]:
    """Never early, by this host's clock, and the message says when it was wanted."""
    for seen in ledger.seen:
        message_id, wanted_ms = seen.received.message_id, ledger.sent[seen.received.message_id].deliver_at_ms
        if seen.received.deliver_at_ms != wanted_ms:
            yield f"retimed: {message_id} was wanted at {wanted_ms}, says {seen.received.deliver_at_ms}"
        if min(seen.at_ms, seen.received.answered_at_ms) < wanted_ms:
            yield f"early: {message_id} came at {seen.at_ms}, {wanted_ms - seen.at_ms} ms before its time"


def _after_ack(ledger: Ledger) -> Iterator[str]:
    """An acknowledgement answered OK is final; a message hidden with OK is not seen before its time."""
    for seen in ledger.seen:
        message_id, at_ms = seen.received.message_id, seen.received.answered_at_ms
        acked_ms = ledger.acked_at_ms.get(message_id)
        if acked_ms is not None and at_ms > acked_ms:
            yield f"after ack: {message_id} came again {at_ms - acked_ms} ms after its acknowledgement"
        for hidden in ledger.hidden.get(message_id, ()):
            if hidden.at_ms < at_ms < hidden.until_ms:
                yield f"while hidden: {message_id} came {hidden.until_ms - at_ms} ms before it was to be visible"


def _unexplained(ledger: Ledger, deliveries: dict[str, list[Seen]], told: _Told) -> Iterator[str]:
    """A message comes again only after a restart, an expired lease or a change of its invisible duration; or when it
    did not reach its client, which the trail has as given back.
    """
    for message_id, seen in deliveries.items():
        if not all(each.received.attempt >= 1 for each in seen):
            yield f"attempts: {message_id} came with an attempt below 1"
        hidden = [*ledger.hidden.get(message_id, ()), *ledger.maybe_hidden.get(message_id, ())]
        for first, second in pairwise(seen):
            if second.received.attempt < first.received.attempt:
                yield f"attempts: {message_id} went from {first.received.attempt} to {second.received.attempt}"
            if second.boot != first.boot:
                continue  # plain leases end with the daemon
            between = (first.received.answered_at_ms, second.received.answered_at_ms)
            has_expired = between[1] - between[0] >= INVISIBLE_MS - _ANSWER_MS_MAX
            was_changed = any(between[0] <= each.at_ms and each.until_ms <= between[1] for each in hidden)
            was_given_back = any(between[0] <= at_ms <= between[1] for at_ms in told.given_back.get(message_id, ()))
            if not (has_expired or was_changed or was_given_back):
                yield f"duplicate: {message_id} came twice within {between[1] - between[0]} ms"
            elif second.received.attempt == first.received.attempt:
                yield f"attempts: {message_id} came back with attempt {first.received.attempt} again"


def _stored_twice(deliveries: dict[str, list[Seen]]) -> Iterator[str]:
    """One id, one place in one queue; one place, one id. A retry has a place of its own in the group's lane."""
    owners: dict[tuple[int, int, int], str] = {}
    for message_id, seen in deliveries.items():
        places = {read_receipt(each.received.receipt_handle)[1:4] for each in seen}
        if len({place for place in places if place[0] == min(places)[0]}) > 1:  # the topic was there before its lane
            yield f"stored twice: {message_id} is at {sorted(places)}"
        for place in places:
            if owners.setdefault(place, message_id) != message_id:
                yield f"shared place: {place} holds {message_id} and {owners[place]}"


def _too_often(ledger: Ledger) -> Iterator[str]:
    """Nothing is handed out more often than its policy allows; whoever is dead is so once, and was not acknowledged."""
    for seen in ledger.seen:
        if seen.received.attempt > ATTEMPTS_MAX:
            yield f"attempts: {seen.received.message_id} came for the {seen.received.attempt}th time"
    for message_id, offsets in ledger.dead.items():
        if message_id not in ledger.sent:
            yield f"foreign: {message_id} is dead and was never sent"
        if len(offsets) > 1:
            yield f"dead twice: {message_id} is at {sorted(offsets)} of the dead-letter queue"
        if message_id in ledger.acked_at_ms:
            yield f"dead: {message_id} was acknowledged"


def _out_of_order(ledger: Ledger, deliveries: dict[str, list[Seen]]) -> Iterator[str]:
    """In each run of the daemon the messages of a message group come for the first time in the order of their queue.

    What was handed out before a restart and not finished comes again before anything later does.
    """
    lines: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for message_id, seen in deliveries.items():
        message_group = ledger.sent[message_id].message_group if message_id in ledger.sent else ""
        for boot in {each.boot for each in seen} if message_group else ():
            first = next(each.received for each in seen if each.boot == boot)
            lines[message_group, boot].append((first.queue_offset, first.answered_at_ms, message_id))
    for (message_group, boot), line in lines.items():
        for (_, at_ms, message_id), (_, later_ms, later_id) in pairwise(sorted(line)):
            if later_ms < at_ms:
                yield f"order: {later_id} of {message_group} came before {message_id} in run {boot}"


def _trail_gaps(trail: list[TrailEvent]) -> Iterator[str]:
    """Audit sequences start at 1 and have no gap; boots and commit times never go back."""
    for expected, each in enumerate(trail, 1):
        if each.record.sequence != expected:
            yield f"trail: sequence {each.record.sequence} where {expected} was due"
            return
    for first, second in pairwise(trail):
        if second.record.boot < first.record.boot:
            yield f"trail: boot {second.record.boot} after {first.record.boot}"


class _Told:
    """What the trail says of each message."""

    def __init__(self, trail: list[TrailEvent]) -> None:
        self.counts: dict[EventKind, Counter[str]] = defaultdict(Counter)
        self.early: list[str] = []
        self.nowhere = 0  # events of places that hold no message
        self.dead: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.given_back: dict[str, list[int]] = defaultdict(list)  # when
        places: dict[tuple[int, int], str] = {}
        topic_ids = {event.topic_id for _, event in trail if event.kind in _ARRIVALS}
        for record, event in trail:
            if event.topic_id not in topic_ids or not event.topic_id:
                continue  # the dead-letter queue, or nobody's
            place = (event.queue_id, record.queue_offset)
            message_id = unpack_id(event.message_id) if event.message_id else ""
            if event.kind in _ARRIVALS or event.kind is EventKind.RETRIED:
                places[place] = message_id
                if event.kind is not EventKind.QUEUED and record.committed_at_ms < event.time_ms:
                    self.early.append(f"{message_id} was visible {event.time_ms - record.committed_at_ms} ms early")
            elif event.kind in _OF_PLACES:
                self.nowhere += place not in places
                message_id = places.get(place, "")
            self.counts[event.kind][message_id] += 1
            if event.kind is EventKind.GIVEN_BACK:
                self.given_back[message_id].append(record.committed_at_ms)
            self.dead[message_id] += event.kind.name.startswith("DEAD_")
            self.retries[message_id] += event.kind is EventKind.NACKED


def _of_the_load(ledger: Ledger, trail: list[TrailEvent]) -> list[TrailEvent]:
    """Leave out what others did, operators say, with groups and topics of their own."""
    handles = [read_receipt(each.received.receipt_handle) for each in ledger.seen]
    if not handles:
        return trail
    topic_id, group_id = min(each.topic_id for each in handles), handles[0].group_id  # the topic is older than lanes
    return [each for each in trail if each.event.topic_id == topic_id and each.event.group_id in {0, group_id}]


def _trail_disagrees(ledger: Ledger, deliveries: dict[str, list[Seen]], told: _Told) -> Iterator[str]:
    """The trail knows what the clients know, message by message; and each one has one end, or still waits."""
    counts, acked, dead = told.counts, told.counts[EventKind.ACKED], told.dead
    yield from (f"trail: {each}" for each in told.early)
    if told.nowhere:
        yield f"trail: {told.nowhere} events of places that hold no message"
    yield from _accepted_once(ledger, counts)
    for message_id, sent in ledger.sent.items():
        ends = acked[message_id] + dead[message_id]
        if ends > 1:
            yield f"trail: {message_id} was acknowledged {acked[message_id]} times and died {dead[message_id]} times"
        if not ends and sent.accepted and message_id not in ledger.in_doubt:
            yield f"trail: {message_id} has no end"
        if message_id in ledger.acked_at_ms and not acked[message_id]:
            yield f"trail: {message_id} was answered OK for its ack, and the trail has none"
        if (message_id in ledger.dead) > dead[message_id]:
            yield f"trail: {message_id} is a dead letter, and the trail knows of no death"
        if counts[EventKind.RETRIED][message_id] > told.retries[message_id]:
            yield f"trail: {message_id} was retried more often than it failed"
        failures = told.retries[message_id] + sum(counts[kind][message_id] for kind in _RETURNS)
        attempts = [seen.received.attempt for seen in deliveries.get(message_id, ())]
        if attempts and max(attempts) > 1 + failures:
            yield f"attempts: {message_id} reached attempt {max(attempts)} after {failures} failures"


def _accepted_once(ledger: Ledger, counts: dict[EventKind, Counter[str]]) -> Iterator[str]:
    scheduled, queued, delivered = (
        counts[kind] for kind in (EventKind.SCHEDULED, EventKind.QUEUED, EventKind.DELIVERED)
    )
    for message_id, sent in ledger.sent.items():
        accepted = scheduled[message_id] + queued[message_id]
        if accepted > 1 or (sent.accepted and not accepted):
            yield f"trail: {message_id} was answered OK {sent.accepted} times and accepted {accepted} times"
        if delivered[message_id] != scheduled[message_id]:
            yield f"trail: {message_id} was scheduled {scheduled[message_id]}, delivered {delivered[message_id]} times"
        if scheduled[message_id] and not sent.deliver_at_ms:
            yield f"trail: {message_id} was to come at once and was scheduled"
