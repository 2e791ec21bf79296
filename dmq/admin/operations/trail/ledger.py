"""RPCs of ``rockdmq.admin.v1.AdminService`` about the ledger: messages by state, and whether the numbers balance."""

from __future__ import annotations

import asyncio
from collections import Counter

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule, topic_unknown
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import filled
from dmq.broker import EmbeddedBroker
from dmq.broker.operations import in_flight
from dmq.errors import StoreError
from dmq.recovery import SHOWN_MAX, LedgerVerifier, Verification, no_ledger
from dmq.store import Store
from dmq.store.schema.accounting.counts import BUCKET_MS
from dmq.trail.ledger import Difference, Ledger, TopicBook, read_books

_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000
_SPANS = (("minute", _MINUTE_MS), ("hour", _HOUR_MS), ("day", _DAY_MS), ("week", 7 * _DAY_MS))
_BUCKETS_MAX = 20_000  # the minutes of a week, and overdue ones


class LedgerCalls:
    """RPCs of the ledger. Raise ``Refused`` for invalid input, ``BrokerUnavailable`` for damage."""

    def __init__(self, store: Store, broker: EmbeddedBroker, verifier: LedgerVerifier | None) -> None:
        """Without a ``verifier`` verifications are refused."""
        self._store = store
        self._broker = broker
        self._verifier = verifier

    async def get_ledger(self, request: wire.GetLedgerRequest) -> wire.GetLedgerResponse:
        """Return the terms of a topic, or of all topics, and their imbalances."""
        store = self._store
        if store.ledger_head is None:
            raise no_ledger()
        topic = check_topic(request.topic) if request.topic else ""
        try:
            return await asyncio.to_thread(self._answer, topic, with_groups=request.with_groups)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error

    async def verify_ledger(self, request: wire.VerifyLedgerRequest) -> wire.VerifyLedgerResponse:
        """Start a comparison of the ledger with the rows of the store, or return the progress of one."""
        if self._verifier is None:
            raise Refused(Rule.REQUEST, "this daemon has no store on disk to verify")
        if request.number < 0:
            raise Refused(Rule.REQUEST, "not a number of a verification", value=request.number)
        return _verification(self._verifier.state(request.number) if request.number else await self._verifier.verify())

    def _answer(self, topic: str, *, with_groups: bool) -> wire.GetLedgerResponse:
        leased = self._broker.lags.leased() if with_groups else Counter()
        head, ledger = self._store.ledger_head, read_books(self._store)
        books, differences = ledger.topics(), ledger.differences()
        if topic:
            books = [book for book in books if ledger.name(book.topic_id) == topic]
            if not books:
                raise topic_unknown(topic)
        return wire.GetLedgerResponse(
            began_at_ms=head.began_at_ms if head is not None else 0,
            topics=[self._topic(book, ledger, leased, with_groups=with_groups) for book in books],
            differences=[_difference(each) for each in differences[:SHOWN_MAX]],
            differences_total=len(differences),
        )

    def _topic(
        self, book: TopicBook, ledger: Ledger, leased: Counter[tuple[int, int]], *, with_groups: bool
    ) -> wire.LedgerTopic:
        letters = book.letters
        return filled(
            wire.LedgerTopic,
            book,
            topic=ledger.name(book.topic_id),
            due=self._due(book) if book.pending > 0 else None,
            letters=filled(wire.LedgerLetters, letters) if letters else None,
            groups=[
                filled(
                    wire.LedgerGroup,
                    each,
                    group=ledger.name(each.group_id),
                    in_flight=in_flight(each, leased[book.topic_id, each.group_id]),
                )
                for each in book.groups
                if with_groups
            ],
        )

    def _due(self, book: TopicBook) -> wire.LedgerDue:
        """Return pending messages by due time. Whole minutes are counted, shortly after the terms were read."""
        store = self._store
        now_ms = store.clock.now_ms()
        found = store.due_counts(book.topic_id, 0, now_ms + _SPANS[-1][1], limit=_BUCKETS_MAX)
        due = wire.LedgerDue()
        for bucket in found:
            if bucket.until_ms <= now_ms:
                due.overdue += bucket.count
                continue
            ahead_ms = bucket.until_ms - BUCKET_MS - now_ms
            span = next((name for name, span_ms in _SPANS if ahead_ms < span_ms), None)
            if span is not None:
                setattr(due, span, getattr(due, span) + bucket.count)
        due.later = max(
            0, book.pending - sum(getattr(due, name) for name in ("overdue", *(name for name, _ in _SPANS)))
        )
        return due


def _difference(each: Difference) -> wire.LedgerDifference:
    return wire.LedgerDifference(**each._asdict())


def _verification(made: Verification) -> wire.VerifyLedgerResponse:
    differences = [_difference(each) for each in made.first]
    return filled(wire.VerifyLedgerResponse, made, differences=differences, differences_total=made.differences)
