"""What a broker promises, as two protocols: *pop* (take messages under a lease) and *pull* (read by offset).

The sidecar speaks to a ``PopBroker``; classic consumers are built on a ``PullBroker``. The embedded broker offers
both; Apache RocketMQ 5 behind its gRPC proxy offers pop, Apache RocketMQ 4 and 5 over remoting offer pull. One
conformance suite (``tests/contract``) runs against every implementation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from broker_adapter.contracts.limits import RETRY_STEPS_MS
from broker_adapter.contracts.message import (
    DeadLetterFacts,
    Delivery,
    Envelope,
    MessageType,
    RecallReceipt,
    SendReceipt,
)


class TopicRoute(NamedTuple):
    """A topic as clients see it: its message queues are numbered from 0, and it takes messages of ``types`` only."""

    topic: str
    queues: int
    types: tuple[MessageType, ...] = tuple(MessageType)


class Subscription(NamedTuple):
    """What a receive asks for. ``queue_id`` -1 means any queue; an empty ``tags`` set means every tag.

    ``sql`` is an SQL92 filter expression over user properties, empty for none. What its filter does not let through is
    finished for the group: of two receives of one group with different filters, whichever comes by a message decides.
    """

    topic: str
    queue_id: int = -1
    tags: frozenset[str] = frozenset()
    sql: str = ""


class GroupSettings(NamedTuple):
    """How a consumer group is served, as its clients are told.

    ``max_attempts`` counts deliveries, the first included. ``delays_ms[n - 1]`` is what follows on failed attempt n;
    the last one repeats. It is never empty. ``believes_clients``: the broker makes a dead letter of whatever a client
    gives up, and counts no attempts itself, so that push consumers of a FIFO group must retry in their own memory.
    """

    is_fifo: bool
    max_attempts: int
    delays_ms: tuple[int, ...]
    believes_clients: bool = False


# Levels 3 to 18, after 16 of which a message is dead: RocketMQ's default for a group that nobody set up.
ROCKETMQ_GROUP = GroupSettings(
    is_fifo=False, max_attempts=len(RETRY_STEPS_MS) + 1, delays_ms=RETRY_STEPS_MS, believes_clients=True
)


class PopBroker(Protocol):
    """Messages are handed out under a lease and come back unless acknowledged.

    Every method is safe to call concurrently on one event loop. Cancelling a call does not undo it: a send that was
    cancelled may have been accepted, which is why message ids are made by the client and sends are idempotent on them.
    """

    async def route(self, topic: str) -> TopicRoute:
        """Return the route of ``topic``; a broker may create the topic here. ``Refused(TOPIC_UNKNOWN)`` if it won't."""
        ...

    async def ensure_group(self, group: str) -> None:
        """Make ``group`` known, so that it can receive. Idempotent, durable. ``Refused(GROUP_UNKNOWN)`` if it won't."""
        ...

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        """Return how ``group`` is served now; a group that nobody knows yet gets the default.

        A group that nobody set to be FIFO or not is FIFO if it is subscribed to FIFO ``topics`` only.
        """
        ...

    def send(self, envelopes: Sequence[Envelope]) -> Awaitable[Sequence[SendReceipt]]:
        """Accept all envelopes or none, and return one receipt each, in order, once they are durable.

        A message whose delivery time has come is in its queue on return, or, if it has a message group, in a moment;
        any other waits and is never visible before that time. Delayed messages of one message group keep the order of
        their delivery times, then of their acceptance. An envelope whose message id is already known in its topic is
        not stored again: its receipt says where the message is now, marked ``repeated``, or that it was recalled.
        Raises ``Refused(MESSAGE_TYPE)`` if one of them is of a type that its topic does not take,
        ``Refused(TOPIC_UNKNOWN)``, ``Overloaded`` (nothing done), ``BrokerUnavailable`` (in doubt).
        """
        ...

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        """Take a message back that still waits; on return it is gone, durably, and will never be delivered.

        Recalling it again gets the first answer, marked ``repeated``. Raises ``Refused(NOT_FOUND)`` that says either
        when the message was delivered or that nothing is known of it, ``Refused(REQUEST)`` for a handle that this
        broker cannot have given for ``topic``, ``Refused(TOPIC_UNKNOWN)``, ``BrokerUnavailable`` (in doubt: repeat it).
        """
        ...

    async def receive(
        self,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        """Hand out up to ``batch_max`` messages, waiting up to ``wait_ms`` for the first one; empty if none came.

        Each is hidden from its group for ``invisible_ms`` and then comes back with ``delivery_attempt`` + 1, until its
        group's attempts are used up: then it is in ``%DLQ%<group>``. With ``renew_for`` (the client id of a push
        consumer) the lease is renewed by the broker while that client lives, up to 3 h. What the group failed and is
        due again comes under the topic it was sent to. A cancelled receive hands out nothing.

        Messages of one message group are handed out in order: while one is handed out and not finished, no later one
        goes out. One receive may carry several in a row, but never to a push consumer, whose client may go on to the
        next one when the first has failed.

        Raises ``Refused(FILTER)`` for an SQL expression that is wrong, with the position.
        """
        ...

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        """Finish deliveries, durable on return; one result per handle: ``None``, or ``Refused(RECEIPT_HANDLE)``.

        A handle stays good through renewals and restarts until its message is handed out again. Acknowledging twice
        is fine.
        """
        ...

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        """Hide a delivery for ``invisible_ms`` from now (0: give it back at once), durable on return.

        Returns the handle to use from here on; the one given stays good too. Extending costs no delivery attempt;
        with ``suspend`` the next hand-out does not count as an attempt either.

        Of a delivery with ``renew_for`` it means, without ``suspend``, that consuming failed (a push consumer has no
        other reason to call): it comes back by the policy of its group, not before ``invisible_ms``, and its handle is
        refused from here on; or it is dead.
        """
        ...

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        """Give a delivery up, durable on return: it is in ``%DLQ%<group>`` and never comes back to the group.

        ``attempts`` is how often its consumer says it tried. A push consumer is not believed below the group's maximum,
        because clients give up at the first failure in FIFO mode: the message comes back by the policy.
        """
        ...

    def client_seen(self, client_id: str) -> None:
        """Note a sign of life: leases received with ``renew_for=client_id`` go on being renewed."""
        ...

    def client_gone(self, client_id: str) -> None:
        """Note that the client left: its leases are no longer renewed."""
        ...


class QueueRange(NamedTuple):
    """The readable part of a message queue: ``[begin, end)``."""

    begin: int
    end: int


class PulledMessage(NamedTuple):
    """One message read by offset; reading takes no lease and changes nothing. ``payload`` is the message as sent."""

    message_id: str
    payload: bytes
    queue_id: int
    queue_offset: int
    stored_at_ms: int
    deliver_at_ms: int  # 0: was not delayed
    dead_letter: DeadLetterFacts | None = None  # of a message in a dead-letter queue


class Pulled(NamedTuple):
    """What a pull found. ``next_offset`` is where to go on, also behind what a filter passed over."""

    messages: Sequence[PulledMessage]
    next_offset: int


@runtime_checkable
class FailureReporter(Protocol):
    """A broker that can be told why a delivery failed, in addition to that it did."""

    def report_failure(self, group: str, receipt_handle: str, error: BaseException | str) -> None:
        """Report the reason of a failure that is reported next. Never waits, never raises; it may not arrive."""
        ...


class PullBroker(Protocol):
    """Messages are read by offset; the group's progress is kept for it but never enforced.

    Who reads decides who gets what: clients that share a group divide its queues among themselves, and clients that
    each read all queues, or have a group each, are broadcast to. What a group pulls and what it receives by pop do not
    know of each other; retries and dead letters are pop's. Every method is safe to call concurrently on one event loop.

    Nothing but ``route`` and ``commit_offset`` creates anything. Where a topic is named, ``Refused(TOPIC_UNKNOWN)``
    says that nobody knows it, ``Refused(REQUEST)`` that it has no such queue.
    """

    async def route(self, topic: str) -> TopicRoute:
        """As ``PopBroker.route``."""
        ...

    async def pull(self, subscription: Subscription, queue_offset: int, *, batch_max: int, wait_ms: int) -> Pulled:
        """Return up to ``batch_max`` durable messages of one queue from ``queue_offset`` on, in order.

        Waits up to ``wait_ms`` for the first one. One call looks at a bounded number of messages: with a filter that
        matches little it may end before its time, with no message and a later ``next_offset``.

        ``Refused(OFFSET)`` names the readable range when the offset lies outside it; the end itself is inside.
        ``Refused(FILTER)`` is for an SQL expression that is wrong, with the position.
        """
        ...

    async def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        """Return the readable range of one queue: what is below ``end`` is durable."""
        ...

    async def offset_at(self, topic: str, queue_id: int, stored_at_ms: int) -> int:
        """Return an offset of which the message before it, if there is one, was stored before ``stored_at_ms``.

        The message at the offset was stored at or after that time; the end offset if none was. As long as the clock
        was never stepped back, that is the first one. If it was, by d at most, all that was stored at or after a time
        lies at or behind the answer to that time less d.
        """
        ...

    async def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the offset the group continues from, ``None`` if it never said."""
        ...

    async def commit_offset(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """Remember where the group continues, durable on return; backwards too. Makes the group if nobody knows it.

        ``Refused(OFFSET)`` for an offset behind the end of the queue: what comes next would never be read.
        """
        ...

    def member_seen(self, group: str, client_id: str) -> None:
        """Note a sign of life: the client belongs to the group until it leaves or is silent for too long."""
        ...

    def member_gone(self, client_id: str) -> None:
        """Note that the client left: it belongs to no group and holds no queue."""
        ...

    async def members(self, group: str) -> Sequence[str]:
        """Return the client ids of the group that are alive, sorted: the input of queue assignment."""
        ...

    async def lock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> Sequence[int]:
        """Lease queues to one client of a group; return those it now holds. Renewed by calling again.

        A lease ends by itself after a time, when its client leaves, and with the run of the broker.
        """
        ...

    async def unlock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> None:
        """Give queues back; unknown or foreign ones are ignored."""
        ...
