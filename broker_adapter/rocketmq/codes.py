"""The one table that maps status codes of a proxy to our errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc

from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.wire import rocketmq_v2 as wire

RULES: Mapping[int, Rule] = MappingProxyType(
    {
        wire.BAD_REQUEST: Rule.REQUEST,
        wire.ILLEGAL_ACCESS_POINT: Rule.ACCESS_POINT,
        wire.ILLEGAL_TOPIC: Rule.TOPIC,
        wire.ILLEGAL_CONSUMER_GROUP: Rule.GROUP,
        wire.ILLEGAL_MESSAGE_TAG: Rule.TAG,
        wire.ILLEGAL_MESSAGE_KEY: Rule.KEY,
        wire.ILLEGAL_MESSAGE_GROUP: Rule.MESSAGE_GROUP,
        wire.ILLEGAL_MESSAGE_PROPERTY_KEY: Rule.PROPERTY_KEY,
        wire.INVALID_TRANSACTION_ID: Rule.TRANSACTION_ID,
        wire.ILLEGAL_MESSAGE_ID: Rule.MESSAGE_ID,
        wire.ILLEGAL_FILTER_EXPRESSION: Rule.FILTER,
        wire.ILLEGAL_INVISIBLE_TIME: Rule.INVISIBLE_TIME,
        wire.ILLEGAL_DELIVERY_TIME: Rule.DELIVERY_TIME,
        wire.INVALID_RECEIPT_HANDLE: Rule.RECEIPT_HANDLE,
        wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: Rule.MESSAGE_TYPE,
        wire.UNRECOGNIZED_CLIENT_TYPE: Rule.CLIENT_TYPE,
        wire.MESSAGE_CORRUPTED: Rule.MESSAGE_CORRUPTED,
        wire.CLIENT_ID_REQUIRED: Rule.CLIENT_ID,
        wire.ILLEGAL_POLLING_TIME: Rule.POLLING_TIME,
        wire.ILLEGAL_OFFSET: Rule.OFFSET,
        wire.ILLEGAL_LITE_TOPIC: Rule.TOPIC,
        wire.INVALID_CLIENT_PROPERTIES: Rule.REQUEST,
        wire.UNAUTHORIZED: Rule.UNAUTHORIZED,
        wire.PAYMENT_REQUIRED: Rule.FORBIDDEN,
        wire.FORBIDDEN: Rule.FORBIDDEN,
        wire.NOT_FOUND: Rule.NOT_FOUND,
        wire.MESSAGE_NOT_FOUND: Rule.NOT_FOUND,
        wire.TOPIC_NOT_FOUND: Rule.TOPIC_UNKNOWN,
        wire.CONSUMER_GROUP_NOT_FOUND: Rule.GROUP_UNKNOWN,
        wire.OFFSET_NOT_FOUND: Rule.OFFSET_UNKNOWN,
        wire.PAYLOAD_TOO_LARGE: Rule.BODY_SIZE,
        wire.MESSAGE_BODY_TOO_LARGE: Rule.BODY_SIZE,
        wire.MESSAGE_BODY_EMPTY: Rule.BODY_EMPTY,
        wire.PRECONDITION_FAILED: Rule.REQUEST,
        wire.REQUEST_HEADER_FIELDS_TOO_LARGE: Rule.REQUEST,
        wire.MESSAGE_PROPERTIES_TOO_LARGE: Rule.PROPERTIES_SIZE,
        wire.NOT_IMPLEMENTED: Rule.UNSUPPORTED,
        wire.UNSUPPORTED: Rule.UNSUPPORTED,
        wire.VERSION_UNSUPPORTED: Rule.UNSUPPORTED,
        wire.VERIFY_FIFO_MESSAGE_UNSUPPORTED: Rule.UNSUPPORTED,
        wire.FAILED_TO_CONSUME_MESSAGE: Rule.REQUEST,
    }
)
_TOO_MANY = frozenset({wire.TOO_MANY_REQUESTS, wire.LITE_TOPIC_QUOTA_EXCEEDED, wire.LITE_SUBSCRIPTION_QUOTA_EXCEEDED})
# The outcome of the call is unknown. After a persistence timeout of a disk or slave the message is most likely stored.
_IN_DOUBT = frozenset(
    {
        wire.REQUEST_TIMEOUT,
        wire.INTERNAL_ERROR,
        wire.INTERNAL_SERVER_ERROR,
        wire.HA_NOT_AVAILABLE,
        wire.PROXY_TIMEOUT,
        wire.MASTER_PERSISTENCE_TIMEOUT,
        wire.SLAVE_PERSISTENCE_TIMEOUT,
    }
)
KNOWN = RULES.keys() | _TOO_MANY | _IN_DOUBT | {wire.OK, wire.MULTIPLE_RESULTS}

_TRANSPORT_RULES: Mapping[grpc.StatusCode, Rule] = MappingProxyType(
    {
        grpc.StatusCode.UNAUTHENTICATED: Rule.UNAUTHORIZED,
        grpc.StatusCode.PERMISSION_DENIED: Rule.FORBIDDEN,
        grpc.StatusCode.UNIMPLEMENTED: Rule.UNSUPPORTED,
        grpc.StatusCode.INVALID_ARGUMENT: Rule.REQUEST,
    }
)
_TEXT_CHARS_MAX = 300
_SHOWN_CLASS_NUMBER = 10_000  # the first digit of a code is its class


def error_of(status: wire.Status, address: str) -> BrokerError | None:
    """Return the error for a status, or ``None`` for OK. Unknown codes are mapped by their class."""
    code = int(status.code)
    if code == wire.OK:
        return None
    said = f"{_text(status.message)} ({code}, from {address})"
    if code in RULES:
        return Refused(RULES[code], said, code=code)
    if code in _TOO_MANY:
        return Overloaded(f"the cluster refuses: {said}", limit="its own")
    if code not in _IN_DOUBT and code // _SHOWN_CLASS_NUMBER == 4:
        return Refused(Rule.REQUEST, said, code=code)
    return BrokerUnavailable(f"the cluster failed: {said}")


def check(status: wire.Status, address: str) -> None:
    """Raise the error for a status that is not OK."""
    if (error := error_of(status, address)) is not None:
        raise error


def error_of_call(error: grpc.aio.AioRpcError, address: str) -> BrokerError:
    """Return our error for a call without an answer."""
    code = error.code()
    said = f"{_text(error.details() or '')} ({code.name}, calling {address})"
    if code in _TRANSPORT_RULES:
        rule = _TRANSPORT_RULES[code]
        if rule is Rule.REQUEST and "group not found" in said:
            rule = Rule.GROUP_UNKNOWN
        return Refused(rule, said)
    return BrokerUnavailable(f"no answer from the cluster: {said}")


def _text(said: str) -> str:
    text = " ".join(said.split())
    return text if len(text) <= _TEXT_CHARS_MAX else text[:_TEXT_CHARS_MAX] + "..."
