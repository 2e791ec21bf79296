"""The admin service on our own transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import structlog

from dmq.acl.guard import Guard
from dmq.admin.access import Admit, admitting
from dmq.admin.service import AdminService, Handler, handlers, refusal_of
from dmq.http2 import CallEnded, Method, RequestHeaders, Status, Unary

log = structlog.get_logger("dmq.admin")


def methods(service: AdminService, guard: Guard | None = None) -> Mapping[str, Method]:
    """Return the methods of the admin service, by path; behind ``guard``, if there is one."""
    return {path: Unary(_answer(path, handler, admitting(path, guard))) for path, handler in handlers(service).items()}


def _answer(path: str, handler: Handler, admit: Admit) -> Callable[[bytes, RequestHeaders], Awaitable[bytes]]:
    parse = handler.request_class.FromString

    async def answer(body: bytes, headers: RequestHeaders) -> bytes:
        try:
            admission = headers.admission
            if admission is not None and admission.refusal is not None:
                raise admission.refusal
            request = parse(body)
            admit(headers.get, request)
            return (await handler.call(request)).SerializeToString()
        except Exception as error:  # the rim: every error becomes a status, and ours are logged
            refusal = refusal_of(error)
            if refusal.is_ours:
                log.exception("admin_call_failed", rpc=path.rpartition("/")[2])
            raise CallEnded(Status(refusal.code), refusal.text) from error

    return answer
