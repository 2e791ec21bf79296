"""Broker contract for clients that divide the queues among themselves, as RocketMQ's classic clients do.

A topic has *message queues* at one or more brokers. A producer chooses a queue for each message. A consumer group
assigns each queue to one of its members, which reads it by offset and commits its position from time to time. Failed
messages are sent back and retried through ``%RETRY%<group>``, or end in ``%DLQ%<group>``.

Apache RocketMQ 4 and 5 provide this over the classic protocol (``broker_adapter.remoting``), the embedded broker in its
own process (``dmq.broker.in_process_client``). ``broker_adapter.queue_client.producer`` and
``broker_adapter.queue_client.consumer`` use only the protocol below and depend on neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.message_queue import MessageQueue

__all__ = [
    "AskedListener",
    "ClassicBroker",
    "Decision",
    "Filter",
    "HeldQueue",
    "Listener",
    "MemberState",
    "MessageQueue",
    "Outgoing",
    "Presence",
    "PulledMessages",
    "QueueReceipt",
    "ReceivedMessage",
    "ResetListener",
    "Route",
    "SendStatus",
    "Start",
    "TransactionCheck",
]


class Route(NamedTuple):
    """Current queues of a topic, sorted. ``writable`` only has queues of brokers with a master."""

    topic: str
    readable: tuple[MessageQueue, ...]
    writable: tuple[MessageQueue, ...]


class Start(Enum):
    """Start position of a group without a committed offset. Names of RocketMQ."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class Filter(NamedTuple):
    """Filter of a consumer on a topic: ``*``, tags as ``a || b``, or with ``is_sql`` an SQL92 expression."""

    expression: str = "*"
    is_sql: bool = False


class Presence(NamedTuple):
    """Consumer group of a client, as its heartbeats report it."""

    group: str
    filters: Mapping[str, Filter]  # by topic, %RETRY%<group> included
    is_broadcast: bool = False
    start: Start = Start.LAST_OFFSET


class HeldQueue(NamedTuple):
    """Queue assigned to a group member, and its pulled but unconsumed messages."""

    queue: MessageQueue
    commit_offset: int  # where the group continues
    messages: int
    span: int  # distance from the first message to the last one, in offsets
    size_bytes: int
    pulled_at_ms: int  # last pull; epoch milliseconds, as the next one
    consumed_at_ms: int  # last delivery to a handler (Java's clients: its end), or the assignment
    is_locked: bool = False  # in order: by this member, at the broker


class MemberState(NamedTuple):
    """State that a group member reports. ``queues`` has the assigned queues with a known offset."""

    filters: Mapping[str, Filter]
    queues: Sequence[HeldQueue]
    in_order: bool
    started_at_ms: int  # epoch milliseconds


class SendStatus(Enum):
    """Durability of a stored message. Every value means that it is stored, and that another send would repeat it."""

    STORED = "stored"
    FLUSH_TIMEOUT = "stored, and not yet on the disk"
    REPLICA_TIMEOUT = "stored, and not yet at a replica"
    NO_REPLICA = "stored, and no replica is there"


class QueueReceipt(NamedTuple):
    """Result of a send. ``offset_id`` is the broker's own id of the message, empty if it has none."""

    status: SendStatus
    message_id: str
    queue: MessageQueue
    queue_offset: int
    offset_id: str = ""
    transaction_id: str = ""
    recall_handle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Message of a send, with its send options.

    ``attempts_failed``, ``attempts_max`` and ``error`` (as in ``ClassicBroker.send_back``) are for a consumer that
    sends a failed message to its retry topic itself.
    ``system`` are additional RocketMQ system properties, by their RocketMQ names.
    """

    message: Message
    delay_level: int = 0  # 0: none. Overrides the message's delivery time
    is_half: bool = False  # of a transaction
    attempts_failed: int = 0
    attempts_max: int | None = None
    error: BaseException | str = ""
    system: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """Message at its position in a queue.

    ``message.topic`` is the original topic, also for a message of a retry topic; ``queue.topic`` is the topic of the
    queue. ``system`` are RocketMQ's system properties, by their RocketMQ names. A message that cannot be decoded (wrong
    checksum, unknown compression) has the reason in ``unreadable`` and an empty body.
    """

    message: Message
    queue: MessageQueue
    queue_offset: int
    stored_at_ms: int
    attempts_failed: int = 0
    offset_id: str = ""  # the broker's own id of the message
    size_bytes: int = 0
    system: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""


class PulledMessages(NamedTuple):
    """Result of a pull. ``next_offset`` is the offset of the next pull, after messages that the filter skipped.

    ``moved``: the requested offset is outside the queue, and ``next_offset`` is its begin or end.
    """

    messages: Sequence[ReceivedMessage]
    next_offset: int
    moved: bool = False


class TransactionCheck(NamedTuple):
    """Request of a broker for the decision of a transaction. ``message`` is the half message as sent."""

    group: str
    message: ReceivedMessage
    transaction_id: str
    broker: str  # sender of the check, which gets the answer


class Decision(Enum):
    """Decision of a transaction. ``UNKNOWN``: check again later."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Listener(Protocol):
    """Receiver of notifications and requests of brokers. Called on the event loop; must not block."""

    def members_changed(self, group: str) -> None:
        """Rebalance a consumer group: a member joined or left."""
        ...

    def check(self, check: TransactionCheck) -> None:
        """Answer with ``end_transaction``, in a separate task."""
        ...


