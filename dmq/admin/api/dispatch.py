"""Entry point of admin calls for every transport: parsed, authorized by the key, recorded, masked, answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from broker_adapter.contracts.errors import Refused, Rule
from dmq.acl.guard import Authenticator
from dmq.acl.rules import AccessKey
from dmq.acl.signature import Header
from dmq.admin import admin_v1 as wire
from dmq.admin.api.access import RPCS, answer_for, lacking
from dmq.admin.api.service import AdminService
from dmq.admin.operations.trail import AdminCaller
from dmq.admin.requests.validate import HEADER_WHY_CHARS_MAX, WHY_HEADER


class AdminDispatcher:
    """Serve calls by path, authorized by ``guard`` if there is one. ``refusal_of`` turns its exceptions into gRPC
    statuses.
    """

    def __init__(self, service: AdminService, guard: Authenticator | None = None) -> None:
        self._service = service
        self._guard = guard
        self._calls = {method.path: (service.handler(rpc), method) for rpc, method in wire.METHODS.items()}

    @property
    def paths(self) -> Iterable[str]:
        """Paths that are served."""
        return self._calls

    async def serve(self, path: str, body: bytes, header: Header, address: str, key: AccessKey | None = None) -> bytes:
        """Answer a call. ``key`` is the verified key of the signature, if already checked."""
        call, method = self._calls[path]
        rpc, access = method.name, RPCS[method.name]
        if self._guard is not None and key is None:
            key = self._guard.enter(rpc, header, lacking(rpc))
        request = method.request_class.FromString(body)
        topic = await self._judge(rpc, key, request)
        activity, caller = self._service.activity, AdminCaller(key.name if key is not None else "", address)
        if access.changes(request) or activity.is_first_reading(caller, rpc, request):
            response = await activity.run(caller._replace(why=why_of(header)), rpc, request, call, topic)
        else:
            response = await call(request)
        if not getattr(request, "unmasked", False):
            await self._service.redaction.mask(request, response)
        if key is not None:
            response = answer_for(key, request, response)
        return response.SerializeToString()

    async def _judge(self, rpc: str, key: AccessKey | None, request: Any) -> str:  # noqa: ANN401 - of any RPC
        """Raise if the key lacks a right. Return the topic of the schedule or message job in the request, or empty."""
        access, found, topic = RPCS[rpc], "", ""
        if wire.Access.SCHEDULE in access.scopes:
            found = topic = await self._service.schedules.topic_of(getattr(request, "schedule", request).name)
        elif wire.Access.MESSAGE_JOB in access.scopes:
            found = topic = self._service.message_jobs.topic_of_job(request.job_id)
        elif wire.Access.JOB in access.scopes:
            found = self._service.letters.group_of_job(request.job_id)
        if isinstance(request, wire.ResumeJobRequest):
            request = self._service.letters.start_of_job(request.job_id) or request
        if self._guard is not None and key is not None:
            self._guard.check(rpc, key, access.needs(request, found))
        return topic


def why_of(header: Header) -> str:
    """Return the reason in the header of a call. Raise ``Refused`` if it cannot be stored."""
    given = header(WHY_HEADER) or ""
    why = unquote(given).strip() if len(given) <= 12 * HEADER_WHY_CHARS_MAX else None
    if why is None or len(why) > HEADER_WHY_CHARS_MAX or not why.isprintable():
        text = f"the reason may have up to {HEADER_WHY_CHARS_MAX} printable characters"
        raise Refused(Rule.REQUEST, text, value=given[:HEADER_WHY_CHARS_MAX])
    return why
