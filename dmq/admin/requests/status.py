"""Status values that the admin API returns; their fields are those of ``admin_v1.proto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from broker_adapter.contracts.adapter import QueueRange
from dmq.broker.operations.retention import KEEP_ALL
from dmq.metrics.usage import ProcessStatus
from dmq.states import MessageState
from dmq.store.schema.names import Keep
from retry.dead_letter import Dead
from retry.policy import RetryPolicy


class CellState(IntEnum):
    """Numbers of ``rockdmq.admin.v1``."""

    STARTING = 1
    SERVING = 2
    NOT_SERVING = 3
    STOPPING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Pending messages on the timeline; ``next_due_at_ms`` is 0 if there are none."""

    pending: int = 0
    overdue: int = 0
    next_due_at_ms: int = 0
    held: int = 0
    paused_topics: int = 0
    paused_groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Time from the delivery timestamp until visible, since the start of the process."""

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
    """Space on the file system of the store."""

    free_bytes: int = 0
    low_water_bytes: int = 0
    refuses_sends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """Audit events not exported yet, events dropped before export, and the state of the trail; empty ``trail``: off."""

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
    """Condition of the store when it was opened."""

    was_clean: bool = True
    cut_bytes: int = 0
    open_ms: float = 0.0
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """Clock state of the daemon's host; fields as in ``admin_v1.proto``."""

    wall_ms: int = 0
    believed_ms: int = 0
    is_steady: bool = True
    is_held: bool = False
    steady_in_ms: int = 0
    steps: int = 0
    last_step_ms: int = 0
    last_step_at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicBackupStatus:
    """Status of periodic backups; fields as in ``admin_v1.proto``."""

    folder: str
    rule: str
    kept_max: int
    last_at_ms: int = 0
    last_folder: str = ""
    last_bytes: int = 0
    next_at_ms: int = 0
    failed_at_ms: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyTrouble:
    """Proxy that is not used at present, and the reason."""

    address: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTrouble:
    """Topic whose messages the cluster refuses, and the reason."""

    topic: str
    waiting: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Topic of the cluster from which messages are fetched; fields as in ``admin_v1.proto``."""

    topic: str
    fetched: int = 0
    unreadable: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Cluster in front of which the daemon runs; fields as in ``admin_v1.proto``."""

    endpoints: Sequence[str]
    away_since_ms: int = 0
    proxies: Sequence[ProxyTrouble] = ()
    waiting: int = 0
    in_flight: int = 0
    forwarded: int = 0
    refused: int = 0
    in_doubt: int = 0
    kept: int = 0
    lateness: Lateness = field(default_factory=Lateness)
    lanes: Sequence[LaneTrouble] = ()
    inner: Inner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatus:
    """Quota of a topic and its current use."""

    name: str
    quota: str
    used: int
    limit: int
    is_set: bool  # set on the topic itself, not by the configuration
    kind: str = "topic"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRefusals:
    """Number of messages that a quota refused since the start of the process."""

    quota: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStatus:
    """Status of a daemon; unknown parts stay 0 or empty."""

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
    cluster: Cluster | None = None
    backups: PeriodicBackupStatus | None = None
    topic_quotas: Sequence[QuotaStatus] = ()
    quota_refusals: Sequence[QuotaRefusals] = ()
    processes: Sequence[ProcessStatus] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DueBucket:
    """Number of messages due from the end of the bucket before until ``until_ms``."""

    until_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Group that reads a topic, with its lag; fields as in ``admin_v1.proto``."""

    group: str
    unread: int
    oldest_unread_age_ms: int | None = None
    in_flight: int = 0
    in_retry: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLag:
    """Lag of a group in a topic; fields as in ``admin_v1.proto``."""

    topic: str
    unread: int | None = None
    oldest_unread_age_ms: int | None = None
    in_flight: int = 0
    in_retry: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """Topic: its queues, their messages, and its pending messages on the timeline."""

    name: str
    queues: int
    stored: int = 0
    pending: int = 0
    due: Sequence[DueBucket] = ()
    type: str = "MIXED"
    created_at_ms: int = 0
    readers: Sequence[Reader] = ()
    ranges: Sequence[QueueRange] = ()
    oldest_at_ms: int = 0  # storage time of the oldest message in its queues
    keep: Keep = KEEP_ALL
    keep_own: Sequence[str] = ()  # the part of it that is set on the topic itself
    paused_since_ms: int = 0  # 0: not paused
    deliver_rate: int = 0  # delayed messages a second; 0: no limit
    held: int = 0  # of the pending ones: due, and kept back
    pending_bytes: int = 0  # half messages included
    quotas: Sequence[QuotaStatus] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStatus:
    """State of a message. ``payload`` is the stored wire message, None if it is not available."""

    state: MessageState
    deliver_at_ms: int = 0
    stored_at_ms: int = 0
    queue_id: int = -1
    queue_offset: int = -1
    payload: bytes | None = None
    is_held: bool = False
    ended_at_ms: int = 0  # when it was recalled or replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCount:
    """Offset range of each queue of a topic, by number; ``pending`` messages are on the timeline."""

    queues: Sequence[QueueRange]
    pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Number of messages of a topic that a group has not finished."""

    topic: str
    unread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """Consumer group. ``waiting`` is the number of pending retries; ``dead`` letters have no outcome yet."""

    name: str
    created_at_ms: int
    policy: RetryPolicy
    is_default_policy: bool
    is_fifo: bool  # as reported to its clients
    is_fifo_set: bool  # by an operator; else it depends on the topics that the group is subscribed to
    retries: str = ""  # "here" or "cluster", if it is set
    retries_in_force: str = ""  # in front of a cluster: the group's own setting, or else the daemon's
    waiting: int = 0
    dead: int = 0
    leased: int = 0
    due: Sequence[DueBucket] = ()  # of the pending retries
    is_removed: bool = False  # the group does not exist (any more), but has dead letters
    unread: Sequence[Unread] = ()  # unfinished messages by topic, on request
    paused_since_ms: int = 0  # 0: not paused
    deliver_rate: int = 0  # delivered messages per second; 0: no limit
    waiting_bytes: int = 0  # of the pending retries
    unread_messages: int | None = None  # of all topics with a known lag
    oldest_unread_age_ms: int | None = None
    lags: Sequence[TopicLag] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadStatus:
    """Dead letter with its original message, and its outcome if it has one."""

    dead: Dead
    payload: bytes
    dead_at_ms: int = 0  # time of its arrival in the dead-letter queue
    outcome: str = ""  # "", "redriven" or "purged"
    outcome_at_ms: int = 0
    outcome_note: str = ""  # if redriven: the topic and new message id; if purged: the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPage:
    """Page of dead letters in the order of their death; ``next_offset`` is the start of the next page, -1 at the end.

    A page may be short, or empty, before the end: one call reads a bounded number of messages.
    """

    letters: Sequence[DeadStatus]
    next_offset: int = -1
