"""The admin service behind access keys: an admin key may call everything, another one what its rules allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import Message

from dmq.acl.gate import Entrance
from dmq.acl.guard import Guard
from dmq.acl.rules import ADMIN, ADMIN_KEY, ANY, GROUP, PUB, TOPIC, AccessKey, Need
from dmq.acl.signature import Header
from dmq.admin import admin_v1 as wire

_REQUEST_MAX: Mapping[str, int] = MappingProxyType({"ReplayMessages": 16 * 1024 * 1024, "AddSchedule": 8 * 1024 * 1024})
_REQUEST_MAX_OTHERS: Final = 4 * 1024 * 1024  # filters and pages: they carry no message

Admit = Callable[[Header, Message], object]


def _of_group(request: Any) -> Iterable[Need]:  # noqa: ANN401 - requests of several RPCs
    return (Need(ADMIN, GROUP, request.group),)


def _of_topic(request: Any) -> Iterable[Need]:  # noqa: ANN401 - as above
    """Who may send to a topic may take back what was sent, and say when it comes."""
    return (Need(PUB, TOPIC, request.topic),)


def _of_job(request: wire.StartJobRequest) -> Iterable[Need]:
    """A redrive goes back to its group; sent to another topic, it is a send. Other groups are for operators."""
    if request.all_groups:
        return (ADMIN_KEY,)
    needs = _of_group(request)
    return (*needs, Need(PUB, TOPIC, request.to_topic)) if request.to_topic else needs


def _of_jobs(request: wire.ListJobsRequest) -> Iterable[Need]:
    return _of_group(request) if request.group else (ADMIN_KEY,)


# Those that can be about one group, or one topic. Every other RPC takes an admin key.
NEEDS: Mapping[str, Callable[[Any], Iterable[Need]]] = MappingProxyType(
    {
        "GetGroup": _of_group,
        "SetGroup": _of_group,
        "ListRetries": _of_group,
        "RunRetriesNow": _of_group,
        "EndRetries": _of_group,
        "ListDeadLetters": _of_group,
        "StartJob": _of_job,
        "ListJobs": _of_jobs,
        "ChangeMessages": _of_topic,
    }
)
OF_TOPIC: Final = frozenset({"ChangeMessages"})


def entrances() -> dict[str, Entrance]:
    """Return what the headers of each RPC decide, by path."""
    return {
        method.path: Entrance(
            rpc=rpc,
            request_max=_REQUEST_MAX.get(rpc, _REQUEST_MAX_OTHERS),
            lacks=_lacking(rpc),
            is_operators=True,
        )
        for rpc, method in wire.METHODS.items()
    }


def _lacking(rpc: str) -> Callable[[AccessKey], Need | None]:
    need = Need(ADMIN, GROUP, ANY) if rpc in NEEDS else ADMIN_KEY
    if rpc in OF_TOPIC:
        need = Need(PUB, TOPIC, ANY)
    return lambda key: key.lacks(need)


def admitting(path: str, guard: Guard | None) -> Admit:
    """Return what lets a call of the RPC at ``path`` through, or raises; without a guard it lets all through."""
    if guard is None:
        return _admit_all
    rpc = path.rpartition("/")[2]
    needs, admit = NEEDS.get(rpc, _of_operator), guard.admit

    def admit_needed(header: Header, request: Message) -> None:
        admit(rpc, header, needs(request))

    return admit_needed


def _of_operator(_: Message) -> Iterable[Need]:
    return (ADMIN_KEY,)


def _admit_all(_: Header, __: Message) -> None:
    return None
