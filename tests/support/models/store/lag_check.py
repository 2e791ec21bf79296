"""How far groups are behind, against the rows of a store: what every state machine asks after every step."""

from __future__ import annotations

from dmq.broker.broker import EmbeddedBroker
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.queue_front import progress
from dmq.broker.io.queue_log import Place, begin_of
from dmq.broker.operations.lag import Lag, Lags
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import decode_queued
from dmq.store.store import Store
from dmq.trail.ledger import read_books


def assert_lags(broker: EmbeddedBroker, *, with_ages: bool) -> None:
    """Fail if what is told is not what the ledger counts, nor the age that of the first unfinished message there is.

    ``with_ages``: the wall clock was never set. Else an age that is known stays right, and one read anew is not.
    """
    told = broker.lags.look()
    assert counts(told) == counted(broker)
    if not with_ages:
        return
    assert told == Lags(broker.store, broker.names, broker.subscriptions).look()  # what was known is still so
    for each in told:
        oldest_ms, now_ms = oldest_unread_ms(broker, each), broker.store.clock.now_ms()
        if each.unread:
            assert each.oldest_unread_age_ms == (None if oldest_ms is None else max(0, now_ms - oldest_ms)), each
        else:
            assert each.oldest_unread_age_ms == each.unread  # 0, or not known


def counts(lags: list[Lag]) -> dict[tuple[str, str], tuple[int | None, int, int]]:
    """What is unread, in retry and dead, by topic and group."""
    return {(each.topic, each.group): (each.unread, each.in_retry, each.dead) for each in lags}


def counted(broker: EmbeddedBroker) -> dict[tuple[str, str], tuple[int | None, int, int]]:
    """The same by the ledger."""
    ledger = read_books(broker.store)
    return {
        (ledger.name(topic_id), ledger.name(book.group_id)): (
            book.unread if broker.names.reads(book.group_id, ledger.name(topic_id)) else None,
            book.in_retry,
            book.dead,
        )
        for topic_id, book in ledger.pairs()
    }


def oldest_unread_ms(broker: EmbeddedBroker, lag: Lag) -> int | None:
    """Return when the first message that is there and unfinished came into its queue, by all rows of the group."""
    topic, group = broker.names.topics[lag.topic], broker.names.groups[lag.group]
    places = [Place(topic.topic_id, queue_id) for queue_id in range(topic.queues)]
    lane = broker.names.lanes.get((group.group_id, topic.topic_id))
    places += [Place(lane.topic_id, 0)] if lane is not None else []
    queues = [queue for place in places if (queue := progress(broker.store, group.group_id, place)) is not None]
    return min((at for queue in queues if (at := _first_ms(broker.store, queue))), default=None)


def _first_ms(store: Store, queue: GroupQueue) -> int | None:
    place = Place(queue.topic_id, queue.queue_id)
    end = store.queue_end(*place)
    for offset in range(begin_of(store, place, queue.floor, end), end):
        if not queue.is_finished(offset):
            (value,) = store.get_many(Family.QUEUE, [pack_queue_key(*place, offset)])
            return decode_queued(value).stored_at_ms if value is not None else None
    return None
