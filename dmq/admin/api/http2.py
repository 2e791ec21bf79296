"""Admin service on the project's own HTTP/2 transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog

from dmq.acl.guard import Authenticator
from dmq.acl.rules import AccessKey
from dmq.admin.api.dispatch import AdminDispatcher
from dmq.admin.api.service import AdminService, refusal_of
from dmq.http2 import CallEnded, Method, RequestHeaders, Status, Unary

log = structlog.get_logger("dmq.admin")


def methods(service: AdminService, guard: Authenticator | None = None) -> Mapping[str, Method]:
    """Return the methods of the admin service, by path, authorized by ``guard`` if there is one."""
    dispatcher = AdminDispatcher(service, guard)
    return {path: Unary(_answer(dispatcher, path)) for path in dispatcher.paths}


def _answer(dispatcher: AdminDispatcher, path: str) -> Callable[[bytes, RequestHeaders], Awaitable[bytes]]:
    async def answer(body: bytes, headers: RequestHeaders) -> bytes:
        admission = headers.admission
        try:
            if admission is None:
                return await dispatcher.serve(path, body, headers.get, "")
            if admission.refusal is not None:
                raise admission.refusal
            key = admission.credential if isinstance(admission.credential, AccessKey) else None
            return await dispatcher.serve(path, body, headers.get, admission.address, key)
        except Exception as error:  # outermost layer: every error becomes a status; internal ones are logged
            refusal = refusal_of(error)
            if refusal.is_ours:
                log.exception("admin_call_failed", rpc=path.rpartition("/")[2])
            raise CallEnded(Status(refusal.code), refusal.text) from error

    return answer