@runtime_checkable
class ResetListener(Listener, Protocol):
    """``Listener`` that also receives an operator's offset resets.

    Brokers of RocketMQ 4 do not reset offsets themselves: the members drop their messages of these queues and commit
    these offsets. Other listeners are not notified.
    """

    def offsets_reset(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at these offsets. Called on the event loop; must not block."""
        ...


@runtime_checkable
class AskedListener(Listener, Protocol):
    """``Listener`` that reports the state of a consumer to operators, through a broker. Others give no answer."""

    def state_of(self, group: str) -> MemberState | None:
        """Return the state of the consumer of a group, or ``None`` if there is none. Called on the event loop."""
        ...


class ClassicBroker(Protocol):
    """Brokers of one cluster, for one client. Belongs to one event loop; every method is safe for concurrent calls.

    Methods raise ``BrokerUnavailable`` (no answer: it is unknown whether the call took effect), ``Overloaded`` (nothing
    was done), and ``Refused`` with ``TOPIC_UNKNOWN``, ``UNAUTHORIZED`` or ``FORBIDDEN``, in addition to their own
    errors. No method retries: only the caller can decide whether a retry is safe.
    """

    @property
    def client_id(self) -> str:
        """Id of this client, unique in the cluster."""
        ...

    def attach(self, listener: Listener) -> None:
        """Register the listener for notifications and requests of brokers. Once, before the first heartbeat."""
        ...

    async def route(self, topic: str) -> Route:
        """Return the current route of a topic. ``Refused(TOPIC_UNKNOWN)``."""
        ...

    async def heartbeat(self, producers: Sequence[str], consumers: Sequence[Presence]) -> None:
        """Report this client and its groups to every broker; brokers drop clients that are silent for long.

        A consumer's first heartbeat precedes its first pull. Brokers without an answer are ignored unless all fail.
        """
        ...

    async def leave(self, *, producer: str = "", consumer: str = "") -> None:
        """Report to every broker that this client left a group. Unreachable brokers detect it by the missing
        heartbeats.
        """
        ...

    async def send(
        self, group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        """Store messages in one queue: one message, or a batch of one topic without delayed or half messages.

        One attempt within ``timeout_ms``. One way: returns once it is written to the connection, with offset -1. The
        message id of a batch consists of the ids of its messages, separated by commas. ``Refused(MESSAGE_CORRUPTED)``
        for a message that the broker considers illegal.
        """
        ...

    async def end_transaction(
        self, group: str, receipt: QueueReceipt, decision: Decision, *, check: TransactionCheck | None = None
    ) -> None:
        """Report the decision of a transaction to the broker of its half message; ``check``: as the answer to that
        check.

        A broker does not confirm it; if the report is lost, the broker checks again.
        """
        ...

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Recall a delayed message; return its id. ``Refused(NOT_FOUND)``, ``Refused(UNSUPPORTED)``."""
        ...

    async def pull(
        self, group: str, queue: MessageQueue, wanted: Filter, queue_offset: int, *, batch_max: int, wait_ms: int
    ) -> PulledMessages:
        """Return messages of a queue from an offset on, waiting up to ``wait_ms`` for the first one.

        A tag filter may pass some messages that do not match: the reader must compare the tags. ``Refused(FILTER)`` for
        an invalid filter; ``Refused(REQUEST)`` before the first heartbeat.
        """
        ...

    async def queue_range(self, queue: MessageQueue) -> QueueRange:
        """Return the readable range of a queue."""
        ...

    async def offset_at(self, queue: MessageQueue, stored_at_ms: int) -> int:
        """Return the offset of the first message stored at or after a time, or the end offset if there is none."""
        ...

    async def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """Return the committed offset of the group in a queue, or ``None`` if there is none."""
        ...

    async def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Commit the offset at which the group continues in a queue."""
        ...

    async def members(self, group: str, topic: str) -> Sequence[str]:
        """Return the client ids of a group, sorted, as a broker of ``topic`` reports them."""
        ...

    async def lock(self, group: str, queues: Sequence[MessageQueue]) -> frozenset[MessageQueue]:
        """Lease queues to this client for ordered consumption, 60 s from now; return those it holds.

        A broker without an answer grants none.
        """
        ...

    async def unlock(self, group: str, queues: Sequence[MessageQueue]) -> None:
        """Release leases; those of other clients are unaffected."""
        ...

    async def send_back(
        self,
        group: str,
        received: ReceivedMessage,
        *,
        delay_level: int,
        attempts_max: int,
        error: BaseException | str = "",
    ) -> None:
        """Schedule a retry through ``%RETRY%<group>``, or a dead letter in ``%DLQ%<group>`` after ``attempts_max``
        retries.

        ``delay_level`` 0: the broker chooses 3 plus the number of earlier failures; -1: dead letter at once.
        ``error`` is the reason of the failure. Only the embedded broker stores it, with the dead letter: the classic
        protocol has no field for it.
        """
        ...

    async def close(self) -> None:
        """Close all connections; pending calls fail."""
        ...
