"""Access to the admin API, from the options of each RPC in ``admin_v1.proto``.

An admin key may call everything. A viewer may read everything, and message bodies with ``bodies = true``. An operator
may read the same, and also change the topics and groups that its rules grant. Any other key may read the topics that it
may send to or consume, and manage the groups on which it has ``ADMIN``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from broker_adapter.wire.pool import option
from dmq.acl.gate import Entrance
from dmq.acl.rules import (
    ADMIN,
    ADMIN_KEY,
    ADMINISTRATOR,
    ANY,
    BODIES,
    GROUP,
    OPERATE,
    OPERATOR,
    PUB,
    SUB,
    TOPIC,
    VIEWER,
    AccessKey,
    Need,
)
from dmq.admin import admin_v1 as wire

_MIB: Final = 1024 * 1024
_REQUEST_MIB_MAX: Final = 4  # filters and pages, without messages
_VIEW: Final = Need("", role=VIEWER)
_MANAGE_GROUP: Final = Need(ADMIN, GROUP, ANY)

# What each right means on any topic or group.
_NEEDS: Mapping[int, Need] = MappingProxyType(
    {
        wire.Access.ADMINISTER: ADMIN_KEY,
        wire.Access.VIEW: _VIEW,
        wire.Access.READ_TOPIC: Need(f"{PUB}|{SUB}|{ADMIN}", TOPIC, ANY, VIEWER),
        wire.Access.CONSUME_TOPIC: Need(SUB, TOPIC, ANY),
        wire.Access.OPERATE_TOPIC: Need(OPERATE, TOPIC, ANY),
        # A key that may send to a topic may also cancel and reschedule its messages.
        wire.Access.CHANGE_MESSAGES: Need(f"{PUB}|{OPERATE}", TOPIC, ANY),
        wire.Access.READ_GROUP: Need(ADMIN, GROUP, ANY, VIEWER),
        wire.Access.MANAGE_GROUP: _MANAGE_GROUP,
        wire.Access.OPERATE_GROUP: Need(OPERATE, GROUP, ANY),
        wire.Access.OPERATE: Need("", role=OPERATOR),
    }
)
_BODIES: Mapping[str, Need] = MappingProxyType(
    {TOPIC: Need(SUB, TOPIC, ANY, BODIES), GROUP: Need(ADMIN, GROUP, ANY, BODIES)}
)
_OR_ALL: Final = frozenset({wire.Access.TOPIC_OR_ALL, wire.Access.GROUP_OR_ALL})
_FOUND: Final = frozenset({wire.Access.SCHEDULE, wire.Access.JOB, wire.Access.MESSAGE_JOB})
_FOUND_TOPIC: Final = frozenset({wire.Access.SCHEDULE, wire.Access.MESSAGE_JOB})


class Access(NamedTuple):
    """Access to one RPC. Calls that change something are recorded."""

    rights: Sequence[wire.Access]
    is_recorded: bool
    request_bytes_max: int

    @property
    def at_all(self) -> Need:
        """The right that a key needs for any request."""
        return _NEEDS[self.rights[0].right]

    @property
    def scopes(self) -> frozenset[int]:
        """Scopes of its rights."""
        return frozenset(right.scope for right in self.rights)

    def changes(self, request: Any) -> bool:  # noqa: ANN401 - requests of several RPCs, here and below
        """Return True if the request changes something."""
        return self.is_recorded and not getattr(request, "is_dry_run", False)

    def needs(self, request: Any, found: str = "") -> Iterable[Need]:  # noqa: ANN401
        """Return the rights for a request. ``found`` is the topic or group of its schedule or job."""
        if isinstance(request, wire.StartJobRequest) and (request.all_groups or not request.is_dry_run):
            return _needs_of_job(request)
        if isinstance(request, wire.VerifyLedgerRequest) and not request.number:  # it reads the whole store
            return (ADMIN_KEY,)
        needs = [need for right in self.rights if (need := _need(right, request, found)) is not None]
        return [*needs, ADMIN_KEY] if getattr(request, "unmasked", False) else needs


def _need(right: wire.Access, request: Any, found: str) -> Need | None:  # noqa: ANN401
    need = _NEEDS[right.right]
    if not need.kind:
        return need
    if right.scope == wire.Access.ANSWER or (right.scope in _FOUND and not found):
        return None
    name = found if right.scope in _FOUND else getattr(getattr(request, "schedule", request), need.kind)
    if not name and right.scope in _OR_ALL:
        return _VIEW
    return (_BODIES[need.kind] if getattr(request, "with_body", False) else need)._replace(name=name)


def _needs_of_job(request: wire.StartJobRequest) -> Iterable[Need]:
    """Return the needs of a redrive to other groups, which is for admins; of one to another topic, which is a send;
    and of all other jobs.
    """
    if request.all_groups:
        return (_VIEW if request.is_dry_run else ADMIN_KEY,)
    needs = (_MANAGE_GROUP._replace(name=request.group),)
    return (*needs, Need(PUB, TOPIC, request.to_topic)) if request.to_topic else needs


RPCS: Mapping[str, Access] = MappingProxyType(
    {
        rpc: Access(
            option(method, wire.access),
            option(method, wire.is_recorded),
            (option(method, wire.request_mib_max) or _REQUEST_MIB_MAX) * _MIB,
        )
        for rpc, method in wire.METHODS.items()
    }
)


def answer_for(key: AccessKey, request: Any, response: Message) -> Message:  # noqa: ANN401
    """Return the response without the parts that the key may not see."""
    if isinstance(response, wire.ListTopicsResponse):
        shown = [each for each in response.topics if _may_read(key, each.name)]
        return wire.ListTopicsResponse(topics=shown, next_token=response.next_token)
    if isinstance(response, wire.GetAccessResponse):
        rpcs = [rpc for rpc in response.rpcs if _may_call(key, rpc, request)]
        return wire.GetAccessResponse(key=key.name, role=ADMINISTRATOR if key.is_admin else key.role, rpcs=rpcs)
    return response


def _may_read(key: AccessKey, topic: str) -> bool:
    return key.may(_NEEDS[wire.Access.READ_TOPIC]._replace(name=topic))


def _may_call(key: AccessKey, rpc: str, subject: wire.GetAccessRequest) -> bool:
    """Return True if the key may make a call about a topic and a group; about any of its rules if they are empty."""
    access, example = RPCS[rpc], wire.METHODS[rpc].request_class()
    for kind in (TOPIC, GROUP):
        named = getattr(example, "schedule", example)
        if hasattr(named, kind):
            setattr(named, kind, getattr(subject, kind))
    found = (subject.topic if access.scopes & _FOUND_TOPIC else subject.group) or ANY
    return all(
        key.lacks(need) is None if need.name in {"", ANY} else key.may(need) for need in access.needs(example, found)
    )


def entrances() -> dict[str, Entrance]:
    """Return the checks that the headers of each RPC allow, by path."""
    return {
        method.path: Entrance(rpc=rpc, request_max=RPCS[rpc].request_bytes_max, lacks=lacking(rpc), is_operators=True)
        for rpc, method in wire.METHODS.items()
    }


def lacking(rpc: str) -> Callable[[AccessKey], Need | None]:
    """Return a function that returns the right that a key lacks for any request of the RPC, or None."""
    need = RPCS[rpc].at_all
    return lambda key: key.lacks(need)
