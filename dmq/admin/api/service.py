"""``rockdmq.admin.v1.AdminService`` without a transport: a request in, a response or an exception out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import NamedTuple, Self

from google.protobuf.message import DecodeError, Message

from broker_adapter.contracts.errors import Overloaded, Refused, Rule
from broker_adapter.contracts.own_keys import check_own_key
from broker_adapter.contracts.topics import check_group, check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.activity import ActivityCalls, ActivityLog
from dmq.admin.operations.backups import BackupCalls, Backups
from dmq.admin.operations.cell import Cell
from dmq.admin.operations.changes import BrokerChanges, ChangeCalls, MessageChanges
from dmq.admin.operations.clients import ClientCalls
from dmq.admin.operations.clock import ClockCalls
from dmq.admin.operations.groups import GroupOperations
from dmq.admin.operations.ledger import LedgerCalls
from dmq.admin.operations.letters import Letters
from dmq.admin.operations.listing import ListingCalls
from dmq.admin.operations.messages import Messages
from dmq.admin.operations.objects import ObjectCalls
from dmq.admin.operations.quotas import QuotaCalls
from dmq.admin.operations.replays import ReplayCalls
from dmq.admin.operations.schedules import ScheduleCalls
from dmq.admin.operations.topics import Topics
from dmq.admin.requests import mapping, validate
from dmq.admin.requests.client_source import ClientSilent
from dmq.broker.failures.waiting_retries import WaitingRetries
from dmq.broker.topics.settings import FlowChange
from dmq.errors import DmqError, StoreCorrupt
from dmq.recovery.backups.snapshots import Snapshots
from dmq.recovery.check.ledger import LedgerVerifier
from dmq.runtime.slices import in_slices
from dmq.states import MessageState
from dmq.store.store import Store

# With bodies a page ends before the answer exceeds the receiver's limit; one letter always fits.
BODIES_BYTES_MAX = 32 * 1024 * 1024
_LETTERS_WITH_BODY_MAX = 100  # each may be 4 MiB in the daemon's memory


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


class Handler(NamedTuple):
    """Handler of one RPC: parse the request as ``request_class``, await ``call(request)``."""

    request_class: type[Message]
    call: Callable[..., Awaitable[Message]]


class Operators(NamedTuple):
    """Operations that the calls use."""

    cell: Cell
    topics: Topics
    groups: GroupOperations
    retries: WaitingRetries
    letters: Letters
    messages: Messages
    changes: MessageChanges

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """Return the operations of a running daemon."""
        store, broker = cell.store, cell.broker
        return cls(
            cell,
            Topics(store, broker),
            GroupOperations(store, broker, cell.config.retries if cell.config.broker != "embedded" else ""),
            broker.retries,
            Letters(broker),
            Messages(store, broker),
            BrokerChanges(broker),
        )


class AdminService:
    """RPCs of the admin API. Raise ``Refused`` for invalid input; exceptions of the broker pass through."""

    def __init__(
        self,
        operators: Operators,
        snapshots: Snapshots | None = None,
        backups: Backups | None = None,
        clock: Store | None = None,
        *,
        quotas: QuotaCalls | None = None,
        schedules: ScheduleCalls | None = None,
        verifier: LedgerVerifier | None = None,
        activity: ActivityLog | None = None,
    ) -> None:
        """Calls about ``snapshots``, ``backups`` or the ``clock`` of a store are refused if the part is missing.

        Without ``activity`` no changes are recorded.
        """
        self._cell, self._topics, self._groups, self._retries, self._letters, self._messages, _ = operators
        self._snapshots = snapshots
        self.objects = ObjectCalls(operators.topics, operators.groups)
        self.listing = ListingCalls(operators.messages)
        self.changes = ChangeCalls(operators.changes)
        self.backups = BackupCalls(backups)
        self.clock = ClockCalls(clock)
        self.clients = ClientCalls(operators.messages)
        self.quotas = quotas or QuotaCalls()
        self.schedules = schedules or ScheduleCalls(operators.cell)
        self.replays = ReplayCalls(operators.cell, operators.messages)
        self.ledger = LedgerCalls(operators.cell, verifier)
        self.activity = ActivityCalls(activity)

    async def get_status(self, _request: wire.GetStatusRequest) -> wire.GetStatusResponse:
        """Return the status of the daemon."""
        return wire.GetStatusResponse(**asdict(await self._cell.status()))

    async def list_topics(self, _request: wire.ListTopicsRequest) -> wire.ListTopicsResponse:
        found = await self._topics.topics()
        return wire.ListTopicsResponse(topics=[mapping.wire_topic(topic) async for topic in in_slices(found)])

    async def get_message(self, request: wire.GetMessageRequest) -> wire.GetMessageResponse:
        """Return the state of a message, and its content if available."""
        topic, message_id = check_topic(request.topic), request.message_id
        if request.own_key and not message_id:
            message_id = await self._messages.under(topic, check_own_key(request.own_key))
            if not message_id:
                return wire.GetMessageResponse(topic=topic, state="UNKNOWN", queue_id=-1, queue_offset=-1)
        status = await self._messages.message(topic, validate.check_message_id(message_id))
        groups = await self._messages.group_states(topic, message_id, status)
        return wire.GetMessageResponse(
            topic=topic,
            message_id=message_id,
            state=status.state.name,
            deliver_at_ms=status.deliver_at_ms,
            stored_at_ms=status.stored_at_ms,
            queue_id=status.queue_id,
            queue_offset=status.queue_offset,
            content=_content(status.payload, with_body=request.with_body),
            is_held=status.is_held,
            groups=[mapping.wire_group_state(each) for each in groups],
            ended_at_ms=status.ended_at_ms,
        )

    async def count_messages(self, request: wire.CountMessagesRequest) -> wire.CountMessagesResponse:
        """Return the offset ranges of the queues of a topic."""
        topic = check_topic(request.topic)
        count = await self._topics.count(topic)
        queues = [
            wire.QueueRange(queue_id=queue_id, begin_offset=each.begin, end_offset=each.end)
            for queue_id, each in enumerate(count.queues)
        ]
        return wire.CountMessagesResponse(topic=topic, queues=queues, pending=count.pending)

    async def peek_messages(self, request: wire.PeekMessagesRequest) -> wire.PeekMessagesResponse:
        """Return messages of a queue without changing their state."""
        topic, limit = check_topic(request.topic), validate.check_limit(request.limit)
        found = await self._topics.peek(topic, request.queue_id, request.offset, limit=limit)
        shown = in_slices(found.messages)
        messages = [mapping.wire_peeked(each, with_body=request.with_body) async for each in shown]
        return wire.PeekMessagesResponse(messages=messages, next_offset=found.next_offset)

    # -- groups and their retries -------------------------------------------------------------------------------------

    async def list_groups(self, request: wire.ListGroupsRequest) -> wire.ListGroupsResponse:
        found = await self._groups.groups(with_removed=request.with_removed)
        return wire.ListGroupsResponse(groups=[mapping.wire_group(group) async for group in in_slices(found)])

    async def get_group(self, request: wire.GetGroupRequest) -> wire.GetGroupResponse:
        """Return the status of one group."""
        found = await self._groups.group(check_group(request.group), with_lag=True, with_unread=request.with_unread)
        return wire.GetGroupResponse(group=mapping.wire_group(found))

    async def set_group(self, request: wire.SetGroupRequest) -> wire.SetGroupResponse:
        """Change the settings of a group, and return its status."""
        name = check_group(request.group)
        policy = mapping.policy_of(request.policy) if request.HasField("policy") else None
        if policy is not None and request.reset_policy:
            raise Refused(Rule.REQUEST, "give a policy or reset it to the default, not both")
        is_fifo = request.is_fifo if request.HasField("is_fifo") else None
        if request.retries not in {"", "here", "cluster"}:
            raise Refused(Rule.REQUEST, "no such place for retries", value=request.retries, limit="here, cluster")
        group = await self._groups.set_group(
            name,
            policy=policy,
            reset_policy=request.reset_policy,
            is_fifo=is_fifo,
            retries=request.retries or None,
            flow=FlowChange(
                request.is_paused if request.HasField("is_paused") else None,
                request.deliver_rate if request.HasField("deliver_rate") else None,
            ),
        )
        return wire.SetGroupResponse(group=mapping.wire_group(group))

    async def list_retries(self, request: wire.ListRetriesRequest) -> wire.ListRetriesResponse:
        """List a page of the pending retries."""
        page = await self._retries.page(
            check_group(request.group),
            topic=check_topic(request.topic) if request.topic else "",
            token=validate.check_token(request.token),
            limit=validate.check_limit(request.limit),
        )
        retries = [mapping.wire_retry(retry) async for retry in in_slices(page.retries)]
        return wire.ListRetriesResponse(retries=retries, next_token=page.next_token)

    async def run_retries_now(self, request: wire.RunRetriesNowRequest) -> wire.RunRetriesNowResponse:
        """Make retries due at once."""
        group, entries = check_group(request.group), validate.check_entries(request.entries)
        return wire.RunRetriesNowResponse(**asdict(await self._retries.run_now(group, entries)))

    async def end_retries(self, request: wire.EndRetriesRequest) -> wire.EndRetriesResponse:
        """Move retries to the dead-letter queue."""
        group, entries = check_group(request.group), validate.check_entries(request.entries)
        return wire.EndRetriesResponse(**asdict(await self._retries.end(group, entries)))

    # -- dead letters -------------------------------------------------------------------------------------------------

    async def list_dead_letters(self, request: wire.ListDeadLettersRequest) -> wire.ListDeadLettersResponse:
        """List a page of the dead letters."""
        limit = validate.check_limit(request.limit)
        page = await self._letters.dead_letters(
            check_group(request.group),
            validate.check_filter(request.filter),
            offset=validate.check_offset(request.offset),
            limit=min(limit, _LETTERS_WITH_BODY_MAX) if request.with_body else limit,
            with_outcome=request.with_outcome,
        )
        response = wire.ListDeadLettersResponse(next_offset=page.next_offset)
        room_bytes = BODIES_BYTES_MAX
        async for letter in in_slices(page.letters):
            room_bytes -= len(letter.payload) if request.with_body else 0
            if room_bytes < 0 and response.letters:
                response.next_offset = letter.dead.offset
                break
            response.letters.append(mapping.wire_dead_letter(letter, with_body=request.with_body))
        return response

    async def start_job(self, request: wire.StartJobRequest) -> wire.StartJobResponse:
        """Start a redrive or a purge, or count the affected dead letters (dry run)."""
        job = await self._letters.start_job(validate.check_job(request), is_dry_run=request.is_dry_run)
        return wire.StartJobResponse(job=mapping.wire_job(job))

    async def list_jobs(self, request: wire.ListJobsRequest) -> wire.ListJobsResponse:
        """List the newest jobs."""
        group = check_group(request.group) if request.group else ""
        return wire.ListJobsResponse(jobs=[mapping.wire_job(job) for job in await self._letters.jobs(group)])

    async def stop_job(self, request: wire.StopJobRequest) -> wire.StopJobResponse:
        """Stop a running job; completed parts stay."""
        job = await self._letters.stop_job(validate.check_job_id(request.job_id))
        return wire.StopJobResponse(job=mapping.wire_job(job))

    def group_of_job(self, job_id: int) -> str:
        """Return the group of a job; empty if there is no such job."""
        return self._letters.group_of_job(job_id)

    # -- the audit trail ----------------------------------------------------------------------------------------------

    async def take_snapshot(self, _request: wire.TakeSnapshotRequest) -> wire.TakeSnapshotResponse:
        """Write a snapshot of the store into the audit trail."""
        if self._snapshots is None:
            raise Refused(Rule.REQUEST, "this daemon runs without an audit trail, so a snapshot has no place")
        taken = await self._snapshots.snapshot()
        return wire.TakeSnapshotResponse(
            sequence=taken.sequence,
            path=str(taken.path),
            entries=taken.entries,
            taken_at_ms=taken.taken_ms,
            took_ms=taken.took_ms,
            is_new=taken.is_new,
        )


def handlers(service: AdminService) -> Mapping[str, Handler]:
    """Return the handler of each RPC by its HTTP/2 path (``/rockdmq.admin.v1.AdminService/GetStatus``)."""
    calls: Mapping[str, Callable[..., Awaitable[Message]]] = {
        "GetStatus": service.get_status,
        "ListTopics": service.list_topics,
        "GetMessage": service.get_message,
        "CountMessages": service.count_messages,
        "PeekMessages": service.peek_messages,
        "ListGroups": service.list_groups,
        "GetGroup": service.get_group,
        "SetGroup": service.set_group,
        "ListRetries": service.list_retries,
        "RunRetriesNow": service.run_retries_now,
        "EndRetries": service.end_retries,
        "ListDeadLetters": service.list_dead_letters,
        "StartJob": service.start_job,
        "ListJobs": service.list_jobs,
        "StopJob": service.stop_job,
        "TakeSnapshot": service.take_snapshot,
        "BackUpStore": service.backups.back_up_store,
        "ListMessages": service.listing.list_messages,
        **service.objects.calls,
        **service.clock.calls,
        **service.schedules.calls,
        "ListQuotas": service.quotas.list_quotas,
        "SetQuota": service.quotas.set_quota,
        "ListClients": service.clients.list_clients,
        "GetClientStack": service.clients.get_client_stack,
        "ReplayMessages": service.replays.replay_messages,
        "VerifyClientMessage": service.clients.verify_client_message,
        "GetLedger": service.ledger.get_ledger,
        "VerifyLedger": service.ledger.verify_ledger,
        "ChangeMessages": service.changes.change_messages,
        "ListActivity": service.activity.list_activity,
    }
    return MappingProxyType(
        {method.path: Handler(method.request_class, calls[name]) for name, method in wire.METHODS.items()}
    )


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


def _content(payload: bytes | None, *, with_body: bool) -> wire.Content | None:
    if payload is None:
        return None
    try:
        return mapping.wire_content(payload, with_body=with_body)
    except DecodeError as error:
        raise StoreCorrupt("the stored message cannot be read") from error


assert {state.name: state.value for state in MessageState}.items() <= dict(wire.MessageState.items()).items()
