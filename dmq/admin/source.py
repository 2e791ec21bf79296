"""What the daemon answers operators with: a protocol, and values whose fields are those of ``admin_v1.proto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol


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
    """Audit events not exported yet, and those cut before they were."""

    rows: int = 0
    held_bytes: int = 0
    held_bytes_max: int = 0
    lost_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How the store was found when it was opened."""

    was_clean: bool = True
    cut_bytes: int = 0
    open_ms: float = 0.0
    is_new: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DueBucket:
    """How many are due from the end of the bucket before until ``until_ms``."""

    until_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """A topic: its queues, the messages in them, and those that wait for it on the timeline."""

    name: str
    queues: int
    stored: int = 0
    pending: int = 0
    due: Sequence[DueBucket] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStatus:
    """Where a message is. ``payload`` is the wire message as it is stored, ``None`` if it is not at hand."""

    state: MessageState
    deliver_at_ms: int = 0
    stored_at_ms: int = 0
    queue_id: int = -1
    queue_offset: int = -1
    payload: bytes | None = None


class AdminSource(Protocol):
    """What the admin service asks; every method answers without a scan and may be called on the event loop."""

    async def status(self) -> CellStatus:
        """Return how the daemon is now; also while its storage has failed."""
        ...

    async def topics(self) -> Sequence[TopicStatus]:
        """Return every topic, by name."""
        ...

    async def message(self, topic: str, message_id: str) -> MessageStatus:
        """Return where a message is; ``UNKNOWN`` if topic or message are not known (or no longer)."""
        ...
