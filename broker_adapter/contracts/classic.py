"""What a broker offers to clients that divide its queues among themselves, as RocketMQ's classic clients do.

A topic has *message queues* at one or more brokers. A producer chooses a queue for each message; a consumer group gives
each queue to one of its members, which reads it by offset and says from time to time how far it has come. What fails is
sent back and comes again from ``%RETRY%<group>``, or ends in ``%DLQ%<group>``.

Apache RocketMQ 4 and 5 offer this over the classic protocol (``broker_adapter.remoting``), the embedded broker in its
own process (``dmq.broker.in_process_client``). ``broker_adapter.queue_client.producer`` and
``broker_adapter.queue_client.consumer`` are written for the protocol below and know neither.
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
    """Where a topic lies now; both sorted. ``writable`` has queues of brokers with a master only."""

    topic: str
    readable: tuple[MessageQueue, ...]
    writable: tuple[MessageQueue, ...]


class Start(Enum):
    """Where a group begins that never said how far it has come. Names of RocketMQ."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class Filter(NamedTuple):
    """What a consumer wants of a topic: ``*``, tags as ``a || b``, or with ``is_sql`` an SQL92 expression."""

    expression: str = "*"
    is_sql: bool = False


class Presence(NamedTuple):
    """A consumer group of a client, as its heartbeats tell it."""

    group: str
    filters: Mapping[str, Filter]  # by topic, %RETRY%<group> included
    is_broadcast: bool = False
    start: Start = Start.LAST_OFFSET


class HeldQueue(NamedTuple):
    """A queue that a member of a group has, and what it holds of it: what it pulled and did not consume yet."""

    queue: MessageQueue
    commit_offset: int  # where the group goes on
    messages: int
    span: int  # how far the last message lies behind the first one, in offsets
    size_bytes: int
    pulled_at_ms: int  # last; epoch milliseconds, as the next one
    consumed_at_ms: int  # last: that a handler got a message, Java's clients mean that it was done; or taken up
    is_locked: bool = False  # in order: by this member, at the broker


class MemberState(NamedTuple):
    """What a member of a group says of itself. ``queues`` has those that it knows its offset in already."""

    filters: Mapping[str, Filter]
    queues: Sequence[HeldQueue]
    in_order: bool
    started_at_ms: int  # epoch milliseconds


class SendStatus(Enum):
    """How safely a message is stored. Each of them means that it is stored, and sending it again would repeat it."""

    STORED = "stored"
    FLUSH_TIMEOUT = "stored, and not yet on the disk"
    REPLICA_TIMEOUT = "stored, and not yet at a replica"
    NO_REPLICA = "stored, and no replica is there"


class QueueReceipt(NamedTuple):
    """What a broker said of a send. ``offset_id`` is the broker's own id for it, empty where it has none."""

    status: SendStatus
    message_id: str
    queue: MessageQueue
    queue_offset: int
    offset_id: str = ""
    transaction_id: str = ""
    recall_handle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message on its way to a queue, and what its producer wants of the broker.

    ``attempts_failed`` and ``attempts_max`` are of a consumer that puts a failed message into its retry topic itself.
    ``system`` are properties of RocketMQ's own that go along, by their names there.
    """

    message: Message
    delay_level: int = 0  # 0: none. It wins over the message's delivery time
    is_half: bool = False  # of a transaction
    attempts_failed: int = 0
    attempts_max: int | None = None
    system: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """A message as it lies in a queue.

    ``message.topic`` is the topic it was sent to, also when it comes from a retry topic; ``queue.topic`` is where it
    lies. ``system`` are RocketMQ's own properties, by their names there. A message that is there and cannot be read
    (a checksum differs, an unknown compression) has ``unreadable`` say why, and an empty body.
    """

    message: Message
    queue: MessageQueue
    queue_offset: int
    stored_at_ms: int
    attempts_failed: int = 0
    offset_id: str = ""  # the broker's own id, by which it finds the message again
    size_bytes: int = 0
    system: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""


class PulledMessages(NamedTuple):
    """What a pull found. ``next_offset`` is where to go on, also behind what the filter passed over.

    ``moved``: the offset that was asked for lies outside of the queue, and ``next_offset`` is where it begins or ends.
    """

    messages: Sequence[ReceivedMessage]
    next_offset: int
    moved: bool = False


class TransactionCheck(NamedTuple):
    """A broker asks a producer how a transaction ended. ``message`` is its half message as it was sent."""

    group: str
    message: ReceivedMessage
    transaction_id: str
    broker: str  # who asks, and is to be told


class Decision(Enum):
    """How a transaction ended. ``UNKNOWN``: ask again later."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Listener(Protocol):
    """Who is told what a broker says by itself. Called on the event loop; returns at once."""

    def members_changed(self, group: str) -> None:
        """A member of a consumer group came or went: divide its queues anew."""
        ...

    def check(self, check: TransactionCheck) -> None:
        """Answer with ``end_transaction``, in a task of one's own."""
        ...


