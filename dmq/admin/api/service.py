"""``rockdmq.admin.v1.AdminService`` without a transport: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from dmq.admin import admin_v1 as wire
from dmq.admin.api.redaction import Redaction
from dmq.admin.operations.daemon import BackupCalls, Backups, ClockCalls, RunningDaemon
from dmq.admin.operations.messages import (
    ChangeCalls,
    DueCalls,
    LetterCalls,
    MessageCalls,
    MessageJobCalls,
    PropertyCalls,
    ReplayCalls,
)
from dmq.admin.operations.objects import ClientCalls, GroupCalls, QuotaCalls, ScheduleCalls, TopicCalls
from dmq.admin.operations.trail import ActivityLog, AuditCalls, EventCalls, LedgerCalls
from dmq.admin.requests import ClientSilent
from dmq.errors import DmqError
from dmq.recovery import AuditRuns, LedgerVerifier, Snapshots

# NOT_FOUND, UNAUTHENTICATED, PERMISSION_DENIED
_REFUSED: Mapping[Rule, int] = MappingProxyType(
    {
        Rule.NOT_FOUND: 5,
        Rule.TOPIC_UNKNOWN: 5,
        Rule.GROUP_UNKNOWN: 5,
        Rule.UNAUTHORIZED: 16,
        Rule.FORBIDDEN: 7,
    }
)


class AdminService:
    """RPCs of the admin API. Raise ``Refused`` for invalid input; exceptions of the broker pass through."""

    def __init__(
        self,
        cell: RunningDaemon,
        snapshots: Snapshots | None = None,
        backups: Backups | None = None,
        *,
        quotas: QuotaCalls | None = None,
        schedules: ScheduleCalls | None = None,
        verifier: LedgerVerifier | None = None,
        activity: ActivityLog | None = None,
        audits: AuditRuns | None = None,
    ) -> None:
        """Calls that need a missing part are refused."""
        store, broker = cell.store, cell.broker
        messages = MessageCalls(store, broker)
        self.activity = activity or ActivityLog(store)
        self.redaction = Redaction(cell.config.redact)
        self.clients = ClientCalls(messages)
        self.letters = LetterCalls(broker)
        self.message_jobs = MessageJobCalls(broker)
        self.schedules = schedules or ScheduleCalls(broker)
        self.groups = GroupCalls(store, broker, cell.config.retries if cell.config.broker != "embedded" else "")
        self._parts = (
            cell,
            TopicCalls(store, broker),
            self.groups,
            messages,
            PropertyCalls(broker),
            ChangeCalls(broker),
            self.letters,
            self.message_jobs,
            self.schedules,
            self.clients,
            ClockCalls(store),
            BackupCalls(backups, snapshots),
            quotas or QuotaCalls(),
            ReplayCalls(lambda: cell.inner, messages),
            LedgerCalls(store, broker, verifier),
            AuditCalls(audits),
            DueCalls(store, broker),
            EventCalls(store, broker),
            self.activity,
        )

    def handler(self, rpc: str) -> Callable[[Any], Awaitable[Message]]:
        """Return the method that is named as an RPC: ``get_status`` for ``GetStatus``."""
        name = wire.METHODS[rpc].snake_name
        (found,) = (getattr(part, name) for part in self._parts if hasattr(part, name))
        return found  # type: ignore[no-any-return]  # looked up by name


class Refusal(NamedTuple):
    """gRPC status: its number, a text for the caller, and whether the log needs the details."""

    code: int
    text: str
    is_ours: bool


def refusal_of(error: Exception) -> Refusal:
    """Return the gRPC status for ``error``."""
    if isinstance(error, Refused):
        return Refusal(_REFUSED.get(error.rule, 3), str(error), is_ours=False)  # INVALID_ARGUMENT
    if isinstance(error, DecodeError):
        return Refusal(3, "the request cannot be read", is_ours=False)
    if isinstance(error, ClientSilent):
        return Refusal(10, str(error), is_ours=False)  # ABORTED
    if isinstance(error, Overloaded):
        return Refusal(8, str(error), is_ours=False)  # RESOURCE_EXHAUSTED
    if getattr(error, "retriable", False):
        return Refusal(14, str(error), is_ours=False)  # UNAVAILABLE
    if isinstance(error, DmqError):
        return Refusal(13, str(error), is_ours=True)  # INTERNAL
    return Refusal(13, "internal error; the daemon's log has the details", is_ours=True)
