"""The route that sends messages, by the public protocol."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag, TypeAdapter, field_validator, model_validator

from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX, MESSAGES_PER_SEND_MAX
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.contracts.own_keys import ON_SAME_KEY, OWN_KEY
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.trace_context import TRACEPARENT
from broker_adapter.wire import rocketmq_v2 as public
from broker_adapter.wire.mapping import NOT_AFTER_MS, set_timestamp
from dmq.http_api.callers import Metadata
from dmq.http_api.daemon import DaemonChannel
from dmq.http_api.problems import IN_DOUBT, Problem, of_status
from dmq.http_api.schemas import Base64, Request
from dmq.tracing import is_traceparent

DELAY_MS: Final = "TIMER_DELAY_MS"  # user property: a delay that the daemon counts from its own time

_Time = Annotated[int, Field(ge=1, le=DELIVER_AT_MS_MAX)]
_BODIES: Final = ("body", "body_base64", "body_json")


class NewMessage(Request):
    """A message to send, with one of the three bodies."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # not of all models: it reads the source of their module

    message_id: str | None = None
    """Id of the message. A repeated send with the same id is stored once. Without one, the answer has a new one."""
    body: str | None = None
    """Text, stored as UTF-8."""
    body_base64: Base64 | None = None
    """Bytes in base64."""
    body_json: JsonValue = None
    """JSON value, stored as compact UTF-8."""
    tag: str | None = None
    """One word to filter by."""
    keys: list[str] | None = None
    """Words to look the message up by."""
    properties: dict[str, str] | None = None
    """User properties."""
    message_group: str | None = None
    """Messages of one group keep their order."""
    delay_ms: _Time | None = None
    """Delay in milliseconds from the daemon's time. Not together with deliver_at_ms."""
    deliver_at_ms: _Time | None = None
    """Delivery time in epoch milliseconds. A past time means now."""
    not_after_ms: _Time | None = None
    """Expiry in epoch milliseconds: a message that is not delivered by then becomes a dead letter."""
    own_key: str | None = None
    """At most one pending message of the topic has this key."""
    on_same_key: Literal["replace", "keep"] | None = None
    """Replace the pending message with the same own key, or keep it. Default: replace."""

    @field_validator("body_json")
    @classmethod
    def _check_numbers(cls, value: JsonValue) -> JsonValue:
        _compact(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len([name for name in _BODIES if name in self.model_fields_set]) != 1:
            raise ValueError(f"give exactly one of these fields: {', '.join(_BODIES)}")
        if self.delay_ms is not None and self.deliver_at_ms is not None:
            raise ValueError("give one of these fields only: delay_ms, deliver_at_ms")
        if self.on_same_key is not None and self.own_key is None:
            raise ValueError("on_same_key requires own_key")
        return self

    def payload(self) -> bytes:
        """Return the body as bytes."""
        if self.body is not None:
            return self.body.encode()
        if self.body_base64 is not None:
            return self.body_base64
        return _compact(self.body_json)


def _compact(value: JsonValue) -> bytes:
    """Return JSON. Raise ``ValueError`` for a number that is too large for it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _kind(value: object) -> str:
    return "batch" if isinstance(value, list) else "one"


KINDS: Final = frozenset(("one", "batch"))  # the first part of an error's path
MESSAGES: Final[TypeAdapter[Any]] = TypeAdapter(
    Annotated[
        Annotated[NewMessage, Tag("one")]
        | Annotated[list[NewMessage], Field(min_length=1, max_length=MESSAGES_PER_SEND_MAX), Tag("batch")],
        Discriminator(_kind),
    ]
)
_SENT: Final = {
    "type": "object",
    "properties": {
        "topic": {"type": "string"},
        "message_id": {"type": "string", "description": "Of a kept message with the same own key: its id"},
        "recall_handle": {"type": ["string", "null"], "description": "Of a delayed message"},
    },
    "required": ["topic", "message_id", "recall_handle"],
}
SENT: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"messages": {"type": "array", "items": _SENT}},
    "required": ["messages"],
}


async def send(
    daemon: DaemonChannel,
    caller: Metadata,
    topic: str,
    given: NewMessage | list[NewMessage],
    clock: Clock,
    traceparent: str = "",
) -> dict[str, object]:
    """Send one message or a batch, which is stored as a whole or not at all. It is durable on return.

    A valid ``traceparent`` becomes a property of the messages without one.
    """
    messages = given if isinstance(given, list) else [given]
    now_ms = clock.now_ms()
    request = public.SendMessageRequest(messages=[_wire(topic, each, now_ms) for each in messages])
    if is_traceparent(traceparent):
        for each in request.messages:
            if TRACEPARENT not in each.user_properties:
                each.user_properties[TRACEPARENT] = traceparent
    ids = [each.system_properties.message_id for each in request.messages]
    try:
        response: public.SendMessageResponse = await daemon.call(public.METHODS["SendMessage"], request, caller)
        _check(response, is_batch=isinstance(given, list))
    except Problem as problem:
        if problem.status in IN_DOUBT:
            problem.members["message_ids"] = ids
        raise
    sent = [
        {"topic": topic, "message_id": each.message_id, "recall_handle": each.recall_handle or None}
        for each in response.entries
    ]
    return {"messages": sent}


def _wire(topic: str, given: NewMessage, now_ms: int) -> public.Message:
    message = public.Message(topic=public.Resource(name=topic), user_properties=given.properties, body=given.payload())
    system, properties = message.system_properties, message.user_properties
    system.message_id = given.message_id or new_message_id(now_ms, os.getpid(), secrets.token_bytes(10))
    system.keys.extend(given.keys or [])
    system.body_encoding = public.IDENTITY
    set_timestamp(system.born_timestamp, now_ms)
    system.message_type = public.FIFO if given.message_group else public.NORMAL
    if given.tag is not None:
        system.tag = given.tag
    if given.message_group is not None:
        system.message_group = given.message_group
    if given.deliver_at_ms is not None:
        set_timestamp(system.delivery_timestamp, given.deliver_at_ms)
        system.message_type = public.DELAY
    options = {
        DELAY_MS: given.delay_ms,
        NOT_AFTER_MS: given.not_after_ms,
        OWN_KEY: given.own_key,
        ON_SAME_KEY: given.on_same_key,
    }
    properties.update({name: str(value) for name, value in options.items() if value is not None})
    return message


def _check(response: public.SendMessageResponse, *, is_batch: bool) -> None:
    statuses: Sequence[public.Status] = [response.status, *(each.status for each in response.entries)]
    failed = next((each for each in statuses if each.code not in {public.OK, public.MULTIPLE_RESULTS}), None)
    if failed is None:
        return
    refused = [at for at, each in enumerate(response.entries) if each.status == failed]
    if is_batch and refused:
        raise of_status(failed, errors=[{"pointer": f"/{refused[0]}", "detail": failed.message}])
    raise of_status(failed)