@runtime_checkable
class ResetListener(Listener, Protocol):
    """A ``Listener`` that also hears when an operator has a group go on elsewhere.

    Brokers of RocketMQ 4 do not do it themselves: the members drop what they hold of these queues, and commit these
    offsets. A listener that is none is not told.
    """

    def offsets_reset(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on at these offsets. Called on the event loop; returns at once."""
        ...


@runtime_checkable
class AskedListener(Listener, Protocol):
    """A ``Listener`` that operators can ask how a consumer is, through a broker. One that is none does not answer."""

    def state_of(self, group: str) -> MemberState | None:
        """Return how the consumer of a group is, ``None`` if there is none. Called on the event loop."""
        ...


class ClassicBroker(Protocol):
    """Brokers of one cluster, for one client. Belongs to one event loop; every method is safe to call concurrently.

    Methods raise ``BrokerUnavailable`` (there is no answer: whether the call took effect is not known),
    ``Overloaded`` (nothing was done), and ``Refused`` with ``TOPIC_UNKNOWN``, ``UNAUTHORIZED`` or ``FORBIDDEN`` besides
    what they name. None of them tries again: whoever calls knows whether it may.
    """

    @property
    def client_id(self) -> str:
        """Who this client is; unique in the cluster."""
        ...

    def attach(self, listener: Listener) -> None:
        """Tell ``listener`` from now on what brokers say by themselves. Once, before the first heartbeat."""
        ...

    async def route(self, topic: str) -> Route:
        """Ask where a topic lies now. ``Refused(TOPIC_UNKNOWN)``."""
        ...

    async def heartbeat(self, producers: Sequence[str], consumers: Sequence[Presence]) -> None:
        """Say to every broker that this client lives, and what it belongs to; whoever is silent for long is dropped.

        A consumer's first one comes before its first pull. Brokers that do not answer are passed over unless none does.
        """
        ...

    async def leave(self, *, producer: str = "", consumer: str = "") -> None:
        """Say to every broker that this client left a group. Whoever does not answer finds out by itself."""
        ...

    async def send(
        self, group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        """Store messages in one queue: one, or several of one topic that are neither delayed nor half (a batch).

        One attempt within ``timeout_ms``. One way: returns once it is written to the connection, with offset -1. The
        message id of a batch is those of its messages, with commas between. ``Refused(MESSAGE_CORRUPTED)`` for a
        message that the broker finds illegal.
        """
        ...

    async def end_transaction(
        self, group: str, receipt: QueueReceipt, decision: Decision, *, check: TransactionCheck | None = None
    ) -> None:
        """Tell the broker of a half message how its transaction ended; ``check``: as the answer to that question.

        A broker does not say whether it heard: one that did not asks again.
        """
        ...

    async def recall(self, topic: str, recall_handle: str) -> str:
        """Take back a delayed message; return its id. ``Refused(NOT_FOUND)``, ``Refused(UNSUPPORTED)``."""
        ...

    async def pull(
        self, group: str, queue: MessageQueue, wanted: Filter, queue_offset: int, *, batch_max: int, wait_ms: int
    ) -> PulledMessages:
        """Return messages of a queue from an offset on, waiting up to ``wait_ms`` for the first one.

        A tag filter may let through a little more than it says: whoever reads compares the tags.
        ``Refused(FILTER)`` for a filter that is wrong; ``Refused(REQUEST)`` before the first heartbeat.
        """
        ...

    async def queue_range(self, queue: MessageQueue) -> QueueRange:
        """Return the readable part of a queue."""
        ...

    async def offset_at(self, queue: MessageQueue, stored_at_ms: int) -> int:
        """Return the offset of the first message that was stored at or after a time; the end if none was."""
        ...

    async def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """Return where the group goes on in a queue, ``None`` if it never said."""
        ...

    async def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Say where the group goes on in a queue."""
        ...

    async def members(self, group: str, topic: str) -> Sequence[str]:
        """Return the client ids of a group, sorted, as a broker of ``topic`` knows them."""
        ...

    async def lock(self, group: str, queues: Sequence[MessageQueue]) -> frozenset[MessageQueue]:
        """Lease queues to this client for orderly consumption, 60 s from now; return those it holds.

        A broker that does not answer gives none.
        """
        ...

    async def unlock(self, group: str, queues: Sequence[MessageQueue]) -> None:
        """Give leases back; those of others are left alone."""
        ...

    async def send_back(self, group: str, received: ReceivedMessage, *, delay_level: int, attempts_max: int) -> None:
        """Have a message come again from ``%RETRY%<group>``, or end in ``%DLQ%<group>`` after ``attempts_max`` retries.

        ``delay_level`` 0: the broker chooses, 3 more than failed before; -1: it is dead at once.
        """
        ...

    async def close(self) -> None:
        """Close all connections; calls that wait fail."""
        ...
