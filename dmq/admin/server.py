"""The admin service on grpcio's asyncio server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import structlog
from google.protobuf.message import Message

from dmq.admin import admin_v1 as wire
from dmq.admin.service import AdminService, Handler, handlers, refusal_of

log = structlog.get_logger("dmq.admin")

SERVICE_NAME = wire.SERVICE  # what reflection lists and health answers for

_STATUS = {code.value[0]: code for code in grpc.StatusCode}


def grpc_handler(service: AdminService) -> grpc.GenericRpcHandler:
    """Return what ``server.add_generic_rpc_handlers`` takes."""
    by_path = handlers(service)
    return grpc.method_handlers_generic_handler(
        wire.SERVICE,
        {
            name: grpc.unary_unary_rpc_method_handler(
                _answer(name, by_path[method.path]),
                request_deserializer=method.request_class.FromString,
                response_serializer=method.response_class.SerializeToString,
            )
            for name, method in wire.METHODS.items()
        },
    )


def _answer(
    name: str, handler: Handler
) -> Callable[[Message, grpc.aio.ServicerContext[Message, Message]], Awaitable[Message]]:
    async def answer(request: Message, context: grpc.aio.ServicerContext[Message, Message]) -> Message:
        try:
            return await handler.call(request)
        except Exception as error:  # the rim: every error becomes a status, and ours are logged
            refusal = refusal_of(error)
            if refusal.is_ours:
                log.exception("admin_call_failed", rpc=name)
            await context.abort(_STATUS[refusal.code], refusal.text)

    return answer
