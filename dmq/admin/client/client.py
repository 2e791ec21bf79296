"""What the command line calls a daemon with: synchronous, one deadline per call, errors as sentences."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as public
from broker_adapter.wire.pool import Method
from broker_adapter.wire.signature import Signer
from dmq.admin import admin_v1 as wire
from dmq.admin.client.channel import open_channel, told_of_tls
from dmq.admin.requests.validate import CLIENT_MS_MAX, WHY_HEADER
from dmq.config.contexts import ClientTls, target_of
from dmq.errors import DmqError

_Response = TypeVar("_Response", bound=Message)

_DRY_RUN_TIMEOUT_S = 600.0  # at least: it looks at every dead letter of a group within one call
_REMOVAL_TIMEOUT_S = 600.0  # at least: it has an event for everything that is not finished
_CHANGE_TIMEOUT_S = 60.0  # at least: a thousand messages may be gigabytes
_ON_THE_WAY_S = 2.0  # from and to the daemon, beside the time that a client takes which it asks
_SNAPSHOT_TIMEOUT_S = 600.0  # at least: it writes down everything that waits
_BACKUP_TIMEOUT_S = 3_600.0  # at least: on another file system it copies the whole store

_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    # A proxy for the web has no way to a daemon on this host or in this cluster.
    ("grpc.enable_http_proxy", 0),
)


class DaemonUnavailable(DmqError):
    """No daemon answered; whether the call took effect is not known."""

    retriable = True


class ClientSilent(DaemonUnavailable):
    """A client that the daemon asked did not answer in time."""


class CallRefused(DmqError):
    """The daemon refused the call as wrong; nothing was done."""


class NotFound(CallRefused):
    """Nobody knows what the call names; nothing was done."""


class NotAllowed(CallRefused):
    """The daemon wants an access key, or another one; nothing was done."""


class CallFailed(DmqError):
    """The daemon failed at the call."""


class AdminClient:
    """A connection to one daemon; opened by the first call, closed by ``close`` or at the end of a ``with``."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        signer: Signer | None = None,
        tls: ClientTls | None = None,
        why: str = "",
    ) -> None:
        """``signer`` is for daemons that want access keys; ``why`` is kept beside what is changed.

        ``ContextError`` if a file of ``tls`` cannot be used.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._signer = signer
        self._tls = tls
        self._why = ((WHY_HEADER, quote(why)),) if why else ()
        self._channel = open_channel(address, tls, _OPTIONS)

    @classmethod
    def from_context(cls, name: str = "", *, timeout_s: float = 5.0, why: str = "") -> Self:
        """Return a client of the daemon to which a context of ``dmq context add`` leads; ``ContextError`` if none does.

        Without a name that is the one of ``DMQ_CONTEXT``, or else the current one.
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
        """Ask how the daemon is."""
        return self._call(wire.METHODS["GetStatus"], wire.GetStatusRequest(), wire.GetStatusResponse)

    def now_ms(self) -> int:
        """Return the daemon's time, or that of this host if the key may not ask for the state of the daemon."""
        try:
            return self.status().now_ms
        except NotAllowed:
            return SystemClock().now_ms()

    def topics(self) -> wire.ListTopicsResponse:
        """Ask for the topics."""
        return self._call(wire.METHODS["ListTopics"], wire.ListTopicsRequest(), wire.ListTopicsResponse)

    def message(
        self, topic: str, message_id: str = "", *, own_key: str = "", with_body: bool = False
    ) -> wire.GetMessageResponse:
        """Ask where a message is; or, without an id, for the one that waits under an own key."""
        request = wire.GetMessageRequest(topic=topic, message_id=message_id, with_body=with_body, own_key=own_key)
        return self._call(wire.METHODS["GetMessage"], request, wire.GetMessageResponse)

    def count(self, topic: str) -> wire.CountMessagesResponse:
        """Ask where the queues of a topic begin and end; raises ``NotFound``."""
        request = wire.CountMessagesRequest(topic=topic)
        return self._call(wire.METHODS["CountMessages"], request, wire.CountMessagesResponse)

    def peek(
        self, topic: str, queue_id: int, offset: int, *, limit: int, with_body: bool = False
    ) -> wire.PeekMessagesResponse:
        """Ask for messages of a queue; raises ``NotFound``."""
        request = wire.PeekMessagesRequest(
            topic=topic, queue_id=queue_id, offset=offset, limit=limit, with_body=with_body
        )
        return self._call(wire.METHODS["PeekMessages"], request, wire.PeekMessagesResponse)

    def messages(self, request: wire.ListMessagesRequest) -> wire.ListMessagesResponse:
        """Ask for a page of what a topic holds; raises ``NotFound``."""
        return self._call(wire.METHODS["ListMessages"], request, wire.ListMessagesResponse)

    def cancel(
        self,
        topic: str,
        message_ids: Sequence[str] = (),
        *,
        recall_handles: Sequence[str] = (),
        own_keys: Sequence[str] = (),
    ) -> Sequence[wire.ChangedMessage]:
        """Cancel up to 1000 delayed messages that wait; raises ``NotFound`` for a topic that nobody knows.

        Of each that is ``DONE`` it is certain, and durable, that it is never delivered. All others are as they were: it
        was ``TOO_LATE``, ``CANCELLED`` or ``REPLACED`` before, or is ``UNKNOWN``. May be repeated: the answers stay
        true. By an own key that one is meant that waits under it when it is changed. If none does, the answer names the
        last message that held the key and its end, or is ``UNKNOWN`` without an id if none is remembered.
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
        """Give up to 1000 delayed messages another delivery time, in epoch milliseconds; one that is over means now.

        As ``cancel``; recall handles stay good. ``CallRefused`` for a time beyond the longest delay that is accepted.
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
        """Deliver up to 1000 delayed messages now; as ``reschedule``."""
        request = wire.ChangeMessagesRequest(fire=True, own_keys=own_keys)
        return self._change(topic, message_ids, recall_handles, request)

    def _change(
        self, topic: str, ids: Sequence[str], handles: Sequence[str], request: wire.ChangeMessagesRequest
    ) -> Sequence[wire.ChangedMessage]:
        request.topic = topic
        request.message_ids.extend(ids)
        request.recall_handles.extend(handles)
        timeout_s = max(self._timeout_s, _CHANGE_TIMEOUT_S)
        return self._call(wire.METHODS["ChangeMessages"], request, wire.ChangeMessagesResponse, timeout_s).messages

    def groups(self, *, with_removed: bool = False) -> Sequence[wire.Group]:
        """Ask for the consumer groups, without the histogram of each; and for names only dead letters lie under."""
        request = wire.ListGroupsRequest(with_removed=with_removed)
        return self._call(wire.METHODS["ListGroups"], request, wire.ListGroupsResponse).groups

    def group(self, name: str, *, with_unread: bool = False) -> wire.Group:
        """Ask for one group; raises ``NotFound``."""
        request = wire.GetGroupRequest(group=name, with_unread=with_unread)
        return self._call(wire.METHODS["GetGroup"], request, wire.GetGroupResponse).group

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
        """Change a group, or make it; what is ``None`` or empty stays as it is. Returns the group as it is now.

        ``is_paused``: whether it gets nothing. ``deliver_rate``: how many messages a second it is handed out; 0: no
        limit. Either raises ``NotFound`` if there is no such group.
        """
        request = wire.SetGroupRequest(
            group=name,
            policy=policy,
            reset_policy=reset_policy,
            is_fifo=is_fifo,
            retries=retries,
            is_paused=is_paused,
            deliver_rate=deliver_rate,
        )
        return self._call(wire.METHODS["SetGroup"], request, wire.SetGroupResponse).group

    def topic(self, name: str) -> wire.Topic:
        """Ask for one topic, with its readers; raises ``NotFound``."""
        return self._call(wire.METHODS["GetTopic"], wire.GetTopicRequest(topic=name), wire.GetTopicResponse).topic

    def create_topic(
        self, name: str, *, queues: int = 0, type_: str = "", keep: wire.KeepChange | None = None
    ) -> wire.Topic:
        """Make a topic; without ``type_`` it takes all messages."""
        request = wire.CreateTopicRequest(topic=name, queues=queues, type=type_, keep=keep)
        return self._call(wire.METHODS["CreateTopic"], request, wire.CreateTopicResponse).topic

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
        """Change a topic; what is not given stays. Returns the topic as it is now.

        ``is_paused``: whether delayed messages that fall due stay on the timeline. ``deliver_rate``: how many of them a
        second go to its queues, the oldest first; 0: no limit. ``max_pending``: how many messages may wait for their
        time, ``max_pending_bytes``: how many bytes of them, ``send_rate``: how many messages may be sent in a second;
        0: no limit, -1: as the configuration says. Sends above a limit are refused.
        """
        request = wire.SetTopicRequest(
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
        return self._call(wire.METHODS["SetTopic"], request, wire.SetTopicResponse).topic

    def remove_topic(self, name: str, *, force: bool = False) -> None:
        """Remove a topic; may take minutes."""
        request = wire.RemoveTopicRequest(topic=name, force=force)
        self._call(wire.METHODS["RemoveTopic"], request, wire.RemoveTopicResponse, self._long_s)

    def create_group(self, name: str) -> wire.Group:
        """Make a group."""
        request = wire.CreateGroupRequest(group=name)
        return self._call(wire.METHODS["CreateGroup"], request, wire.CreateGroupResponse).group

    def remove_group(self, name: str, *, force: bool = False, with_dead_letters: bool = False) -> None:
        """Remove a group; may take minutes."""
        request = wire.RemoveGroupRequest(group=name, force=force, with_dead_letters=with_dead_letters)
        self._call(wire.METHODS["RemoveGroup"], request, wire.RemoveGroupResponse, self._long_s)

    def reset_group(self, request: wire.ResetGroupRequest) -> Sequence[int]:
        """Let a group go on from elsewhere, and return from where in each queue; may take minutes."""
        return self._call(wire.METHODS["ResetGroup"], request, wire.ResetGroupResponse, self._long_s).offsets

    def subscribe(self, group: str, topic: str) -> None:
        """Let a group read a topic from its beginning, unless it reads it already."""
        request = wire.SubscribeRequest(group=group, topic=topic)
        self._call(wire.METHODS["Subscribe"], request, wire.SubscribeResponse)

    @property
    def _long_s(self) -> float:
        return max(self._timeout_s, _REMOVAL_TIMEOUT_S)

    def retries(self, group: str, *, topic: str = "", token: str = "", limit: int = 1000) -> wire.ListRetriesResponse:
        """Ask for a page of the retries that wait."""
        request = wire.ListRetriesRequest(group=group, topic=topic, token=token, limit=limit)
        return self._call(wire.METHODS["ListRetries"], request, wire.ListRetriesResponse)

    def run_retries_now(self, group: str, entries: Sequence[str]) -> wire.RunRetriesNowResponse:
        """Make up to 1000 retries visible at once."""
        request = wire.RunRetriesNowRequest(group=group, entries=entries)
        return self._call(wire.METHODS["RunRetriesNow"], request, wire.RunRetriesNowResponse)

    def end_retries(self, group: str, entries: Sequence[str]) -> wire.EndRetriesResponse:
        """Send up to 1000 retries to the dead-letter queue."""
        request = wire.EndRetriesRequest(group=group, entries=entries)
        return self._call(wire.METHODS["EndRetries"], request, wire.EndRetriesResponse)

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
        """Ask for a page of the dead letters."""
        request = wire.ListDeadLettersRequest(
            group=group, filter=chosen, offset=offset, limit=limit, with_outcome=with_outcome, with_body=with_body
        )
        return self._call(wire.METHODS["ListDeadLetters"], request, wire.ListDeadLettersResponse)

    def start_job(self, request: wire.StartJobRequest) -> wire.Job:
        """Start a redrive or a purge; a dry run may take minutes, whatever the deadline of other calls."""
        timeout_s = max(self._timeout_s, _DRY_RUN_TIMEOUT_S) if request.is_dry_run else self._timeout_s
        return self._call(wire.METHODS["StartJob"], request, wire.StartJobResponse, timeout_s).job

    def jobs(self, group: str = "") -> Sequence[wire.Job]:
        """Ask for the newest jobs of a group, or of all."""
        return self._call(wire.METHODS["ListJobs"], wire.ListJobsRequest(group=group), wire.ListJobsResponse).jobs

    def stop_job(self, job_id: int) -> wire.Job:
        """End a running job where it is; raises ``NotFound``."""
        return self._call(wire.METHODS["StopJob"], wire.StopJobRequest(job_id=job_id), wire.StopJobResponse).job

    def take_snapshot(self) -> wire.TakeSnapshotResponse:
        """Have the daemon write what its store holds into the audit trail; may take minutes."""
        timeout_s = max(self._timeout_s, _SNAPSHOT_TIMEOUT_S)
        return self._call(
            wire.METHODS["TakeSnapshot"], wire.TakeSnapshotRequest(), wire.TakeSnapshotResponse, timeout_s
        )

    def clock(self) -> wire.GetClockResponse:
        """Ask how the clock of the daemon's host is."""
        return self._call(wire.METHODS["GetClock"], wire.GetClockRequest(), wire.GetClockResponse)

    def accept_clock(self, why: str) -> wire.AcceptClockResponse:
        """Say that the clock of the daemon's host is right."""
        request = wire.AcceptClockRequest(why=why)
        return self._call(wire.METHODS["AcceptClock"], request, wire.AcceptClockResponse)

    def back_up(self, folder: str) -> wire.BackUpStoreResponse:
        """Have the daemon copy its store into a folder of its machine, an absolute path; may take minutes."""
        timeout_s = max(self._timeout_s, _BACKUP_TIMEOUT_S)
        request = wire.BackUpStoreRequest(folder=folder)
        return self._call(wire.METHODS["BackUpStore"], request, wire.BackUpStoreResponse, timeout_s)

    def clients(self, group: str = "") -> Sequence[wire.Client]:
        """Ask for the clients of a group, or all."""
        request = wire.ListClientsRequest(group=group)
        return self._call(wire.METHODS["ListClients"], request, wire.ListClientsResponse).clients

    def client_stack(self, client_id: str) -> str:
        """Ask a client what its threads do; raises ``NotFound`` and ``ClientSilent``."""
        request = wire.GetClientStackRequest(client_id=client_id, timeout_ms=self._client_ms)
        timeout_s = self._timeout_s + _ON_THE_WAY_S
        return self._call(wire.METHODS["GetClientStack"], request, wire.GetClientStackResponse, timeout_s).stack

    def verify(self, client_id: str, topic: str, message_id: str) -> wire.VerifyClientMessageResponse:
        """Have a push consumer consume a message once; raises ``NotFound`` and ``ClientSilent``."""
        request = wire.VerifyClientMessageRequest(
            client_id=client_id, topic=topic, message_id=message_id, timeout_ms=self._client_ms
        )
        timeout_s = self._timeout_s + _ON_THE_WAY_S
        return self._call(wire.METHODS["VerifyClientMessage"], request, wire.VerifyClientMessageResponse, timeout_s)

    @property
    def _client_ms(self) -> int:
        """How long a client that is asked may take."""
        return max(1, min(int(self._timeout_s * 1000), CLIENT_MS_MAX))

    def send(self, message: public.Message) -> public.SendMessageResponse:
        """Send through the public protocol, as any client does. A refusal is in the response's status."""
        request = public.SendMessageRequest(messages=[message])
        return self._call(public.METHODS["SendMessage"], request, public.SendMessageResponse)

    def recall(self, topic: str, handle: str) -> public.RecallMessageResponse:
        """Recall a message through the public protocol, as any client does. A refusal is in the response's status."""
        request = public.RecallMessageRequest(topic=public.Resource(name=topic), recall_handle=handle)
        return self._call(public.METHODS["RecallMessage"], request, public.RecallMessageResponse)

    def quotas(self) -> Sequence[wire.Quota]:
        """Ask what keys and addresses have and may have."""
        return self._call(wire.METHODS["ListQuotas"], wire.ListQuotasRequest(), wire.ListQuotasResponse).quotas

    def set_quota(self, kind: str, name: str, quota: str, limit: int | None) -> wire.Quota:
        """Limit a key or an address; None: back to the default."""
        request = wire.SetQuotaRequest(kind=kind, name=name, quota=quota)
        if limit is not None:
            request.limit = limit
        return self._call(wire.METHODS["SetQuota"], request, wire.SetQuotaResponse).quota

    def replay(self, request: wire.ReplayMessagesRequest) -> Sequence[wire.Replayed]:
        """Give the daemon messages of the inner topic once more; what became of each, in order."""
        return self._call(wire.METHODS["ReplayMessages"], request, wire.ReplayMessagesResponse).results

    def add_schedule(self, schedule: wire.Schedule, *, replace: bool = False) -> wire.AddScheduleResponse:
        """Make a message recur. One of this name with the same content stays as it is, and is the answer.

        ``CallRefused`` for what cannot be, and for another content under a name that is taken unless ``replace``.
        """
        request = wire.AddScheduleRequest(schedule=schedule, replace=replace)
        return self._call(wire.METHODS["AddSchedule"], request, wire.AddScheduleResponse)

    def schedules(self, *, topic: str = "", token: str = "", limit: int = 1000) -> wire.ListSchedulesResponse:
        """Ask for a page of schedules, by name."""
        request = wire.ListSchedulesRequest(topic=topic, token=token, limit=limit)
        return self._call(wire.METHODS["ListSchedules"], request, wire.ListSchedulesResponse)

    def schedule(self, name: str, *, with_body: bool = False) -> wire.Schedule:
        """Ask for one schedule; raises ``NotFound``."""
        request = wire.GetScheduleRequest(name=name, with_body=with_body)
        return self._call(wire.METHODS["GetSchedule"], request, wire.GetScheduleResponse).schedule

    def pause_schedule(self, name: str) -> wire.Schedule:
        """Have a schedule send nothing until it is resumed; raises ``NotFound``."""
        request = wire.PauseScheduleRequest(name=name)
        return self._call(wire.METHODS["PauseSchedule"], request, wire.PauseScheduleResponse).schedule

    def resume_schedule(self, name: str) -> wire.Schedule:
        """Have a schedule go on from now; raises ``NotFound``."""
        request = wire.ResumeScheduleRequest(name=name)
        return self._call(wire.METHODS["ResumeSchedule"], request, wire.ResumeScheduleResponse).schedule

    def remove_schedule(self, name: str) -> wire.Schedule:
        """Remove a schedule, and return it as it was; raises ``NotFound``."""
        request = wire.RemoveScheduleRequest(name=name)
        return self._call(wire.METHODS["RemoveSchedule"], request, wire.RemoveScheduleResponse).schedule

    def activity(
        self, *, since_ms: int = 0, key: str = "", before: int = 0, limit: int = 1000
    ) -> wire.ListActivityResponse:
        """Ask for a page of what operators changed, the newest first."""
        request = wire.ListActivityRequest(since_ms=since_ms, key=key, before=before, limit=limit)
        return self._call(wire.METHODS["ListActivity"], request, wire.ListActivityResponse)

    def ledger(self, topic: str = "", *, with_groups: bool = False) -> wire.GetLedgerResponse:
        """Ask where every message is; raises ``NotFound`` for a topic that nobody knows."""
        request = wire.GetLedgerRequest(topic=topic, with_groups=with_groups)
        return self._call(wire.METHODS["GetLedger"], request, wire.GetLedgerResponse)

    def verify_ledger(self, number: int = 0) -> wire.VerifyLedgerResponse:
        """Have the ledger compared with the rows of the store, or ask how that goes."""
        request = wire.VerifyLedgerRequest(number=number)
        return self._call(wire.METHODS["VerifyLedger"], request, wire.VerifyLedgerResponse)

    def _call(
        self, method: Method, request: Message, response_class: type[_Response], timeout_s: float | None = None
    ) -> _Response:
        assert issubclass(method.response_class, response_class)
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request_class.SerializeToString,
            response_deserializer=method.response_class.FromString,
        )
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            signed = self._signer.metadata() if self._signer is not None else ()
            return call(request, timeout=timeout_s, metadata=(*_metadata(), *signed, *self._why))
        except grpc.RpcError as error:
            # its own text is ten lines of debug output
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
                return CallFailed(f"what answers at {self._address} is no Rock-DMQ daemon, or one of another version")
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
    # The public protocol refuses calls without these.
    client_id = f"{socket.gethostname()}@{os.getpid()}@dmq-{secrets.token_hex(4)}"
    return (
        ("x-mq-client-id", client_id),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-client-version", "5.0.0"),
    )
