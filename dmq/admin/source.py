"""What the daemon answers operators with: a protocol, and values whose fields are those of ``admin_v1.proto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

from broker_adapter.adapter import Pulled, QueueRange
from broker_adapter.message import MessageType
from dmq.admin.listing_source import ListingSource
from dmq.embedded.topic_settings import KEEP_ALL, Keep, KeepChange
from retry.dead_letter import Dead, DeadFilter, Job
from retry.policy import RetryPolicy


class CellState(IntEnum):
    """Numbers of ``rockdmq.admin.v1``."""

    STARTING = 1
    SERVING = 2
    NOT_SERVING = 3
    STOPPING = 4


class MessageState(IntEnum):
    """Numbers of ``rockdmq.admin.v1``."""

    WAITING = 1
    QUEUED = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What waits to be delivered later; ``next_due_at_ms`` 0: nothing does."""

    pending: int = 0
    overdue: int = 0
    next_due_at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """From the delivery timestamp until visible, since the start of the process."""

    count: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Messages since the start of the process."""

    accepted: int = 0
    delivered: int = 0
    acked: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Batches made durable since the start of the process."""

    batches: int = 0
    ops: int = 0
    written_bytes: int = 0
    commit_p99_ms: float = 0.0
    sync_p50_ms: float = 0.0
    sync_p99_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Space of the file system with the store."""

    free_bytes: int = 0
    low_water_bytes: int = 0
    refuses_sends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """Audit events not exported yet, those cut before they were, and how the trail is; no ``trail``: it is off."""

    rows: int = 0
    held_bytes: int = 0
    held_bytes_max: int = 0
    lost_rows: int = 0
    trail: str = ""
    exported_sequence: int = 0
    lag_ms: int = 0
    export_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How the store was found when it was opened."""

    was_clean: bool = True
    cut_bytes: int = 0
    open_ms: float = 0.0
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """How the clock of the daemon's host is; fields as in ``admin_v1.proto``."""

    wall_ms: int = 0
    believed_ms: int = 0
    is_steady: bool = True
    is_held: bool = False
    steady_in_ms: int = 0
    steps: int = 0
    last_step_ms: int = 0
    last_step_at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStatus:
    """How a daemon is; each part may be left at its zero where nothing is known."""

    version: str
    cell_id: str
    broker_name: str
    pid: int
    state: CellState
    started_at_ms: int
    now_ms: int
    listen: str
    data: str
    durability: str
    state_reason: str = ""
    metrics_listen: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    lateness: Lateness = field(default_factory=Lateness)
    totals: Totals = field(default_factory=Totals)
    commits: Commits = field(default_factory=Commits)
    disk: Disk = field(default_factory=Disk)
    outbox: Outbox = field(default_factory=Outbox)
    recovery: Recovery = field(default_factory=Recovery)
    clock: ClockState = field(default_factory=ClockState)


@dataclass(frozen=True, slots=True, kw_only=True)
class DueBucket:
    """How many are due from the end of the bucket before until ``until_ms``."""

    until_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A group that reads a topic, and how much of it the group has not finished."""

    group: str
    unread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """A topic: its queues, the messages in them, and those that wait for it on the timeline."""

    name: str
    queues: int
    stored: int = 0
    pending: int = 0
    due: Sequence[DueBucket] = ()
    type: str = "MIXED"
    created_at_ms: int = 0
    readers: Sequence[Reader] = ()
    ranges: Sequence[QueueRange] = ()
    oldest_at_ms: int = 0  # when the oldest message in its queues was stored
    keep: Keep = KEEP_ALL
    keep_own: Sequence[str] = ()  # what of it was said of the topic itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStatus:
    """Where a message is. ``payload`` is the wire message as it is stored, ``None`` if it is not at hand."""

    state: MessageState
    deliver_at_ms: int = 0
    stored_at_ms: int = 0
    queue_id: int = -1
    queue_offset: int = -1
    payload: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCount:
    """Where each queue of a topic begins and ends, by number; ``pending`` messages wait for it on the timeline."""

    queues: Sequence[QueueRange]
    pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """How much of a topic a group has not finished."""

    topic: str
    unread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A consumer group. ``waiting`` retries wait for their time; ``dead`` letters have no outcome yet."""

    name: str
    created_at_ms: int
    policy: RetryPolicy
    is_default_policy: bool
    is_fifo: bool  # as its clients are told
    is_fifo_set: bool  # by an operator; else it follows from the topics it is subscribed to
    waiting: int = 0
    dead: int = 0
    leased: int = 0
    due: Sequence[DueBucket] = ()  # of the retries that wait
    is_removed: bool = False  # nobody has the name (any more), but dead letters lie under it
    unread: Sequence[Unread] = ()  # what it has not finished, by topic, if that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRetry:
    """A retry that waits. ``entry`` names it for ``run_retries_now`` and ``end_retries``."""

    entry: str
    group: str
    topic: str
    message_id: str
    attempt: int  # the one that comes next
    due_at_ms: int
    first_failed_at_ms: int
    last_failed_at_ms: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPage:
    """Some retries in the order of their time; go on with ``next_token``, empty at the end.

    A page may be short, or empty, before the end: one call looks at a bounded number of rows.
    """

    retries: Sequence[WaitingRetry]
    next_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOutcomes:
    """What a command did to the retries it named: each is counted once."""

    moved: int = 0
    gone: int = 0  # it had been delivered, moved or ended before


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadStatus:
    """A dead letter with its message as it was sent, and with its outcome if it has one."""

    dead: Dead
    payload: bytes
    dead_at_ms: int = 0  # when it came into the dead-letter queue
    outcome: str = ""  # "", "redriven" or "purged"
    outcome_at_ms: int = 0
    outcome_note: str = ""  # of redriven: the topic and new message id; of purged: why


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPage:
    """Some dead letters in the order of their death; go on with ``next_offset``, -1 at the end.

    A page may be short, or empty, before the end: one call looks at a bounded number of messages.
    """

    letters: Sequence[DeadStatus]
    next_offset: int = -1


