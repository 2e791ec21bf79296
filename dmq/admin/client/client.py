"""Admin client of the command line: synchronous, one deadline per call, errors as sentences."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as public
from broker_adapter.wire.pool import Method, option
from broker_adapter.wire.signature import Signer
from dmq.admin import admin_v1 as wire
from dmq.admin.client.channel import open_channel, told_of_tls
from dmq.admin.requests.validate import CLIENT_MS_MAX, WHY_HEADER
from dmq.config.contexts import ClientTls, target_of
from dmq.errors import DmqError

_DRY_RUN_TIMEOUT_S = 600.0  # at least: one call reads every dead letter of a group
_ON_THE_WAY_S = 2.0  # to the daemon and back, in addition to the time of the client that it queries

_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # A web proxy cannot reach a daemon on this host or in this cluster.
    ("grpc.enable_http_proxy", 0),
)


class DaemonUnavailable(DmqError):
    """No daemon answered; the outcome of the call is unknown."""

    retriable = True


class ClientSilent(DaemonUnavailable):
    """A client did not answer the daemon in time."""


class CallRefused(DmqError):
    """The daemon refused the call as invalid; nothing was done."""


class NotFound(CallRefused):
    """The named object does not exist; nothing was done."""


class NotAllowed(CallRefused):
    """The daemon requires an access key, or another one; nothing was done."""


class CallFailed(DmqError):
    """The call failed in the daemon."""


class AdminClient:
    """Connection to one daemon; opened by the first call, closed by ``close`` or at the end of a ``with``."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        signer: Signer | None = None,
        tls: ClientTls | None = None,
        why: str = "",
    ) -> None:
        """``signer`` is for daemons that require access keys; ``why`` is recorded with each change.

        Raise ``ContextError`` if a file of ``tls`` cannot be used.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._signer = signer
        self._tls = tls
        self._why = ((WHY_HEADER, quote(why)),) if why else ()
        self._channel = open_channel(address, tls, _OPTIONS)
        self._rpc, self._public = wire.Stub(self._call), public.Stub(self._call)

    @classmethod
    def from_context(cls, name: str = "", *, timeout_s: float = 5.0, why: str = "") -> Self:
        """Return a client of the daemon of a context of ``dmq context add``. Raise ``ContextError`` if there is none.

        The default name is ``DMQ_CONTEXT``, or else the current context.
        """
        target = target_of(name)
        signer = Signer(target.access_key, target.secret, SystemClock()) if target.access_key else None
        return cls(target.address, timeout_s=timeout_s, signer=signer, tls=target.tls, why=why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def status(self) -> wire.GetStatusResponse:
        """Return the status of the daemon."""
        return self._rpc.GetStatus(wire.GetStatusRequest())

    def now_ms(self) -> int:
        """Return the daemon's time, or that of this host if the key may not read the status of the daemon."""
        try:
            return self.status().now_ms
        except NotAllowed:
            return SystemClock().now_ms()

    def topics(self) -> list[wire.Topic]:
        """Return all topics, by name, page by page."""
        found, request = list[wire.Topic](), wire.ListTopicsRequest()
        while True:
            page = self._rpc.ListTopics(request)
            found += page.topics
            request.token = page.next_token
            if not page.next_token:
                return found

    def message(
        self, topic: str, message_id: str = "", *, own_key: str = "", with_body: bool = False
    ) -> wire.GetMessageResponse:
        """Return the state of a message; without an id, of the pending message under an own key."""
        return self._rpc.GetMessage(
            wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body, own_key=own_key)
        )

    def count(self, topic: str) -> wire.CountMessagesResponse:
        """Return the offset ranges of the queues of a topic. Raise ``NotFound``."""
        return self._rpc.CountMessages(wire.CountMessagesRequest(topic=topic))

    def peek(
        self, topic: str, queue_id: int, offset: int, *, limit: int, with_body: bool = False
    ) -> wire.PeekMessagesResponse:
        """Return messages of a queue without changing their state. Raise ``NotFound``."""
        return self._rpc.PeekMessages(
            wire.PeekMessagesRequest(topic=topic, queue_id=queue_id, offset=offset, limit=limit, with_body=with_body)
        )

    def messages(self, request: wire.ListMessagesRequest) -> wire.ListMessagesResponse:
        """Return a page of the messages of a topic. Raise ``NotFound``."""
        return self._rpc.ListMessages(request)

    def cancel(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Cancel up to 1000 pending delayed messages. Raise ``NotFound`` if the topic is unknown.

        A message that is ``DONE`` is never delivered; this is durable. All others are unchanged: ``TOO_LATE``,
        ``CANCELLED`` or ``REPLACED`` before, or ``UNKNOWN``. The call may be repeated with the same answers. An own key
        selects the message that is pending under it at the time of the change. If there is none, the answer names the
        last holder of the key and its end. It is ``UNKNOWN`` without an id if no holder is recorded.
        """
        request = wire.ChangeMessagesRequest(cancel=True, own_keys=own_keys)
        return self._change(topic, message_ids, recall_handles, request)

    def reschedule(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        deliver_at_ms: int,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Set the delivery time of up to 1000 delayed messages, in epoch milliseconds; a past time means now.

        Same contract as ``cancel``; recall handles stay valid. Raise ``CallRefused`` if the time exceeds the longest
        delay.
        """
        request = wire.ChangeMessagesRequest(deliver_at_ms=deliver_at_ms, own_keys=own_keys)
        return self._change(topic, message_ids, recall_handles, request)

    def fire(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Deliver up to 1000 delayed messages now. Same contract as ``reschedule``."""
        request = wire.ChangeMessagesRequest(fire=True, own_keys=own_keys)
        return self._change(topic, message_ids, recall_handles, request)

    def _change(
        self, topic: str, ids: Sequence[str], handles: Sequence[str], request: wire.ChangeMessagesRequest
    ) -> Sequence[wire.ChangedMessage]:
        request.topic = topic
        request.message_ids.extend(ids)
        request.recall_handles.extend(handles)
        return self._rpc.ChangeMessages(request).messages

    def groups(self, *, with_removed: bool = False) -> list[wire.Group]:
        """Return the consumer groups without their histograms, page by page; on request also removed groups that still
        have dead letters.
        """
        found, request = list[wire.Group](), wire.ListGroupsRequest(with_removed=with_removed)
        while True:
            page = self._rpc.ListGroups(request)
            found += page.groups
            request.token = page.next_token
            if not page.next_token:
                return found

    def group(self, name: str, *, with_unread: bool = False) -> wire.Group:
        """Return one group. Raise ``NotFound``."""
        return self._rpc.GetGroup(wire.GetGroupRequest(group=name, with_unread=with_unread)).group

    def set_group(
        self,
        name: str,
        *,
        policy: wire.Policy | None = None,
        reset_policy: bool = False,
        is_fifo: bool | None = None,
        retries: str = "",
        is_paused: bool | None = None,
        deliver_rate: int | None = None,
    ) -> wire.Group:
        """Change or create a group. Arguments that are None or empty leave a setting unchanged. Return the group.

        ``is_paused`` stops deliveries. ``deliver_rate`` limits the messages delivered per second; 0 is no limit. Either
        raises ``NotFound`` if the group does not exist.
        """
        return self._rpc.SetGroup(
            wire.SetGroupRequest(
                group=name,
                policy=policy,
                reset_policy=reset_policy,
                is_fifo=is_fifo,
                retries=retries,
                is_paused=is_paused,
                deliver_rate=deliver_rate,
            )
        ).group

    def topic(self, name: str) -> wire.Topic:
        """Return one topic with its readers. Raise ``NotFound``."""
        return self._rpc.GetTopic(wire.GetTopicRequest(topic=name)).topic

    def create_topic(
        self, name: str, *, queues: int = 0, type_: str = "", keep: wire.KeepChange | None = None
    ) -> wire.Topic:
        """Create a topic. Without ``type_`` it accepts all message types."""
        return self._rpc.CreateTopic(wire.CreateTopicRequest(topic=name, queues=queues, type=type_, keep=keep)).topic

    def set_topic(
        self,
        name: str,
        *,
        queues: int = 0,
        type_: str = "",
        keep: wire.KeepChange | None = None,
        is_paused: bool | None = None,
        deliver_rate: int | None = None,
        max_pending: int | None = None,
        max_pending_bytes: int | None = None,
        send_rate: int | None = None,
    ) -> wire.Topic:
        """Change a topic; omitted settings stay. Return the topic.

        ``is_paused`` keeps due delayed messages on the timeline. ``deliver_rate`` limits how many of them move to the
        queues per second, oldest first; 0 is no limit. ``max_pending`` and ``max_pending_bytes`` limit the pending
        messages and their bytes, ``send_rate`` the messages sent per second; 0 is no limit, -1 the value of the
        configuration. Sends above a limit are refused.
        """
        return self._rpc.SetTopic(
            wire.SetTopicRequest(
                topic=name,
                queues=queues,
                type=type_,
                keep=keep,
                is_paused=is_paused,
                deliver_rate=deliver_rate,
                max_pending=max_pending,
                max_pending_bytes=max_pending_bytes,
                send_rate=send_rate,
            )
        ).topic

    def remove_topic(self, name: str, *, force: bool = False) -> None:
        """Remove a topic. Takes up to several minutes."""
        self._rpc.RemoveTopic(wire.RemoveTopicRequest(topic=name, force=force))

    def create_group(self, name: str) -> wire.Group:
        """Create a group."""
        return self._rpc.CreateGroup(wire.CreateGroupRequest(group=name)).group

    def remove_group(self, name: str, *, force: bool = False, with_dead_letters: bool = False) -> None:
        """Remove a group. Takes up to several minutes."""
        self._rpc.RemoveGroup(wire.RemoveGroupRequest(group=name, force=force, with_dead_letters=with_dead_letters))

    def reset_group(self, request: wire.ResetGroupRequest) -> Sequence[int]:
        """Move the position of a group, and return the position in each queue. Takes up to several minutes."""
        return self._rpc.ResetGroup(request).offsets

    def subscribe(self, group: str, topic: str) -> None:
        """Subscribe a group to a topic from its beginning, unless it is already subscribed."""
        self._rpc.Subscribe(wire.SubscribeRequest(group=group, topic=topic))

    def retries(self, group: str, *, topic: str = "", token: str = "", limit: int = 1000) -> wire.ListRetriesResponse:
        """Return a page of the pending retries."""
        return self._rpc.ListRetries(wire.ListRetriesRequest(group=group, topic=topic, token=token, limit=limit))

    def run_retries_now(self, group: str, entries: Sequence[str]) -> wire.RunRetriesNowResponse:
        """Make up to 1000 retries due at once."""
        return self._rpc.RunRetriesNow(wire.RunRetriesNowRequest(group=group, entries=entries))

    def end_retries(self, group: str, entries: Sequence[str]) -> wire.EndRetriesResponse:
        """Move up to 1000 retries to the dead-letter queue."""
        return self._rpc.EndRetries(wire.EndRetriesRequest(group=group, entries=entries))

    def dead_letters(
        self,
        group: str,
        chosen: wire.DeadFilter,
        *,
        offset: int = 0,
        limit: int = 1000,
        with_outcome: bool = False,
        with_body: bool = False,
    ) -> wire.ListDeadLettersResponse:
        """Return a page of the dead letters."""
        return self._rpc.ListDeadLetters(
            wire.ListDeadLettersRequest(
                group=group, filter=chosen, offset=offset, limit=limit, with_outcome=with_outcome, with_body=with_body
            )
        )

    def start_job(self, request: wire.StartJobRequest) -> wire.Job:
        """Start a redrive or a purge. A dry run may take minutes, independent of the deadline of other calls."""
        timeout_s = max(self._timeout_s, _DRY_RUN_TIMEOUT_S) if request.is_dry_run else self._timeout_s
        return self._rpc.StartJob(request, timeout_s).job

    def jobs(self, group: str = "") -> Sequence[wire.Job]:
        """Return the newest jobs of a group, or of all groups."""
        return self._rpc.ListJobs(wire.ListJobsRequest(group=group)).jobs

    def stop_job(self, job_id: int) -> wire.Job:
        """Stop a running job; completed parts stay. Raise ``NotFound``."""
        return self._rpc.StopJob(wire.StopJobRequest(job_id=job_id)).job

    def take_snapshot(self) -> wire.TakeSnapshotResponse:
        """Write a snapshot of the daemon's store into the audit trail. Takes up to several minutes."""
        return self._rpc.TakeSnapshot(wire.TakeSnapshotRequest())

    def clock(self) -> wire.GetClockResponse:
        """Return the clock state of the daemon's host."""
        return self._rpc.GetClock(wire.GetClockRequest())

    def accept_clock(self, why: str) -> wire.AcceptClockResponse:
        """Confirm that the clock of the daemon's host is right."""
        return self._rpc.AcceptClock(wire.AcceptClockRequest(why=why))

    def back_up(self, folder: str) -> wire.BackUpStoreResponse:
        """Copy the daemon's store into a folder of its host, an absolute path. Takes up to several minutes."""
        return self._rpc.BackUpStore(wire.BackUpStoreRequest(folder=folder))

    def clients(self, group: str = "") -> Sequence[wire.Client]:
        """Return the clients of a group, or all clients."""
        return self._rpc.ListClients(wire.ListClientsRequest(group=group)).clients

    def client_stack(self, client_id: str) -> str:
        """Return the thread stacks of a client. Raise ``NotFound`` or ``ClientSilent``."""
        request = wire.GetClientStackRequest(client_id=client_id, timeout_ms=self._client_ms)
        timeout_s = self._timeout_s + _ON_THE_WAY_S
        return self._rpc.GetClientStack(request, timeout_s).stack

    def verify(self, client_id: str, topic: str, message_id: str) -> wire.VerifyClientMessageResponse:
        """Make a push consumer consume a message once. Raise ``NotFound`` or ``ClientSilent``."""
        request = wire.VerifyClientMessageRequest(
            client_id=client_id, topic=topic, message_id=message_id, timeout_ms=self._client_ms
        )
        timeout_s = self._timeout_s + _ON_THE_WAY_S
        return self._rpc.VerifyClientMessage(request, timeout_s)

    @property
    def _client_ms(self) -> int:
        """Longest time for the answer of a client, in ms."""
        return max(1, min(int(self._timeout_s * 1000), CLIENT_MS_MAX))

    def send(self, message: public.Message) -> public.SendMessageResponse:
        """Send through the public protocol, like any client. A refusal is in the status of the response."""
        request = public.SendMessageRequest(messages=[message])
        return self._public.SendMessage(request)

    def recall(self, topic: str, handle: str) -> public.RecallMessageResponse:
        """Recall a message through the public protocol, like any client. A refusal is in the status of the response."""
        request = public.RecallMessageRequest(topic=public.Resource(name=topic), recall_handle=handle)
        return self._public.RecallMessage(request)

    def quotas(self) -> Sequence[wire.Quota]:
        """Return the quotas of keys and addresses with their current use."""
        return self._rpc.ListQuotas(wire.ListQuotasRequest()).quotas

    def set_quota(self, kind: str, name: str, quota: str, limit: int | None) -> wire.Quota:
        """Set a limit of a key or an address; None restores the default."""
        request = wire.SetQuotaRequest(kind=kind, name=name, quota=quota)
        if limit is not None:
            request.limit = limit
        return self._rpc.SetQuota(request).quota

    def replay(self, request: wire.ReplayMessagesRequest) -> Sequence[wire.Replayed]:
        """Process messages of the inner topic again; return one result per message, in order."""
        return self._rpc.ReplayMessages(request).results

    def add_schedule(self, schedule: wire.Schedule, *, replace: bool = False) -> wire.AddScheduleResponse:
        """Create a schedule. One with the same name and content is returned unchanged.

        Raise ``CallRefused`` for an invalid schedule, and for other content under an existing name unless ``replace``
        is set.
        """
        return self._rpc.AddSchedule(wire.AddScheduleRequest(schedule=schedule, replace=replace))

    def schedules(self, *, topic: str = "", token: str = "", limit: int = 1000) -> wire.ListSchedulesResponse:
        """Return a page of schedules, by name."""
        return self._rpc.ListSchedules(wire.ListSchedulesRequest(topic=topic, token=token, limit=limit))

    def schedule(self, name: str, *, with_body: bool = False) -> wire.Schedule:
        """Return one schedule. Raise ``NotFound``."""
        return self._rpc.GetSchedule(wire.GetScheduleRequest(name=name, with_body=with_body)).schedule

    def pause_schedule(self, name: str) -> wire.Schedule:
        """Pause a schedule until it is resumed. Raise ``NotFound``."""
        return self._rpc.PauseSchedule(wire.PauseScheduleRequest(name=name)).schedule

    def resume_schedule(self, name: str) -> wire.Schedule:
        """Resume a schedule from now on. Raise ``NotFound``."""
        return self._rpc.ResumeSchedule(wire.ResumeScheduleRequest(name=name)).schedule

    def remove_schedule(self, name: str) -> wire.Schedule:
        """Remove a schedule and return its last state. Raise ``NotFound``."""
        return self._rpc.RemoveSchedule(wire.RemoveScheduleRequest(name=name)).schedule

    def activity(
        self, *, since_ms: int = 0, key: str = "", before: int = 0, limit: int = 1000
    ) -> wire.ListActivityResponse:
        """Return a page of the operators' changes, newest first."""
        return self._rpc.ListActivity(wire.ListActivityRequest(since_ms=since_ms, key=key, before=before, limit=limit))

    def ledger(self, topic: str = "", *, with_groups: bool = False) -> wire.GetLedgerResponse:
        """Return the ledger: the number of messages in each state. Raise ``NotFound`` if the topic is unknown."""
        return self._rpc.GetLedger(wire.GetLedgerRequest(topic=topic, with_groups=with_groups))

    def verify_ledger(self, number: int = 0) -> wire.VerifyLedgerResponse:
        """Start a comparison of the ledger with the rows of the store, or return the progress of one."""
        return self._rpc.VerifyLedger(wire.VerifyLedgerRequest(number=number))

    def _call(self, method: Method, request: Message, timeout_s: float = 0.0) -> Message:
        """Return the answer to a call. Without ``timeout_s`` the deadline is that of the client or the RPC."""
        timeout_s = timeout_s or max(self._timeout_s, option(method, wire.timeout_s))
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request_class.SerializeToString,
            response_deserializer=method.response_class.FromString,
        )
        try:
            signed = self._signer.metadata() if self._signer is not None else ()
            answer: Message = call(request, timeout=timeout_s, metadata=(*_metadata(), *signed, *self._why))
            return answer
        except grpc.RpcError as error:
            # its text is ten lines of debug output
            raise self._told(error.code(), error.details() or "", timeout_s) from None

    def _told(self, code: grpc.StatusCode, text: str, timeout_s: float) -> DmqError:
        details = " ".join(text.split())
        match code:
            case grpc.StatusCode.UNAVAILABLE if "onnection refused" in details or not details:
                return DaemonUnavailable(f"no daemon answers at {self._address}; is `dmq serve` running?")
            case grpc.StatusCode.UNAVAILABLE:
                told = told_of_tls(self._address, self._tls, details)
                return DaemonUnavailable(told or f"the daemon at {self._address} is unavailable: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DaemonUnavailable(f"no answer from {self._address} within {timeout_s:g} s")
            case grpc.StatusCode.UNIMPLEMENTED:
                return CallFailed(f"the server at {self._address} is not a Rock-DMQ daemon, or has another version")
            case grpc.StatusCode.INVALID_ARGUMENT:
                return CallRefused(details)
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return NotAllowed(details)
            case grpc.StatusCode.NOT_FOUND:
                return NotFound(details)
            case grpc.StatusCode.ABORTED:
                return ClientSilent(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return DaemonUnavailable(details)
            case _:
                return CallFailed(f"{details or 'the call failed'} ({code.name.lower()})")


def _metadata() -> tuple[tuple[str, str], ...]:
    # The public protocol rejects calls without these.
    client_id = f"{socket.gethostname()}@{os.getpid()}@dmq-{secrets.token_hex(4)}"
    return (
        ("x-mq-client-id", client_id),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-client-version", "5.0.0"),
    )
