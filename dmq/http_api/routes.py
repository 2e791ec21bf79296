"""One declaration per route. The validation, the call and the OpenAPI document follow from it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message
from pydantic import TypeAdapter

from broker_adapter.contracts.errors import Rule
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire.plain import to_plain
from dmq.admin import admin_v1 as wire
from dmq.http_api.callers import Metadata
from dmq.http_api.daemon import DaemonChannel
from dmq.http_api.problems import of_rule
from dmq.http_api.schemas import Query, Request, answer_schema, is_repeated, model_of, request_fields
from dmq.http_api.sending import MESSAGES, SENT, send

_NAME: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
_WITH_BODY: Final = frozenset(("POST", "PUT", "PATCH"))

Answer = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A validated request: the parameters of path and query, and the body."""

    caller: Metadata
    parameters: Mapping[str, Any]
    body: Any = None
    traceparent: str = ""  # header of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRoute:
    """A method of a path. ``body`` is None if the request has none; ``schema`` describes the answer."""

    method: str
    path: str
    summary: str
    call: Callable[[DaemonChannel, Given, Clock], Awaitable[Answer]]
    schema: Callable[[dict[str, Any]], Mapping[str, Any]]
    path_model: type[Request]
    query: type[Request] | None = None
    body: TypeAdapter[Any] | None = None
    repeated: Collection[str] = ()  # query parameters that may be repeated
    status: int = 200

    @property
    def shown_path(self) -> str:
        """The path as in the OpenAPI document."""
        return _NAME.sub(r"{\1}", self.path)

    @property
    def tag(self) -> str:
        """The kind of object that the path is about."""
        return next(each for each in ("messages", "dead-letters", *self.path.split("/")[2:]) if each in self.path)


def _rpc(
    method: str,
    path: str,
    rpc: str,
    summary: str,
    *,
    without: Collection[str] = (),
    required: Collection[str] = (),
    check: Callable[[Any], None] | None = None,
    **fixed: object,
) -> ApiRoute:
    """Return the route of an RPC of ``rockdmq.admin.v1``.

    Parameters of the path are fields of the request. ``fixed`` sets further fields. All others are in the query or in
    the body, without those in ``without``. ``check`` raises a ``Problem`` for some answers.
    """
    call = wire.METHODS[rpc]
    request: Any = call.request_class.DESCRIPTOR
    answered: Any = call.response_class.DESCRIPTOR
    in_path = _NAME.findall(path)
    rest = {*in_path, *fixed, *without}
    has_body = method in _WITH_BODY
    name = "".join(each.capitalize() for each in re.findall(r"\w+", path.removeprefix("/v1"))) + method.capitalize()
    model = model_of(request, name=name, without=rest, required=required, is_query=not has_body)

    async def answer(daemon: DaemonChannel, given: Given, _: Clock) -> Answer:
        values = request_fields(request, given.parameters) | (given.body.given() if has_body else {})
        response: Message = await daemon.call(call, call.request_class(**values, **fixed), given.caller)
        if check is not None:
            check(response)
        return to_plain(response)

    others = [each.name for each in request.fields if each.name not in in_path]
    return ApiRoute(
        method=method,
        path=path,
        summary=summary,
        call=answer,
        schema=lambda components: answer_schema(answered, components),
        path_model=model_of(request, name=f"{name}Path", without=others, required=in_path, is_query=True),
        query=None if has_body else model,
        body=TypeAdapter(model) if has_body else None,
        repeated=[each for each in model.model_fields if is_repeated(request, each)],
    )


def _must_be_known(response: wire.GetMessageResponse) -> None:
    if response.state == wire.UNKNOWN:
        raise of_rule(Rule.NOT_FOUND, "the message was never sent to this topic, or forgotten since")


async def _send(daemon: DaemonChannel, given: Given, clock: Clock) -> Answer:
    return await send(daemon, given.caller, given.parameters["topic"], given.body, clock, given.traceparent)


class MessagesPostPath(Query):
    """Path of a send."""

    topic: str


_TOPIC: Final = "/v1/topics/{topic}"
_MESSAGES: Final = f"{_TOPIC}/messages"
_GROUP: Final = "/v1/groups/{group}"
_LETTERS: Final = f"{_GROUP}/dead-letters"
_SCHEDULE: Final = "/v1/schedules/{name}"
_OTHER_CHANGES: Final = ("cancel", "fire", "deliver_at_ms")

_SEND: Final = ApiRoute(
    method="POST",
    path=_MESSAGES,
    summary="Send one message, or an array of messages as a whole",
    call=_send,
    schema=lambda _: SENT,
    path_model=MessagesPostPath,
    body=MESSAGES,
    status=201,
)

