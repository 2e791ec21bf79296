"""Broker contract in two protocols: *pop* (receive messages under a lease) and *pull* (read by offset).

The sidecar uses a ``PopBroker``; classic consumers use a ``PullBroker``. The embedded broker implements both. Apache
RocketMQ 5 behind its gRPC proxy provides pop, Apache RocketMQ 4 and 5 over remoting provide pull. One conformance
suite (``tests/broker_adapter/contracts``) runs against every implementation.
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
    """Topic as clients see it: queues numbered from 0, and the accepted message types."""

    topic: str
    queues: int
    types: tuple[MessageType, ...] = tuple(MessageType)


class Subscription(NamedTuple):
    """Parameters of a receive. ``queue_id`` -1 means any queue; an empty ``tags`` set means every tag.

    ``sql`` is an SQL92 filter expression over user properties, empty for none. Messages that do not match are finished
    for the group. So if receives of one group have different filters, the first one to read a message decides.
    """

    topic: str
    queue_id: int = -1
    tags: frozenset[str] = frozenset()
    sql: str = ""


class GroupSettings(NamedTuple):
    """Settings of a consumer group, as reported to its clients.

    ``max_attempts`` counts deliveries, including the first. ``delays_ms[n - 1]`` is the delay after failed attempt n;
    the last one repeats. It is never empty. ``believes_clients``: the broker accepts every dead letter of a client and
    counts no attempts itself. Push consumers of a FIFO group must then retry in their own memory.
    """

    is_fifo: bool
    max_attempts: int
    delays_ms: tuple[int, ...]
    believes_clients: bool = False


# Levels 3 to 18; a dead letter after 16 retries: RocketMQ's default for a group without settings.
ROCKETMQ_GROUP = GroupSettings(
    is_fifo=False, max_attempts=len(RETRY_STEPS_MS) + 1, delays_ms=RETRY_STEPS_MS, believes_clients=True
)


class PopBroker(Protocol):
    """Broker that delivers messages under a lease and redelivers them unless they are acknowledged.

    Every method is safe for concurrent calls on one event loop. Cancelling a call does not undo it: a cancelled send
    may have been accepted. Therefore clients create message ids, and sends are idempotent on them.
    """

    async def route(self, topic: str) -> TopicRoute:
        """Return the route of ``topic``; a broker may create the topic here. ``Refused(TOPIC_UNKNOWN)`` otherwise."""
        ...

    async def ensure_group(self, group: str) -> None:
        """Create ``group``, so that it can receive. Idempotent, durable. ``Refused(GROUP_UNKNOWN)`` if not allowed."""
        ...

    def group_settings(self, group: str, topics: Collection[str] = ()) -> GroupSettings:
        """Return the current settings of ``group``; an unknown group has the default settings.

        A group without an explicit order setting is FIFO if it is subscribed to FIFO ``topics`` only.
        """
        ...

    def send(self, envelopes: Sequence[Envelope]) -> Awaitable[Sequence[SendReceipt]]:
        """Accept all envelopes or none, and return one receipt each, in order, once they are durable.

        A message that is due is in its queue on return, or shortly after if it has a message group. Any other message
        is pending, and is never visible before its delivery time. Delayed messages of one message group keep the order
        of their delivery times, then of their acceptance.

        An envelope whose message id is already known in its topic is not stored again. Its receipt, marked
        ``repeated``, has the current position of the message, or states that it was recalled.

        Raises ``Refused(MESSAGE_TYPE)`` for a message type that the topic does not accept, ``Refused(TOPIC_UNKNOWN)``,
        ``Overloaded`` (nothing done), ``BrokerUnavailable`` (in doubt).
        """
        ...

    async def recall(self, topic: str, recall_handle: str) -> RecallReceipt:
        """Withdraw a pending message; on return it is removed durably and will never be delivered.

        A repeated recall returns the first answer, marked ``repeated``. Raises ``Refused(NOT_FOUND)`` with the time of
        delivery, or if the message is unknown. Raises ``Refused(REQUEST)`` for a handle that this broker cannot have
        issued for ``topic``, ``Refused(TOPIC_UNKNOWN)``, ``BrokerUnavailable`` (in doubt: repeat it).
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
        """Lease up to ``batch_max`` messages, waiting up to ``wait_ms`` for the first one; empty if there is none.

        Each message is hidden from its group for ``invisible_ms``. Then it is redelivered as the next
        ``delivery_attempt``, until the group's attempts are used up and it is moved to ``%DLQ%<group>``. With
        ``renew_for`` (the client id of a push consumer) the broker renews the lease while that client is alive, for up
        to 3 h. Retries arrive under their original topic. A cancelled receive leases nothing.

        Messages of one message group are delivered in order: while one is leased, no later one is delivered. One
        receive may return several consecutive ones, but never to a push consumer: its client may continue with the next
        one after a failure of the first.

        Raises ``Refused(FILTER)`` for an invalid SQL expression, with the position.
        """
        ...

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        """Finish deliveries, durable on return; one result per handle: ``None``, or ``Refused(RECEIPT_HANDLE)``.

        A handle stays valid through renewals and restarts until its message is redelivered. Repeated acknowledgements
        succeed.
        """
        ...

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        """Hide a delivery for ``invisible_ms`` from now (0: release it at once), durable on return.

        Returns the handle to use from now on; the given one stays valid too. An extension costs no delivery attempt;
        with ``suspend`` the next delivery does not count as an attempt either.

        For a delivery with ``renew_for`` the call without ``suspend`` reports a failure: a push consumer has no other
        reason to call it. The message is retried by the policy of its group, not before ``invisible_ms``, or becomes a
        dead letter. Its handle is refused from then on.
        """
        ...

    async def dead_letter(self, group: str, topic: str, receipt_handle: str, *, attempts: int) -> None:
        """Move a delivery to ``%DLQ%<group>``, durable on return; the group never receives it again.

        ``attempts`` is the number of attempts that the consumer claims. Below the group's maximum the claim of a push
        consumer is ignored, because clients give up at the first failure in FIFO mode: the message is retried by the
        policy.
        """
        ...

    def client_seen(self, client_id: str) -> None:
        """Record that the client is alive: leases received with ``renew_for=client_id`` are still renewed."""
        ...

    def client_gone(self, client_id: str) -> None:
        """Record that the client left: its leases are no longer renewed."""
        ...


