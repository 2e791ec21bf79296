"""The promises of docs/GUARANTEES.md, held against what clients saw and against the audit trail.

Each rule returns what broke it, one line each, so that a failing run shows all that went wrong and not the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from support.crash_load import INVISIBLE_MS, Ledger, Seen

from broker_adapter.message import unpack_id
from dmq.audit.events import EventKind
from dmq.audit.outbox import TrailEvent

# A lease begins when the server hands a message out; what a client can see is the time at the end of the answer.
_ANSWER_MS_MAX = 1_000


def broken_promises(ledger: Ledger, trail: list[TrailEvent]) -> list[str]:
    """Return everything that is not as promised."""
    deliveries: dict[str, list[Seen]] = defaultdict(list)
    for seen in ledger.seen:
        deliveries[seen.received.message_id].append(seen)
    for each in deliveries.values():
        each.sort(key=lambda seen: (seen.boot, seen.received.answered_at_ms))
    return [
        *ledger.refusals,
        *_lost(ledger, deliveries),
        *_early(ledger),
        *_after_ack(ledger),
        *_unexplained(ledger, deliveries),
        *_stored_twice(deliveries),
        *_trail_gaps(trail),
        *_trail_disagrees(ledger, deliveries, trail),
    ]


def _lost(ledger: Ledger, deliveries: dict[str, list[Seen]]) -> Iterator[str]:
    """Accepted means kept: every acknowledged send arrives, and nothing arrives that nobody sent."""
    for message_id, sent in ledger.sent.items():
        if sent.accepted and message_id not in deliveries:
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


def _unexplained(ledger: Ledger, deliveries: dict[str, list[Seen]]) -> Iterator[str]:
    """A message comes again only after a restart, an expired lease or a change of its invisible duration."""
    for message_id, seen in deliveries.items():
        if not all(each.received.attempt >= 1 for each in seen):
            yield f"attempts: {message_id} came with an attempt below 1"
        hidden = ledger.hidden.get(message_id, ())
        for first, second in pairwise(seen):
            if second.received.attempt < first.received.attempt:
                yield f"attempts: {message_id} went from {first.received.attempt} to {second.received.attempt}"
            if second.boot != first.boot:
                continue  # plain leases end with the daemon
            between = (first.received.answered_at_ms, second.received.answered_at_ms)
            has_expired = between[1] - between[0] >= INVISIBLE_MS - _ANSWER_MS_MAX
            was_changed = any(between[0] <= each.at_ms and each.until_ms <= between[1] for each in hidden)
            if not has_expired and not was_changed:
                yield f"duplicate: {message_id} came twice within {between[1] - between[0]} ms"
            elif second.received.attempt == first.received.attempt:
                yield f"attempts: {message_id} came back with attempt {first.received.attempt} again"


def _stored_twice(deliveries: dict[str, list[Seen]]) -> Iterator[str]:
    """One id, one place in one queue; one place, one id."""
    owners: dict[tuple[int, int], str] = {}
    for message_id, seen in deliveries.items():
        places = {(each.received.queue_id, each.received.queue_offset) for each in seen}
        if len(places) > 1:
            yield f"stored twice: {message_id} is at {sorted(places)}"
        for place in places:
            if owners.setdefault(place, message_id) != message_id:
                yield f"shared place: {place} holds {message_id} and {owners[place]}"


def _trail_gaps(trail: list[TrailEvent]) -> Iterator[str]:
    """Audit sequences start at 1 and have no gap; boots and commit times never go back."""
    for expected, each in enumerate(trail, 1):
        if each.record.sequence != expected:
            yield f"trail: sequence {each.record.sequence} where {expected} was due"
            return
    for first, second in pairwise(trail):
        if second.record.boot < first.record.boot:
            yield f"trail: boot {second.record.boot} after {first.record.boot}"


def _trail_disagrees(ledger: Ledger, deliveries: dict[str, list[Seen]], trail: list[TrailEvent]) -> Iterator[str]:
    """The trail knows what the clients know, message by message."""
    counts: dict[EventKind, Counter[str]] = defaultdict(Counter)
    places: dict[tuple[int, int], str] = {}
    acked: Counter[tuple[int, int]] = Counter()
    returned: Counter[tuple[int, int]] = Counter()
    for record, event in trail:
        kind = event.kind
        message_id = unpack_id(event.message_id) if event.message_id else ""
        if kind in {EventKind.SCHEDULED, EventKind.QUEUED, EventKind.DELIVERED}:
            counts[kind][message_id] += 1
        if kind in {EventKind.QUEUED, EventKind.DELIVERED}:
            places[event.queue_id, record.queue_offset] = message_id
        if kind is EventKind.DELIVERED and record.committed_at_ms < event.time_ms:
            yield f"trail: {message_id} was delivered {event.time_ms - record.committed_at_ms} ms early"
        if kind is EventKind.ACKED:
            acked[event.queue_id, event.time_ms] += 1
        if kind in {EventKind.LEASE_EXPIRED, EventKind.GIVEN_BACK}:
            returned[event.queue_id, event.time_ms] += 1
    yield from _accepted_once(ledger, counts)
    for place, message_id in places.items():
        if acked[place] > 1:
            yield f"trail: {message_id} was acknowledged {acked[place]} times"
        if message_id in ledger.acked_at_ms and not acked[place]:
            yield f"trail: {message_id} was answered OK for its ack, and the trail has none"
        attempts = [seen.received.attempt for seen in deliveries.get(message_id, ())]
        if attempts and max(attempts) > 1 + returned[place]:
            yield f"attempts: {message_id} reached attempt {max(attempts)} after {returned[place]} returns"
    if acked.keys() - places.keys():
        yield f"trail: {len(acked.keys() - places.keys())} acks of places that hold no message"


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
