"""RPC of ``AdminService`` that lists the messages of a topic: a request in, a response or an exception out."""

from __future__ import annotations

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import PROPERTIES_BYTES_MAX
from broker_adapter.contracts.own_keys import check_own_key
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.messages import QUEUED, WAITING, Messages, Wanted
from dmq.admin.requests import validate
from dmq.runtime.slices import in_slices

_TOKEN_CHARS_MAX = 32 * 1024  # it contains an offset for each queue


class ListingCalls:
    """RPC of listings. Raise ``Refused`` for invalid input; exceptions of the broker pass through."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    async def list_messages(self, request: wire.ListMessagesRequest) -> wire.ListMessagesResponse:
        """List a page of the messages of a topic."""
        topic, limit = check_topic(request.topic), validate.check_limit(request.limit)
        token = validate.check_token(request.token, _TOKEN_CHARS_MAX)
        page = await self._messages.messages(topic, _wanted(request), token=token, limit=limit)
        return wire.ListMessagesResponse(
            messages=[
                wire.ListedMessage(
                    state=wire.MessageState.Name(each.state),
                    message_id=each.message_id,
                    deliver_at_ms=each.deliver_at_ms,
                    stored_at_ms=each.stored_at_ms,
                    queue_id=each.queue_id,
                    queue_offset=each.queue_offset,
                    content=each.content,
                    is_held=each.is_held,
                )
                async for each in in_slices(page.messages)
            ],
            next_token=page.next_token,
        )


def _wanted(request: wire.ListMessagesRequest) -> Wanted:
    if request.state not in {0, WAITING, QUEUED}:
        raise Refused(Rule.REQUEST, "unknown message state", value=int(request.state), limit="WAITING, QUEUED")
    validate.check_times(request.due_after_ms, request.due_before_ms)
    for text in (request.key, request.tag):
        if len(text.encode()) > PROPERTIES_BYTES_MAX:
            raise Refused(Rule.REQUEST, "a key or a tag is too long", limit=f"{PROPERTIES_BYTES_MAX} bytes")
    return Wanted(
        request.state,
        request.due_after_ms,
        request.due_before_ms,
        request.key,
        request.tag,
        request.newest_first,
        check_own_key(request.own_key) if request.own_key else "",
    )