ROUTES: Final[Sequence[ApiRoute]] = (
    _SEND,
    _rpc("GET", _MESSAGES, "ListMessages", "List queued and pending messages"),
    _rpc(
        "GET",
        f"{_MESSAGES}/{{message_id:path}}",
        "GetMessage",
        "Show a message, and its state in each group",
        without=("own_key",),
        check=_must_be_known,
    ),
    _rpc(
        "GET",
        f"{_TOPIC}/own-keys/{{own_key:path}}",
        "GetMessage",
        "Show the pending message with an own key",
        without=("message_id",),
        check=_must_be_known,
    ),
    _rpc(
        "GET",
        f"{_TOPIC}/indexed-messages",
        "FindMessages",
        "Find messages by a value of an indexed user property",
        required=("property", "value"),
    ),
    _rpc(
        "POST", f"{_MESSAGES}/cancel", "ChangeMessages", "Cancel delayed messages", without=_OTHER_CHANGES, cancel=True
    ),
    _rpc(
        "POST",
        f"{_MESSAGES}/reschedule",
        "ChangeMessages",
        "Change the delivery time of delayed messages",
        without=("cancel", "fire"),
        required=("deliver_at_ms",),
    ),
    _rpc(
        "POST", f"{_MESSAGES}/fire", "ChangeMessages", "Deliver delayed messages now", without=_OTHER_CHANGES, fire=True
    ),
    _rpc(
        "POST",
        f"{_TOPIC}/message-jobs",
        "StartMessageJob",
        "Change all pending messages that match a query, or count them (is_dry_run)",
    ),
    _rpc("GET", "/v1/message-jobs", "ListMessageJobs", "List bulk changes of pending messages, newest first"),
    _rpc(
        "GET",
        "/v1/message-jobs/{job_id}/outcomes",
        "ListMessageJobOutcomes",
        "List the messages of a bulk change with their outcomes",
    ),
    _rpc("POST", "/v1/message-jobs/{job_id}/stop", "StopMessageJob", "Stop a bulk change"),
    _rpc("POST", "/v1/message-jobs/{job_id}/resume", "ResumeMessageJob", "Resume a stopped bulk change"),
    _rpc("GET", _LETTERS, "ListDeadLetters", "List dead letters"),
    _rpc(
        "POST",
        f"{_LETTERS}/redrive",
        "StartJob",
        "Send dead letters again, all of the group without a filter",
        without=("why",),
        kind=wire.REDRIVE,
    ),
    _rpc(
        "POST",
        f"{_LETTERS}/purge",
        "StartJob",
        "Give dead letters up, all of the group without a filter",
        without=("to_topic", "all_groups"),
        required=("why",),
        kind=wire.PURGE,
    ),
    _rpc("GET", "/v1/dead-letter-jobs", "ListJobs", "List redrives and purges, newest first"),
    _rpc("POST", "/v1/dead-letter-jobs/{job_id}/stop", "StopJob", "Stop a redrive or a purge"),
    _rpc("POST", "/v1/dead-letter-jobs/{job_id}/resume", "ResumeJob", "Resume a stopped redrive or purge"),
    _rpc("GET", f"{_GROUP}/retries", "ListRetries", "List pending retries"),
    _rpc("POST", f"{_GROUP}/retries/run-now", "RunRetriesNow", "Start the next attempt of retries now"),
    _rpc("POST", f"{_GROUP}/retries/end", "EndRetries", "Make dead letters of retries"),
    _rpc("GET", "/v1/topics", "ListTopics", "List topics"),
    _rpc("POST", "/v1/topics", "CreateTopic", "Create a topic", required=("topic",)),
    _rpc("GET", _TOPIC, "GetTopic", "Show a topic, and the groups that read it"),
    _rpc("PATCH", _TOPIC, "SetTopic", "Change, pause or resume a topic"),
    _rpc("DELETE", _TOPIC, "RemoveTopic", "Remove a topic"),
    _rpc("GET", "/v1/groups", "ListGroups", "List consumer groups"),
    _rpc("POST", "/v1/groups", "CreateGroup", "Create a consumer group", required=("group",)),
    _rpc("GET", _GROUP, "GetGroup", "Show a consumer group and its lag"),
    _rpc("PATCH", _GROUP, "SetGroup", "Change, pause or resume a consumer group"),
    _rpc("DELETE", _GROUP, "RemoveGroup", "Remove a consumer group"),
    _rpc("POST", f"{_GROUP}/reset", "ResetGroup", "Move the position of a group in a topic", required=("topic",)),
    _rpc("GET", "/v1/schedules", "ListSchedules", "List schedules"),
    _rpc("POST", "/v1/schedules", "AddSchedule", "Add or replace a schedule", required=("schedule",)),
    _rpc("GET", _SCHEDULE, "GetSchedule", "Show a schedule and its next occurrences"),
    _rpc("DELETE", _SCHEDULE, "RemoveSchedule", "Remove a schedule"),
    _rpc("POST", f"{_SCHEDULE}/pause", "PauseSchedule", "Pause a schedule"),
    _rpc("POST", f"{_SCHEDULE}/resume", "ResumeSchedule", "Resume a schedule from now"),
    _rpc("GET", "/v1/ledger", "GetLedger", "Show message counts by state, and their differences"),
    _rpc("GET", "/v1/activity", "ListActivity", "List the changes by operators, newest first"),
    _rpc("GET", "/v1/audit", "GetAudit", "Show the newest audit report, and the audit that was started last"),
    _rpc("POST", "/v1/audit/runs", "StartAudit", "Start an audit of the trail"),
    _rpc("GET", "/v1/status", "GetStatus", "Show the state of the daemon"),
)
