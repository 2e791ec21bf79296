"""RPCs of ``rockdmq.admin.v1.AdminService`` about clients of the public protocol."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.topics import check_group, check_topic
from broker_adapter.wire import rocketmq_v2 as public
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages import MessageCalls
from dmq.admin.requests import ClientSource, validate
from dmq.errors import StoreCorrupt


class ClientCalls:
    """RPCs about clients. Raise ``Refused`` for invalid input, and the exceptions of ``ClientSource`` and
    ``MessageCalls``.
    """

    def __init__(self, messages: MessageCalls) -> None:
        """No client is connected until ``attach``."""
        self._messages = messages
        self._clients: ClientSource | None = None

    def attach(self, clients: ClientSource) -> None:
        """Set the source of clients; called just before the public protocol is served."""
        self._clients = clients

    async def list_clients(self, request: wire.ListClientsRequest) -> wire.ListClientsResponse:
        """List the live clients."""
        group = check_group(request.group) if request.group else ""
        found = self._clients.clients(group) if self._clients is not None else ()
        return wire.ListClientsResponse(clients=found)

    async def get_client_stack(self, request: wire.GetClientStackRequest) -> wire.GetClientStackResponse:
        """Return the thread stacks of a client."""
        timeout_s = validate.check_timeout_ms(request.timeout_ms) / 1000
        return wire.GetClientStackResponse(stack=await self._connected().stack(request.client_id, timeout_s))

    async def verify_client_message(self, request: wire.VerifyClientMessageRequest) -> wire.VerifyClientMessageResponse:
        """Make a push consumer consume a stored message once."""
        timeout_s = validate.check_timeout_ms(request.timeout_ms) / 1000
        topic, message_id = check_topic(request.topic), validate.check_message_id(request.message_id)
        clients = self._connected()
        payload = (await self._messages.find(topic, message_id)).payload
        if payload is None:
            raise Refused(Rule.NOT_FOUND, "unknown message: never sent, or removed", value=message_id)
        try:
            code, text = await clients.verify(request.client_id, payload, timeout_s)
        except DecodeError as error:
            raise StoreCorrupt("the stored message cannot be read") from error
        known = public.Code.DESCRIPTOR.values_by_number.get(code)
        name = known.name if known is not None else ""
        return wire.VerifyClientMessageResponse(code=code, code_name=name, text=text)

    def _connected(self) -> ClientSource:
        if self._clients is None:
            raise Refused(Rule.NOT_FOUND, "no client is connected")
        return self._clients
