"""Quotas of topics: how many messages may be pending, how many bytes of them, and how many may be sent in a second.

What is pending waits for its time, is held, or is a half message that nobody decided. How much that is only the writer
knows for certain, so it decides, by bounds that ride with the send: exactly, whatever else is on its way. The rate is
spent here; where it is used up, what rides with the send says that nothing new is accepted. Either way the writer
knows what is known already, and a repeat is answered as the first send was.

Only sends of clients are refused. What was accepted goes its way: commits of transactions, retries, redrives,
occurrences of schedules, and what was taken from a cluster or may be there. It counts all the same where it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.message import Envelope
from broker_adapter.runtime.clock import Clock
from dmq.broker.limits.token_bucket import TokenBucket, refilled, spent, wait_s
from dmq.broker.topics.registry import Names, Topic
from dmq.config.units import format_duration
from dmq.errors import OverBound
from dmq.store.schema.keys import half_scope
from dmq.store.schema.names import NO_QUOTAS, TopicQuotas
from dmq.store.writer.operations import Bound

QUOTAS: Final = TopicQuotas._fields
_OF = {"entries": "max_pending", "bytes": "max_pending_bytes", "closed": "send_rate"}
_RETRY_MS_MIN = 1


class OverTopicQuota(Overloaded):
    """A topic has all that its quota allows; nothing of the send was done."""

    def __init__(self, quota: str, topic: str, used: str, *, limit: int, retry: str) -> None:
        super().__init__(f"quota {quota} of topic {topic}: {used}", limit=limit)
        self.quota = quota
        self.retry = retry

    def __str__(self) -> str:
        return f"{self.what} (limit {self.limit}); {self.retry}"


class Asked(NamedTuple):
    """A send that is under way: what rides with it, and what it took of the rates of topics, by id."""

    bounds: Sequence[Bound]
    spent: Counter[int]
    counts: Counter[int]


_NOTHING = Asked((), Counter(), Counter())


class SendQuotas:
    """Asks for room, and says why there is none. Belongs to the event loop."""

    def __init__(self, names: Names, clock: Clock, defaults: TopicQuotas = NO_QUOTAS) -> None:
        """``defaults`` are those of topics that say nothing of their own."""
        self.refused = dict.fromkeys(QUOTAS, 0)  # messages, by quota
        self._names = names
        self._clock = clock
        self.defaults = defaults
        self._has_defaults = any(defaults)
        self._buckets: dict[int, TokenBucket] = {}  # of topics with a rate that something was sent to

    def of(self, topic: Topic) -> TopicQuotas:
        """Return the quotas that count for a topic. Retries and dead letters have none."""
        return NO_QUOTAS if self._names.is_derived(topic.name) else topic.quotas.over(self.defaults)

    @property
    def may_refuse(self) -> bool:
        """Whether any topic has a quota."""
        return self._has_defaults or bool(self._names.limited)

    def ask(self, topics: Iterable[Topic]) -> Asked:
        """Return what rides with a send of one message to each of ``topics``; ``settle`` it whatever comes of it."""
        if not self.may_refuse:
            return _NOTHING
        return self._ask(topics)

    def _ask(self, topics: Iterable[Topic]) -> Asked:
        asked = Asked([], Counter(), Counter(topic.topic_id for topic in topics))
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
        """Spend the rate of a send that is passed on to a cluster, which may know what is repeated: here nobody does.

        Raises ``OverTopicQuota``, and then spends nothing.
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
        """Let others send what was spent for what was refused, or was known already."""
        for topic_id, count in spent_by.items():
            if (bucket := self._buckets.get(topic_id)) is not None:
                self._buckets[topic_id] = bucket._replace(left=bucket.left + count)

    def give_back_repeated(self, asked: Asked, repeated: Sequence[bool], topics: Sequence[Topic]) -> None:
        """As ``give_back``, for those messages of a send that were known already."""
        pairs = zip(topics, repeated, strict=True)
        known = Counter(topic.topic_id for topic, is_known in pairs if is_known and topic.topic_id in asked.spent)
        self.give_back(known)

    def refusal(self, error: OverBound, asked: Asked, now_ms: int) -> OverTopicQuota:
        """Return what the sender is told, and count it."""
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
        """Return how many messages of what a second allows were sent a moment ago."""
        rate, bucket = self.of(topic).send_rate, self._buckets.get(topic.topic_id)
        if not rate or bucket is None:
            return 0
        return max(0, round(rate - refilled(bucket, rate, self._clock.monotonic_s()).left))


def _retry(left_ms: int) -> str:
    left_ms = -(-left_ms // 1000) * 1000 if left_ms > 1000 else max(left_ms, _RETRY_MS_MIN)
    return f"try again in {format_duration(left_ms)}"