class ObjectSource(Protocol):
    """Topics and groups as objects; what is named and does not exist is ``Refused``, what is done is durable."""

    async def topic(self, name: str) -> TopicStatus:
        """Return one topic, with its readers."""
        ...

    async def create_topic(
        self, name: str, *, queues: int, message_type: MessageType | None, keep: KeepChange
    ) -> TopicStatus:
        """Make a topic; ``queues`` 0: as many as usual. ``Refused(REQUEST)`` if it is known."""
        ...

    async def set_topic(
        self, name: str, *, queues: int, message_type: MessageType | Literal["MIXED"] | None, keep: KeepChange
    ) -> TopicStatus:
        """Change a topic; ``queues`` 0 and ``None`` stay. ``Refused(REQUEST)`` for fewer queues than there are."""
        ...

    async def remove_topic(self, name: str, *, is_forced: bool) -> None:
        """Remove a topic; unless forced, ``Refused(REQUEST)`` with the count if messages wait or are unread."""
        ...

    async def create_group(self, name: str) -> GroupStatus:
        """Make a group. ``Refused(REQUEST)`` if it is known."""
        ...

    async def remove_group(self, name: str, *, is_forced: bool, with_dead_letters: bool) -> None:
        """Remove a group's progress, settings and retries; unless forced, only if it has finished everything.

        Its dead letters stay under its name, unless they are to go too.
        """
        ...

    async def reset_group(self, group: str, topic: str, to: int | Literal["begin", "end"]) -> Sequence[int]:
        """Let a group go on from elsewhere, and return from which offset of each queue; ``to`` may be epoch ms."""
        ...


class AdminSource(ObjectSource, ListingSource, Protocol):
    """What the admin service asks; every method may be called on the event loop and looks at a bounded number of rows.

    Raises ``Refused`` for names that are invalid or do not exist, ``Overloaded`` and
    ``BrokerUnavailable`` as a broker does.
    """

    async def status(self) -> CellStatus:
        """Return how the daemon is now; also while its storage has failed."""
        ...

    async def topics(self) -> Sequence[TopicStatus]:
        """Return every topic, by name."""
        ...

    async def message(self, topic: str, message_id: str) -> MessageStatus:
        """Return where a message is; ``UNKNOWN`` if topic or message are not known (or no longer)."""
        ...

    async def count(self, topic: str) -> TopicCount:
        """Return where the queues of a topic begin and end; ``Refused(TOPIC_UNKNOWN)`` if it does not exist."""
        ...

    async def peek(self, topic: str, queue_id: int, offset: int, *, limit: int) -> Pulled:
        """Return up to ``limit`` messages of a queue; refused as ``PullBroker.pull`` does."""
        ...

    # -- groups and their retries -------------------------------------------------------------------------------------

    async def groups(self, *, with_removed: bool = False) -> Sequence[GroupStatus]:
        """Return every consumer group, by name, without ``due``; and names that only dead letters lie under."""
        ...

    async def group(self, name: str, *, with_unread: bool = False) -> GroupStatus:
        """Return one group, with ``due``; ``Refused(GROUP_UNKNOWN)`` if it does not exist."""
        ...

    async def set_group(
        self, name: str, *, policy: RetryPolicy | None, reset_policy: bool, is_fifo: bool | None
    ) -> GroupStatus:
        """Change a group (created if it does not exist), durable on return; what is ``None`` stays as it is."""
        ...

    async def retries(self, group: str, *, topic: str, token: str, limit: int) -> RetryPage:
        """Return up to ``limit`` waiting retries of a group, of one origin topic or (empty) all, from ``token`` on."""
        ...

    async def run_retries_now(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """Make waiting retries visible at once, durable on return."""
        ...

    async def end_retries(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """Send waiting retries to the group's dead-letter queue (``Reason.OPERATOR``), durable on return."""
        ...

    # -- dead letters -------------------------------------------------------------------------------------------------

    async def dead_letters(
        self, group: str, chosen: DeadFilter, *, offset: int, limit: int, with_outcome: bool
    ) -> DeadPage:
        """Return up to ``limit`` dead letters from ``offset`` on; those that have an outcome only if asked for."""
        ...

    async def start_job(self, job: Job, *, is_dry_run: bool) -> Job:
        """Start a redrive or a purge and return it as it was stored, with its id and its range of offsets.

        A dry run looks at every message and returns the finished counts; nothing is written and there is no id. Raises
        ``Refused(REQUEST)`` while another job of the same group runs, or for a target topic that cannot be.
        """
        ...

    async def jobs(self, group: str) -> Sequence[Job]:
        """Return the jobs of a group (empty: of all), newest first, at most 100."""
        ...

    async def stop_job(self, job_id: int) -> Job:
        """End a running job where it is, durable on return; a job that has ended stays as it is."""
        ...