class QueueRange(NamedTuple):
    """Readable range of a message queue: ``[begin, end)``."""

    begin: int
    end: int


class PulledMessage(NamedTuple):
    """Message read by offset; a read has no lease and no side effects. ``payload`` is the message as sent."""

    message_id: str
    payload: bytes
    queue_id: int
    queue_offset: int
    stored_at_ms: int
    deliver_at_ms: int  # 0: was not delayed
    dead_letter: DeadLetterFacts | None = None  # of a message in a dead-letter queue


class Pulled(NamedTuple):
    """Result of a pull. ``next_offset`` is the offset of the next pull, after messages that a filter skipped."""

    messages: Sequence[PulledMessage]
    next_offset: int


@runtime_checkable
class FailureReporter(Protocol):
    """Broker that accepts the reason of a failed delivery in addition to the failure."""

    def report_failure(self, group: str, receipt_handle: str, error: BaseException | str) -> None:
        """Report the reason of the failure that is reported next. Never blocks or raises; the report may be lost."""
        ...


class PullBroker(Protocol):
    """Broker whose messages are read by offset; it stores the group's progress but never enforces it.

    The readers decide about the distribution. Clients that share a group divide its queues among themselves. Clients
    that each read all queues, or have a group each, are broadcast to. Pulls and pop receives of one group have separate
    progress; only pop has retries and dead letters. Every method is safe for concurrent calls on one event loop.

    Only ``route`` and ``commit_offset`` create anything. ``Refused(TOPIC_UNKNOWN)`` means that the topic does not
    exist, ``Refused(REQUEST)`` that it has no such queue.
    """

    async def route(self, topic: str) -> TopicRoute:
        """Return the route of a topic, as ``PopBroker.route``."""
        ...

    async def pull(self, subscription: Subscription, queue_offset: int, *, batch_max: int, wait_ms: int) -> Pulled:
        """Return up to ``batch_max`` durable messages of one queue from ``queue_offset`` on, in order.

        Waits up to ``wait_ms`` for the first one. One call scans a bounded number of messages: with a selective filter
        it may end early, with no message and a later ``next_offset``.

        ``Refused(OFFSET)``, with the readable range, for an offset outside it; the end itself is inside.
        ``Refused(FILTER)`` for an invalid SQL expression, with the position.
        """
        ...

    async def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        """Return the readable range of one queue: messages below ``end`` are durable."""
        ...

    async def offset_at(self, topic: str, queue_id: int, stored_at_ms: int) -> int:
        """Return an offset whose preceding message, if there is one, was stored before ``stored_at_ms``.

        The message at the offset was stored at or after that time; the result is the end offset if none was. It is the
        first such message if the clock was never stepped back. After steps back by at most d, pass the time minus d:
        all messages stored at or after the time are then at or after the result.
        """
        ...

    async def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the committed offset of the group, or ``None`` if there is none."""
        ...

    async def commit_offset(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """Store the offset at which the group continues, durable on return; a lower one too. Creates an unknown group.

        ``Refused(OFFSET)`` for an offset after the end of the queue: the next messages would never be read.
        """
        ...

    def member_seen(self, group: str, client_id: str) -> None:
        """Record that the client is alive: it is a member of the group until it leaves or is silent for too long."""
        ...

    def member_gone(self, client_id: str) -> None:
        """Record that the client left: it is a member of no group and holds no queue."""
        ...

    async def members(self, group: str) -> Sequence[str]:
        """Return the client ids of the group's live members, sorted: the input of queue assignment."""
        ...

    async def lock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> Sequence[int]:
        """Lease queues to one client of a group; return those it now holds. Another call renews the lease.

        A lease ends after a time, when its client leaves, and when the broker stops.
        """
        ...

    async def unlock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> None:
        """Release queues; unknown queues and those of other clients are ignored."""
        ...
