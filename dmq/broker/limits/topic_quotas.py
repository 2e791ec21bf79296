"""Quotas of topics: limits of pending messages, of pending bytes, and of sends per second.

Pending messages are delayed, held, or undecided half messages. Only the writer has their exact number, so it decides by
bounds that are committed with the send. Concurrent sends cannot exceed them. The rate is spent here. If it is used up,
the bound of the send closes the topic to new messages. In either case the writer recognizes repeated message ids, and a
repeated send gets its first answer.

Quotas refuse only sends of clients. Accepted messages continue: transaction commits, retries, redrives, occurrences of
schedules, and messages from a cluster or possibly there. They all count as pending while they wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import Clock
from dmq.broker.topics import Names, Topic
from dmq.config.units import format_duration
from dmq.errors import OverBound
from dmq.runtime.token_bucket import TokenBucket, refilled, spent, wait_s
from dmq.store.schema.keys import half_scope
from dmq.store.schema.topics.names import NO_QUOTAS, TopicQuotas
from dmq.store.writer.operations import Bound

QUOTAS: Final = TopicQuotas._fields
_OF = {"entries": "max_pending", "bytes": "max_pending_bytes", "closed": "send_rate"}
_RETRY_MS_MIN = 1


class OverTopicQuota(Overloaded):
    """Refusal of a send by a quota of its topic; no part of the send is stored."""

    def __init__(self, quota: str, topic: str, used: str, *, limit: int, retry: str) -> None:
        super().__init__(f"quota {quota} of topic {topic}: {used}", limit=limit)
        self.quota = quota
        self.retry = retry

    def __str__(self) -> str:
        return f"{self.what} (limit {self.limit}); {self.retry}"


class QuotaReservation(NamedTuple):
    """Reservation of a send: the bounds to commit with it, and the rate spent, by topic id."""

    bounds: Sequence[Bound]
    spent: Counter[int]
    counts: Counter[int]


_NOTHING = QuotaReservation((), Counter(), Counter())


class SendQuotas:
    """Quota checks of sends. It belongs to the event loop."""

    def __init__(self, names: Names, clock: Clock, defaults: TopicQuotas = NO_QUOTAS) -> None:
        """Create the checks; ``defaults`` apply to topics without quotas of their own."""
        self.refused = dict.fromkeys(QUOTAS, 0)  # refused messages, by quota
        self._names = names
        self._clock = clock
        self.defaults = defaults
        self._has_defaults = any(defaults)
        self._buckets: dict[int, TokenBucket] = {}  # of rate-limited topics with sends

    def of(self, topic: Topic) -> TopicQuotas:
        """Return the effective quotas of a topic; retry and dead-letter topics have none."""
        return NO_QUOTAS if self._names.is_derived(topic.name) else topic.quotas.over(self.defaults)

    @property
    def may_refuse(self) -> bool:
        """Whether any topic has a quota."""
        return self._has_defaults or bool(self._names.limited)

    def ask(self, topics: Iterable[Topic]) -> QuotaReservation:
        """Return the reservation for a send of one message to each of ``topics``.

        If the send fails, return the spent rate with ``give_back``.
        """
        if not self.may_refuse:
            return _NOTHING
        return self._ask(topics)

    def _ask(self, topics: Iterable[Topic]) -> QuotaReservation:
        asked = QuotaReservation([], Counter(), Counter(topic.topic_id for topic in topics))
        bounds = []
        for topic_id, count in asked.counts.items():
            quotas = self.of(self._names.topics_by_id[topic_id])
            if not any(quotas):
                continue
            is_closed = not self._spend(topic_id, quotas.send_rate or 0, count)
            if quotas.send_rate and not is_closed:
                asked.spent[topic_id] += count
            if is_closed or quotas.max_pending or quotas.max_pending_bytes:
                scopes = (topic_id, half_scope(topic_id))
                limits = (quotas.max_pending or None, quotas.max_pending_bytes or None)
                bounds.append(Bound(scopes, *limits, is_closed=is_closed))
        return asked._replace(bounds=bounds)

    def spend_at_once(self, envelopes: Sequence[Envelope]) -> None:
        """Spend the rate of a send that is forwarded to a cluster; repeated sends are not recognized here.

        Raise ``OverTopicQuota`` without spending if the rate is used up.
        """
        topics = [topic for each in envelopes if (topic := self._names.topics.get(each.topic)) is not None]
        if not self._names.limited and not self.defaults.send_rate:
            return
        asked = self._ask(topics)
        closed = next((each for each in asked.bounds if each.is_closed), None)
        if closed is not None:
            self.give_back(asked.spent)
            more = asked.counts[closed.scopes[0]]
            error = OverBound(closed.scopes[0], "closed", waiting=0, more=more, limit=0, next_due_ms=None)
            raise self.refusal(error, asked, 0)

    def _spend(self, topic_id: int, rate: int, count: int) -> bool:
        if not rate:
            self._buckets.pop(topic_id, None)
            return True
        bucket = refilled(self._buckets.get(topic_id), rate, self._clock.monotonic_s())
        left = spent(bucket, rate, count)
        self._buckets[topic_id] = bucket if left is None else left
        return left is not None

    def give_back(self, spent_by: Counter[int]) -> None:
        """Return the rate spent for refused or already known messages."""
        for topic_id, count in spent_by.items():
            if (bucket := self._buckets.get(topic_id)) is not None:
                self._buckets[topic_id] = bucket._replace(left=bucket.left + count)

    def give_back_repeated(self, asked: QuotaReservation, repeated: Sequence[bool], topics: Sequence[Topic]) -> None:
        """As ``give_back``, for the already known messages of a send."""
        pairs = zip(topics, repeated, strict=True)
        known = Counter(topic.topic_id for topic, is_known in pairs if is_known and topic.topic_id in asked.spent)
        self.give_back(known)

    def refusal(self, error: OverBound, asked: QuotaReservation, now_ms: int) -> OverTopicQuota:
        """Count a refusal and return the error for the sender."""
        topic = self._names.topics_by_id[error.scope]
        quota, quotas = _OF[error.what], self.of(topic)
        self.refused[quota] += asked.counts.total()
        if quota == "send_rate":
            rate = quotas.send_rate or 1
            bucket = refilled(self._buckets.get(topic.topic_id), rate, self._clock.monotonic_s())
            retry = _retry(round(wait_s(bucket, rate, asked.counts[topic.topic_id]) * 1000))
            used = f"sent as many in a second, {error.more} more asked for"
            return OverTopicQuota(quota, topic.name, used, limit=rate, retry=retry)
        unit = " bytes" if error.what == "bytes" else ""
        used = f"{error.waiting}{unit} pending, {error.more} more asked for"
        if error.more > error.limit:
            retry = "it is more than the topic may have pending at all"
        elif topic.paused_since_ms is not None:
            retry = "try again once the topic, which is paused, is resumed, or some were cancelled"
        elif error.next_due_ms is None:
            retry = "try again once some were delivered or cancelled"
        else:
            retry = _retry(error.next_due_ms - now_ms)
        return OverTopicQuota(quota, topic.name, used, limit=error.limit, retry=retry)

    def used_rate(self, topic: Topic) -> int:
        """Return how many messages of the send rate are currently used."""
        rate, bucket = self.of(topic).send_rate, self._buckets.get(topic.topic_id)
        if not rate or bucket is None:
            return 0
        return max(0, round(rate - refilled(bucket, rate, self._clock.monotonic_s()).left))


def _retry(left_ms: int) -> str:
    left_ms = -(-left_ms // 1000) * 1000 if left_ms > 1000 else max(left_ms, _RETRY_MS_MIN)
    return f"try again in {format_duration(left_ms)}"
