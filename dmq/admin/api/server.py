"""Admin service on grpcio's asyncio server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import grpc
import structlog

from dmq.acl.guard import Authenticator
from dmq.acl.signature import Header
from dmq.admin import admin_v1 as wire
from dmq.admin.api.dispatch import AdminDispatcher
from dmq.admin.api.service import AdminService, refusal_of
from dmq.http2 import address_of

log = structlog.get_logger("dmq.admin")

SERVICE_NAME = wire.SERVICE  # the name in reflection and health checks

_STATUS = {code.value[0]: code for code in grpc.StatusCode}


def grpc_handler(service: AdminService, guard: Authenticator | None = None) -> grpc.GenericRpcHandler:
    """Return a handler for ``server.add_generic_rpc_handlers``, authorized by ``guard`` if there is one."""
    dispatcher = AdminDispatcher(service, guard)
    return grpc.method_handlers_generic_handler(
        wire.SERVICE,
        {
            # Bytes in and bytes out: an unreadable request gets a regular answer, not an exception in grpcio's log.
            name: grpc.unary_unary_rpc_method_handler(_answer(dispatcher, name, method.path))
            for name, method in wire.METHODS.items()
        },
    )


def _header_of(context: grpc.aio.ServicerContext[bytes, bytes]) -> Header:
    metadata = {name: str(value) for name, value in context.invocation_metadata() or ()}
    return metadata.get


def _address_of(context: grpc.aio.ServicerContext[bytes, bytes]) -> str:
    """Return the quota address of a peer such as ``ipv4:10.0.0.7:5123`` or ``ipv6:[::1]:5123``, possibly
    percent-encoded.
    """
    kind, _, place = unquote(context.peer()).partition(":")
    host = place.rpartition(":")[0].strip("[]")
    return address_of((host,) if kind.startswith("ip") else None)


def _answer(
    dispatcher: AdminDispatcher, name: str, path: str
) -> Callable[[bytes, grpc.aio.ServicerContext[bytes, bytes]], Awaitable[bytes]]:
    async def answer(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            return await dispatcher.serve(path, body, _header_of(context), _address_of(context))
        except Exception as error:  # outermost layer: every error becomes a status; internal ones are logged
            refusal = refusal_of(error)
            if refusal.is_ours:
                log.exception("admin_call_failed", rpc=name)
            await context.abort(_STATUS[refusal.code], refusal.text)

    return answer
