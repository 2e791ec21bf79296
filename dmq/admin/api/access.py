"""Access table of the admin API: for each call the rights that a key needs to read, to change, or that refuse it.

An admin key may call everything. A viewer may read everything, and message bodies with ``bodies = true``. An operator
may read the same, and also change the topics and groups that its rules grant. Any other key may read the topics that it
may send to or consume, and manage the groups on which it has ``ADMIN``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from dmq.acl.gate import Entrance
from dmq.acl.rules import ADMIN, ADMIN_KEY, ANY, BODIES, GROUP, OPERATE, PUB, SUB, TOPIC, VIEWER, AccessKey, Need
from dmq.admin import admin_v1 as wire

_REQUEST_MAX: Mapping[str, int] = MappingProxyType({"ReplayMessages": 16 * 1024 * 1024, "AddSchedule": 8 * 1024 * 1024})
_REQUEST_MAX_OTHERS: Final = 4 * 1024 * 1024  # filters and pages, without messages

_ANY_OF_TOPIC: Final = f"{PUB}|{SUB}|{ADMIN}"
_VIEW: Final = Need("", role=VIEWER)


class Access(NamedTuple):
    """Rights that a call needs, and whether it changes anything. Calls with changes are recorded.

    ``at_all`` is the rule that a key needs for any request of the RPC; ``needs`` returns the rules for one request. If
    the rules depend on the schedule or the job that a request names, ``of_schedule`` and ``of_job`` return them.
    """

    needs: Callable[[Any], Iterable[Need]]
    at_all: Need = ADMIN_KEY
    changes: Callable[[Any], bool] = lambda _: False
    of_schedule: Callable[[str, Any], Need] | None = None  # by the topic of the schedule
    of_job: Callable[[str, Any], Need] | None = None  # by the group of the job


def _changes(_: object) -> bool:
    return True


def _unless_dry(request: Any) -> bool:  # noqa: ANN401 - requests of several RPCs, here and below
    return not request.is_dry_run


def _look_at(topic: str) -> Need:
    return Need(_ANY_OF_TOPIC, TOPIC, topic, VIEWER)


def _body_of(topic: str) -> Need:
    return Need(SUB, TOPIC, topic, BODIES)


def _look_at_topic(request: Any) -> Iterable[Need]:  # noqa: ANN401
    return (_body_of(request.topic),) if getattr(request, "with_body", False) else (_look_at(request.topic),)


def _look_at_topic_or_all(request: Any) -> Iterable[Need]:  # noqa: ANN401
    return (_look_at(request.topic),) if request.topic else (_VIEW,)


def _look_at_group(request: Any) -> Iterable[Need]:  # noqa: ANN401
    role = BODIES if getattr(request, "with_body", False) else VIEWER
    return (Need(ADMIN, GROUP, request.group, role),)


def _look_at_jobs(request: wire.ListJobsRequest) -> Iterable[Need]:
    return _look_at_group(request) if request.group else (_VIEW,)


def _look_after_group(request: Any) -> Iterable[Need]:  # noqa: ANN401
    return (Need(ADMIN, GROUP, request.group),)


def _start_job(request: wire.StartJobRequest) -> Iterable[Need]:
    """Return the needs of a job. A redrive returns to its group; a redrive to another topic is a send.

    Other groups are for admins.
    """
    if request.all_groups:
        return (_VIEW if request.is_dry_run else ADMIN_KEY,)
    needs = (Need(ADMIN, GROUP, request.group, VIEWER) if request.is_dry_run else Need(ADMIN, GROUP, request.group),)
    return (*needs, Need(PUB, TOPIC, request.to_topic)) if request.to_topic and not request.is_dry_run else needs


def _subscribe(request: wire.SubscribeRequest) -> Iterable[Need]:
    return Need(ADMIN, GROUP, request.group), Need(SUB, TOPIC, request.topic)


def _change_messages(request: wire.ChangeMessagesRequest) -> Iterable[Need]:
    """Return the needs of a change: a key that may send to a topic may also cancel and reschedule its messages."""
    return (Need(f"{PUB}|{OPERATE}", TOPIC, request.topic),)


def _operate(kind: str) -> Callable[[Any], Iterable[Need]]:
    return lambda request: (Need(OPERATE, kind, getattr(request, kind)),)


def _view(_: object) -> Iterable[Need]:
    return (_VIEW,)


def _admin(_: object) -> Iterable[Need]:
    return (ADMIN_KEY,)


def _nothing(_: object) -> Iterable[Need]:
    return ()


def _verify_ledger(request: wire.VerifyLedgerRequest) -> Iterable[Need]:
    """Return the needs of a verification. A viewer may watch one; starting one reads the whole store and needs more."""
    return (_VIEW if request.number else ADMIN_KEY,)


_FOR_VIEWERS: Final = Access(_view, _VIEW)
_OF_TOPIC: Final = Access(_look_at_topic, Need(_ANY_OF_TOPIC, TOPIC, ANY, VIEWER))
_OF_TOPIC_OR_ALL: Final = Access(_look_at_topic_or_all, _OF_TOPIC.at_all)
_OF_GROUP: Final = Access(_look_at_group, Need(ADMIN, GROUP, ANY, VIEWER))
_AFTER_GROUP: Final = Access(_look_after_group, Need(ADMIN, GROUP, ANY), _changes)
_ON_TOPIC: Final = Access(_operate(TOPIC), Need(OPERATE, TOPIC, ANY), _changes)
_ON_GROUP: Final = Access(_operate(GROUP), Need(OPERATE, GROUP, ANY), _changes)
_ON_SCHEDULE: Final = Access(
    _nothing, _ON_TOPIC.at_all, _changes, of_schedule=lambda topic, _: Need(OPERATE, TOPIC, topic)
)
_FOR_ADMINS: Final = Access(_admin, ADMIN_KEY, _changes)

# Every RPC. One that is missing here cannot be served, and a test fails.
RPCS: Mapping[str, Access] = MappingProxyType(
    {
        "GetStatus": _FOR_VIEWERS,
        "GetClock": _FOR_VIEWERS,
        "ListGroups": _FOR_VIEWERS,
        "ListClients": _FOR_VIEWERS,
        "GetClientStack": _FOR_VIEWERS,
        "ListQuotas": _FOR_VIEWERS,
        "ListActivity": _FOR_VIEWERS,
        "VerifyLedger": Access(_verify_ledger, _VIEW),
        "ListTopics": Access(_nothing, _OF_TOPIC.at_all),  # the answer contains only topics that the key may read
        "GetTopic": _OF_TOPIC,
        "GetMessage": _OF_TOPIC,
        "CountMessages": _OF_TOPIC,
        "PeekMessages": _OF_TOPIC,
        "ListMessages": _OF_TOPIC,
        "GetLedger": _OF_TOPIC_OR_ALL,
        "ListSchedules": _OF_TOPIC_OR_ALL,
        "GetSchedule": Access(
            _nothing,
            _OF_TOPIC.at_all,
            of_schedule=lambda topic, request: _body_of(topic) if request.with_body else _look_at(topic),
        ),
        "GetGroup": _OF_GROUP,
        "ListRetries": _OF_GROUP,
        "ListDeadLetters": _OF_GROUP,
        "ListJobs": Access(_look_at_jobs, _OF_GROUP.at_all),
        "SetGroup": _AFTER_GROUP,
        "RunRetriesNow": _AFTER_GROUP,
        "EndRetries": _AFTER_GROUP,
        "StartJob": Access(_start_job, _OF_GROUP.at_all, _unless_dry),
        "StopJob": Access(_nothing, _AFTER_GROUP.at_all, _changes, of_job=lambda group, _: Need(ADMIN, GROUP, group)),
        "Subscribe": Access(_subscribe, _AFTER_GROUP.at_all),  # like a receive, which is not recorded either
        "CreateGroup": _ON_GROUP,
        "RemoveGroup": _ON_GROUP,
        "ResetGroup": _ON_GROUP,
        "CreateTopic": _ON_TOPIC,
        "SetTopic": _ON_TOPIC,
        "RemoveTopic": _ON_TOPIC,
        "ChangeMessages": Access(_change_messages, Need(f"{PUB}|{OPERATE}", TOPIC, ANY), _changes),
        "AddSchedule": _ON_SCHEDULE._replace(needs=lambda request: (Need(OPERATE, TOPIC, request.schedule.topic),)),
        "PauseSchedule": _ON_SCHEDULE,
        "ResumeSchedule": _ON_SCHEDULE,
        "RemoveSchedule": _ON_SCHEDULE,
        "SetQuota": _FOR_ADMINS,
        "AcceptClock": _FOR_ADMINS,
        "TakeSnapshot": Access(_admin, ADMIN_KEY),  # an event per snapshot would itself change the next snapshot
        "BackUpStore": _FOR_ADMINS,
        "VerifyClientMessage": _FOR_ADMINS,
        "ReplayMessages": _FOR_ADMINS._replace(changes=_unless_dry),
    }
)


def may_look_at(key: AccessKey, topic: str) -> bool:
    """Return True if the key may read the topic."""
    return key.may(_look_at(topic))


def entrances() -> dict[str, Entrance]:
    """Return the checks that the headers of each RPC allow, by path."""
    return {
        method.path: Entrance(
            rpc=rpc,
            request_max=_REQUEST_MAX.get(rpc, _REQUEST_MAX_OTHERS),
            lacks=lacking(rpc),
            is_operators=True,
        )
        for rpc, method in wire.METHODS.items()
    }


def lacking(rpc: str) -> Callable[[AccessKey], Need | None]:
    """Return a function that returns the rule that a key lacks for any request of the RPC, or None."""
    need = RPCS[rpc].at_all
    return lambda key: key.lacks(need)
